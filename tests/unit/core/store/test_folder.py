"""A store of files: what the conformance suite does not ask."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from lastcall import errors
from lastcall.core.store.folder import FolderStore
from lastcall.storage import files


def test_nothing_is_written_by_looking(tmp_path: Path) -> None:
    store = FolderStore(tmp_path / "agreement")
    assert store.get("key", 0) is None and store.get_many(["a", "b"]) == [None, None]
    assert not (tmp_path / "agreement").exists()


def test_no_key_leaves_the_folder(tmp_path: Path) -> None:
    store = FolderStore(tmp_path / "agreement")
    for key in ("../up", "/etc/passwd", "..", "a/b", "."):
        store.set(f"{key} ", b"x")
        assert store.get(f"{key} ", 0) == b"x"
    assert [path.name for path in tmp_path.iterdir()] == ["agreement"]
    assert len(list((tmp_path / "agreement").iterdir())) == 5  # and nothing half written is left


def test_another_store_finds_the_counter_where_it_stands(tmp_path: Path) -> None:
    first = FolderStore(tmp_path)
    assert [first.add("count", amount) for amount in (1, 1 << 32, -5)] == [1, 1 + (1 << 32), (1 << 32) - 4]
    assert FolderStore(tmp_path).add("count", 0) == (1 << 32) - 4
    assert first.get_many(["count", "count+1"])[0] == str((1 << 32) - 4).encode()


def test_processes_with_the_same_number_do_not_take_each_other_for_themselves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = FolderStore(tmp_path)
    assert store.add("count", 1) == 1
    monkeypatch.setattr(files, "_PROCESS", "another container")
    monkeypatch.setattr(files, "_numbers", iter(range(100)))
    assert FolderStore(tmp_path).add("count", 1) == 2


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_that_may_not_be_written_is_a_lost_store(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(errors.StoreLost, match="cannot be used: Permission denied"):
        FolderStore(tmp_path / "agreement").claim("key", b"x")


def test_a_file_in_the_way_is_a_lost_store(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    store = FolderStore(tmp_path / "file")
    for call in (
        lambda: store.set("key", b"x"),
        lambda: store.claim("key", b"x"),
        lambda: store.add("key", 1),
        lambda: store.get("key", 9),
    ):
        with pytest.raises(errors.StoreLost, match="could not use .*file: "):
            call()
