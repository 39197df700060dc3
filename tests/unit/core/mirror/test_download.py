"""What an incarnation takes from the place of a mirror: the newest that is whole, if it is newer, and nothing
that does harm."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from helpers.core import mirrors
from helpers.core.bare_core import flip
from helpers.core.mirrors import Failing, Life, Watched
from lastcall import errors
from lastcall.core.checkpoint import record as records
from lastcall.core.engine import digest
from lastcall.storage import files as storage


@pytest.fixture
def life(tmp_path: Path, place: Watched) -> Iterator[Life]:
    """Whose steps 3, 4 and 5 are in the place."""
    with Life(tmp_path / "run", place) as life:
        assert life.start()
        for step in (3, 4, 5):
            life.copied(step)
        place.calls.clear()
        yield life


@pytest.fixture
def other(tmp_path: Path, place: Watched, life: Life) -> Iterator[Life]:
    """The next incarnation, in a directory of its own."""
    with Life(tmp_path / "elsewhere", place) as other:
        yield other


def test_a_new_directory_gets_the_newest_and_nothing_else(life: Life, other: Life, place: Watched) -> None:
    assert other.start()
    assert other.state.contents() == life.state.contents()
    assert {name.split("/")[0] for name in place.done("fetch")} == {"checkpoint-5"}
    assert [entry.path.name for entry in other.catalog.entries()] == ["checkpoint-5"]


def test_an_older_directory_gets_what_it_lacks(life: Life, other: Life, place: Watched) -> None:
    assert other.start()
    life.copied(6)
    with_older = other.mirror.take_over(lambda: False)
    assert with_older
    assert [entry.record.step for entry in other.catalog.entries()] == [6, 5]


def test_a_directory_that_is_as_new_gets_nothing(life: Life, place: Watched) -> None:
    assert life.start() and life.resumed == 5
    assert place.done("fetch") == []


def test_a_directory_that_is_newer_gets_nothing(life: Life, place: Watched) -> None:
    life.save(6)
    assert life.start() and life.resumed == 6
    assert place.done("fetch") == []


def damage_a_byte(folder: Path) -> None:
    flip(folder / "model.safetensors", -5)


def cut_a_file(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(b"short")


def lose_a_file(folder: Path) -> None:
    (folder / "model.safetensors").unlink()


def garble_the_record(folder: Path) -> None:
    (folder / records.NAME).write_bytes(b"\xff{")


@pytest.mark.parametrize("harm", [damage_a_byte, cut_a_file, lose_a_file, garble_the_record])
def test_a_damaged_copy_is_passed_over_and_the_next_older_one_serves(
    life: Life, other: Life, place: Watched, caplog: pytest.LogCaptureFixture, harm: Callable[[Path], None]
) -> None:
    harm(place.root / "checkpoint-5")
    assert other.start() and other.resumed == 4
    assert f"{place.url}/checkpoint-5 is" in caplog.text and "was skipped" in caplog.text
    assert [path.name for path in other.root.glob("checkpoint-*")] == ["checkpoint-4"]


def test_what_is_cut_or_missing_is_known_before_anything_is_fetched_of_it(
    life: Life, other: Life, place: Watched
) -> None:
    lose_a_file(place.root / "checkpoint-5")
    assert other.start()
    assert not any(name.startswith("checkpoint-5/") for name in place.done("fetch"))


def forged(folder: Path, change: Callable[[dict[str, object]], None]) -> None:
    """A record that says something else, with a digest of its own that holds."""
    body = json.loads((folder / records.NAME).read_bytes())
    del body["digest"]
    change(body)
    body["digest"] = digest.named(body["algorithm"])(json.dumps(body, sort_keys=True).encode())
    (folder / records.NAME).write_text(json.dumps(body))


def rename_first(name: str) -> Callable[[dict[str, object]], None]:
    def change(body: dict[str, object]) -> None:
        body["files"][0]["name"] = name  # type: ignore[index]

    return change


@pytest.mark.parametrize("name", ["../../evil", "/etc/evil", "a/../../evil", "lastcall.json", ".."])
def test_a_record_that_names_files_elsewhere_is_refused(
    life: Life, other: Life, place: Watched, tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    forged(place.root / "checkpoint-5", rename_first(name))
    assert other.start() and other.resumed == 4
    assert "which is not a plain name in its folder" in caplog.text
    assert not any(path.name == "evil" for path in tmp_path.rglob("*"))


def test_a_record_with_digests_of_other_bytes_is_refused(life: Life, other: Life, place: Watched) -> None:
    def change(body: dict[str, object]) -> None:
        file = next(file for file in body["files"] if file["name"] == "model.safetensors")  # type: ignore[attr-defined]
        file["chunks"] = [digest.of(b"something else") for _ in file["chunks"]]
        file["digest"] = digest.over(tuple(file["chunks"]), digest.named(str(body["algorithm"])))

    forged(place.root / "checkpoint-5", change)
    assert other.start() and other.resumed == 4


def test_a_folder_whose_record_is_of_another_step_is_what_its_record_says(
    life: Life, other: Life, place: Watched
) -> None:
    (place.root / "checkpoint-5").rename(place.root / "checkpoint-77")
    assert other.start() and other.resumed == 5
    assert [entry.path.name for entry in other.catalog.entries()] == ["checkpoint-5"]


def test_a_notice_while_fetching_ends_it_and_leaves_the_directory_as_it_was(
    life: Life, other: Life, place: Watched
) -> None:
    place.hook = held = mirrors.Held("fetch", "")

    def noticed() -> bool:
        if held.there.is_set():
            held.let_go()
        return held.there.is_set()

    assert not other.start(noticed)
    assert held.there.is_set() and not other.catalog.entries()
    assert not any(path.name.startswith("fetched") for path in other.catalog.staging.iterdir())
    assert other.start() and other.resumed == 5


def test_a_notice_is_heard_although_the_store_does_not_answer(
    life: Life, other: Life, place: Watched
) -> None:
    place.hook = held = mirrors.Held("fetch", "model")
    assert not other.start(held.there.is_set)
    held.let_go()


def test_a_place_that_fails_is_an_error_and_no_fresh_start(life: Life, other: Life, place: Watched) -> None:
    place.hook = Failing("fetch")
    with pytest.raises(errors.StorageError, match="the network is down"):
        other.start()
    assert not other.catalog.entries()
    assert other.start() and other.resumed == 5


def test_a_directory_without_room_is_an_error_and_no_fresh_start(
    life: Life, other: Life, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(storage.Files, "free_bytes", lambda self, path: 1000)
    with pytest.raises(errors.NoSpaceError, match="has no room for checkpoint-5"):
        other.start()


def test_checkpoints_of_other_runs_are_left_alone(tmp_path: Path, place: Watched) -> None:
    with Life(tmp_path / "one", place, run="one", limit=1) as one:
        one.start()
        for step in (7, 8, 9):
            one.copied(step)
        theirs = place.checkpoints()
        place.hook = Failing("send", "optimizer", error=errors.StorageRefused)
        one.mirror.push(one.save(10))
        assert not one.mirror.settle()
    with Life(tmp_path / "two", place, run="two", limit=1) as two:
        assert two.start() and two.resumed is None
        for step in range(1, 10):
            two.copied(step)
    assert place.checkpoints() == sorted([*theirs, "checkpoint-8.replaced-0", "checkpoint-9.replaced-0"])
    assert "checkpoint-10" in place.folders()  # it may still be copying
    with Life(tmp_path / "three", place, run="one") as again:
        assert again.start()
        assert again.state.value == 9 and again.catalog.entries()[0].record.run == "one"


def test_a_partial_one_is_taken_only_where_no_complete_one_is(
    life: Life, other: Life, place: Watched
) -> None:
    record = records.parse((place.root / "checkpoint-5" / records.NAME).read_bytes())
    partial = dataclasses.replace(record, missing=("optimizer.safetensors",), exact=False, because="no time")
    (place.root / "checkpoint-5" / records.NAME).write_bytes(partial.to_json())
    assert other.start() and other.resumed == 4


def test_an_older_one_that_somebody_refers_to_is_brought(
    life: Life, other: Life, caplog: pytest.LogCaptureFixture
) -> None:
    assert other.start()
    other.mirror.bring("checkpoint-3")
    assert [entry.record.step for entry in other.catalog.entries()] == [5, 3]
    other.mirror.bring("checkpoint-99")
    assert not caplog.records


def test_what_cannot_be_brought_is_said_and_no_more(
    life: Life, other: Life, place: Watched, caplog: pytest.LogCaptureFixture
) -> None:
    assert other.start()
    place.hook = Failing("fetch")
    other.mirror.bring("checkpoint-3")
    assert "checkpoint-3 could not be fetched" in caplog.text
    assert [entry.record.step for entry in other.catalog.entries()] == [5]
