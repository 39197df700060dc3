"""How an incarnation begins and ends with a mirror: which run it is, whom it refuses, what it takes along at
the very end."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from helpers.core import mirrors
from helpers.core.mirrors import Failing, Life, Watched
from lastcall import errors
from lastcall.core.mirror.remote_departure import NAME as LEAVING
from lastcall.storage import objects
from lastcall.storage.objects import FolderStore


@pytest.fixture
def life(tmp_path: Path, place: Watched) -> Iterator[Life]:
    with Life(tmp_path / "run", place) as life:
        yield life


def identity(life: Life) -> dict[str, object]:
    return dict(json.loads((life.catalog.private / "run.json").read_text()))


@pytest.mark.parametrize(("operation", "name"), [("names", ""), ("read", "leaving"), ("read", "run.json")])
def test_a_place_that_refuses_is_a_wrong_setting(
    life: Life, place: Watched, operation: str, name: str
) -> None:
    place.hook = Failing(operation, name, error=errors.StorageRefused)
    with pytest.raises(errors.ConfigError, match="LASTCALL_MIRROR: .*the network is down") as raised:
        life.start()
    assert raised.value.code == 78


def test_a_place_that_cannot_be_written_to_is_a_wrong_setting(life: Life, place: Watched) -> None:
    assert life.start()
    place.hook = Failing("write", error=errors.StorageRefused)
    with pytest.raises(errors.ConfigError, match="LASTCALL_MIRROR: "):
        life.mirror.note("r", 1)


@pytest.mark.parametrize("operation", ["names", "read"])
def test_a_place_that_cannot_be_reached_is_an_error_and_no_fresh_start(
    life: Life, place: Watched, operation: str
) -> None:
    place.hook = Failing(operation)
    with pytest.raises(errors.StorageError):
        life.start()


def test_a_file_where_the_folder_should_be_is_a_wrong_setting(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with Life(tmp_path / "run", FolderStore(tmp_path / "file")) as life:
        with pytest.raises(errors.ConfigError, match="LASTCALL_MIRROR: file://.*could not be"):
            life.start()
            life.mirror.note("r", 1)


def test_a_disk_that_is_gone_does_not_look_like_an_empty_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def gone(path: object) -> None:
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))

    folder = objects.opened(f"file://{tmp_path}")
    monkeypatch.setattr(os, "scandir", gone)
    with pytest.raises(errors.StorageError, match="could not be listed"):
        folder.names()


@pytest.mark.parametrize("below", ["", "copies"])
def test_a_place_in_the_directory_itself_is_refused(tmp_path: Path, below: str) -> None:
    with Life(tmp_path / "run", FolderStore(tmp_path / "run" / below)) as life:
        with pytest.raises(errors.ConfigError, match="Name a folder elsewhere"):
            life.start()


def test_a_new_directory_takes_up_the_run_and_counts_its_incarnations_on(
    tmp_path: Path, life: Life, place: Watched
) -> None:
    assert life.start()
    life.mirror.note("abc", 4)
    with Life(tmp_path / "elsewhere", place) as other:
        assert other.start()
        assert identity(other) == {"run": "abc", "incarnations": 4}


@pytest.mark.parametrize(("here", "there", "counted"), [(2, 7, 7), (7, 2, 7)])
def test_a_directory_that_was_left_for_a_while_counts_those_that_were_elsewhere(
    life: Life, here: int, there: int, counted: int
) -> None:
    (life.catalog.private / "run.json").write_text(json.dumps({"run": "abc", "incarnations": here}))
    life.mirror.note("abc", there)
    assert life.start()
    assert identity(life)["incarnations"] == counted


def test_a_place_of_another_run_is_refused_before_anything_is_fetched(
    tmp_path: Path, life: Life, place: Watched
) -> None:
    assert life.start()
    life.copied(9)
    life.mirror.note("abc", 1)
    with Life(tmp_path / "elsewhere", place) as other:
        (other.catalog.private / "run.json").write_text(json.dumps({"run": "xyz", "incarnations": 1}))
        with pytest.raises(errors.ConfigError, match="holds another run than .*Give each run its own mirror"):
            other.start()
        assert not other.catalog.entries()


def test_runs_that_have_names_may_share_a_place(tmp_path: Path, life: Life, place: Watched) -> None:
    life.mirror.note("abc", 1)
    with Life(tmp_path / "elsewhere", place, run="xyz") as other:
        (other.catalog.private / "run.json").write_text(json.dumps({"run": "xyz", "incarnations": 1}))
        assert other.start()


@pytest.mark.parametrize(
    "data", [b"", b"\xff", b"[1]", b'{"run": 3, "incarnations": 1}', b'{"run": "a", "incarnations": "many"}']
)
def test_what_says_nothing_about_the_run_is_ignored(life: Life, place: Watched, data: bytes) -> None:
    place.write(".lastcall/run.json", data)
    assert life.start()
    assert not (life.catalog.private / "run.json").exists()


def test_the_word_for_the_next_one_is_taken_back_when_all_is_copied(life: Life, place: Watched) -> None:
    assert life.start()
    life.mirror.leaving("SIGTERM", 30.0)
    life.mirror.push(life.save(3), urgent=True)
    assert life.mirror.settle(lambda: life.world.clock.now() + mirrors.PATIENCE)
    assert LEAVING in place.done("write") and LEAVING not in place.names()
    assert place.calls.index(("remove", LEAVING)) > place.calls.index(("write", "checkpoint-3/lastcall.json"))


def test_what_lies_beside_the_checkpoints_goes_there_at_the_end(life: Life, place: Watched) -> None:
    assert life.start()
    life.save(3)
    (life.root / "checkpoint-3.damaged-0").mkdir()
    (life.root / "checkpoint-3.damaged-0" / "x").write_text("x")
    (life.root / "final" / "deep").mkdir(parents=True)
    (life.root / "final" / "model.safetensors").write_text("weights")
    (life.root / "final" / "deep" / "card.md").write_text("card")
    (life.root / "results.json").write_text("{}")
    (life.root / "link").symlink_to("/etc/passwd")
    place.calls.clear()
    life.mirror.copy_rest()
    assert place.done("send") == ["final/deep/card.md", "final/model.safetensors", "results.json"]
    assert (place.root / "final" / "model.safetensors").read_text() == "weights"


def test_what_cannot_be_taken_along_is_said(
    life: Life, place: Watched, caplog: pytest.LogCaptureFixture
) -> None:
    (life.root / "results.json").write_text("{}")
    place.hook = Failing("send")
    life.mirror.copy_rest()
    assert f"Could not upload everything in {life.root} to {place.url}" in caplog.text
