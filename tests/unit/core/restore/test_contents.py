from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from helpers.core.bare_core import World, flip
from lastcall import errors, memory
from lastcall.core.checkpoint.record import Entry
from lastcall.core.engine import writer
from lastcall.core.restore import contents
from lastcall.core.save import saver
from lastcall.types import Capture, Extent, File, FileLayout, Kind


@pytest.fixture
def entry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Entry]:
    monkeypatch.setattr(writer, "CHUNK", 4096)
    data = {"some.json": b'{"a": 1}', "sub/long.txt": b"0123456789" * 1000, "empty": b""}
    files = tuple(
        File(FileLayout(name, len(d), (Extent(0, memory.BytesSource(d)),) if d else ()))
        for name, d in data.items()
    )
    with World(tmp_path / "run") as world:
        yield world.saver.save(Capture(1, {}, (), files=files), saver.Request(Kind.JIT, "test"))


@pytest.mark.parametrize(
    ("name", "data"), [("some.json", b'{"a": 1}'), ("sub/long.txt", b"0123456789" * 1000), ("empty", b"")]
)
def test_a_small_file_comes_back_as_it_was(entry: Entry, name: str, data: bytes) -> None:
    assert contents.small_file(entry, name) == data


@pytest.mark.parametrize("name", ["other.json", "../some.json", "lastcall.json", "sub", ""])
def test_what_the_record_does_not_name_is_not_read(entry: Entry, name: str) -> None:
    with pytest.raises(errors.CheckpointError, match="the record names no"):
        contents.small_file(entry, name)


@pytest.mark.parametrize("position", [0, 4095, 4096, 9999])
def test_every_chunk_is_checked(entry: Entry, position: int) -> None:
    flip(entry.path / "sub" / "long.txt", position)
    with pytest.raises(errors.CheckpointError, match="sub/long.txt does not match its digest"):
        contents.small_file(entry, "sub/long.txt")


def test_a_file_that_is_shorter_longer_gone_or_a_link_is_refused(entry: Entry, tmp_path: Path) -> None:
    path = entry.path / "some.json"
    path.write_bytes(b'{"a": 1')
    with pytest.raises(errors.CheckpointError, match="does not match its digest"):
        contents.small_file(entry, "some.json")
    path.write_bytes(b'{"a": 1} ')
    with pytest.raises(errors.CheckpointError, match="more than the 8"):
        contents.small_file(entry, "some.json")
    os.unlink(path)
    with pytest.raises(errors.CheckpointError, match="cannot be opened"):
        contents.small_file(entry, "some.json")
    (tmp_path / "elsewhere").write_bytes(b'{"a": 1}')
    path.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(errors.CheckpointError, match="cannot be opened"):
        contents.small_file(entry, "some.json")


def test_an_empty_file_that_has_grown_is_refused(entry: Entry) -> None:
    (entry.path / "empty").write_bytes(b"x")
    with pytest.raises(errors.CheckpointError, match="more than the 0"):
        contents.small_file(entry, "empty")
