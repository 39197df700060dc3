"""How checkpoints get into the place of a mirror: whole or not at all, the newest first, and no byte
twice."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from pathlib import Path

import pytest

from helpers.core import mirrors
from helpers.core.mirrors import Failing, Held, Life, Watched
from lastcall import errors
from lastcall.core.checkpoint import record as records
from lastcall.core.checkpoint.catalog import MIRRORING
from lastcall.core.checkpoint.retention import Keep
from lastcall.core.mirror import upload
from lastcall.core.save.saver import Request
from lastcall.types import Kind

RECORD, SENTINEL = records.NAME, records.SENTINEL


@pytest.fixture
def life(tmp_path: Path, place: Watched) -> Iterator[Life]:
    with Life(tmp_path / "run", place) as life:
        assert life.start()
        yield life


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(upload, "_PAUSE", 0.001)
    monkeypatch.setattr(upload, "_LONGEST_PAUSE", 0.002)


def resumed(tmp_path: Path, place: Watched, name: str = "elsewhere") -> dict[str, object]:
    """What an incarnation with a new directory starts with."""
    with Life(tmp_path / name, place) as other:
        assert other.start()
        return other.state.contents()


def test_the_record_goes_last_and_the_sentinel_first(life: Life, place: Watched) -> None:
    entry = life.copied(3)
    writes = [call for call in place.calls if call[0] in ("write", "send", "copy", "remove")]
    assert writes[0] == ("write", f"checkpoint-3/{SENTINEL}")
    assert writes[-2:] == [("remove", f"checkpoint-3/{SENTINEL}"), ("write", f"checkpoint-3/{RECORD}")]
    assert set(place.names()) == {
        f"checkpoint-3/{name}" for name in (*(file.name for file in entry.record.files), RECORD)
    }


@pytest.mark.parametrize("number", range(12))
def test_a_copy_that_ends_anywhere_is_whole_or_no_checkpoint(
    life: Life, place: Watched, tmp_path: Path, number: int
) -> None:
    life.copied(3)
    before = life.state.contents()
    count = itertools.count()

    def cut_off(operation: str, name: str) -> None:
        if next(count) >= number:
            raise errors.StorageRefused("cut off")

    place.hook = cut_off
    life.mirror.push(life.save(4))
    whole = life.mirror.settle()
    place.hook = lambda operation, name: None
    assert resumed(tmp_path, place) == (life.state.contents() if whole else before)
    life.copied(5)
    assert place.folders() == (
        ["checkpoint-3", "checkpoint-4", "checkpoint-5"] if whole else ["checkpoint-3", "checkpoint-5"]
    )


def test_what_one_that_was_killed_has_left_is_removed_by_the_next(
    life: Life, place: Watched, tmp_path: Path
) -> None:
    life.copied(3)
    place.hook = Failing("send", "optimizer", error=errors.StorageRefused)
    life.mirror.push(life.save(4))
    assert not life.mirror.settle()
    assert place.folders() == ["checkpoint-3", "checkpoint-4"]
    (place.root / "checkpoint-4" / ".lastcall-part-1-2").write_bytes(b"half a file")
    (place.root / "checkpoint-9").mkdir()
    (place.root / "checkpoint-9" / "model.bin").write_text("somebody else's")
    with Life(tmp_path / "elsewhere", place) as other:
        assert other.start() and other.resumed == 3
        other.copied(5)
    assert place.folders() == ["checkpoint-3", "checkpoint-5", "checkpoint-9"]


def test_one_on_its_way_gives_way_to_an_urgent_one_even_where_the_store_does_not_answer(
    life: Life, place: Watched
) -> None:
    place.hook = held = Held("send", "checkpoint-3/model")
    life.mirror.push(life.save(3))
    held.wait()
    life.mirror.push(life.save(4), urgent=True)
    assert life.mirror.settle(lambda: life.world.clock.now() + mirrors.PATIENCE)
    assert place.checkpoints() == ["checkpoint-4"]
    held.let_go()


def test_one_that_is_given_up_stays_given_up(life: Life, place: Watched) -> None:
    place.hook = held = Held("send", "checkpoint-3/model")
    first, second, third = (life.save(step) for step in (3, 4, 5))
    life.mirror.push(first)
    held.wait()
    others = {f"checkpoint-3/{file.name}" for file in first.record.files} - {"checkpoint-3/model.safetensors"}
    mirrors.until(lambda: others <= place.names().keys())
    life.mirror.push(second, urgent=True)
    life.mirror.push(third)  # at once: the one on its way has not noticed yet
    held.let_go()
    assert life.mirror.settle()
    assert place.checkpoints() == ["checkpoint-5"]


def test_one_that_waits_gives_way_to_a_newer_one_and_one_on_its_way_does_not(
    life: Life, place: Watched
) -> None:
    place.hook = held = Held("send", "checkpoint-3/model")
    for step in (3, 4, 5):
        life.mirror.push(life.save(step))
        held.wait()
    held.let_go()
    assert life.mirror.settle()
    assert place.checkpoints() == ["checkpoint-3", "checkpoint-5"]


def test_what_is_pruned_here_while_it_waits_is_copied_all_the_same(
    life: Life, place: Watched, tmp_path: Path
) -> None:
    place.hook = held = Held("send", "checkpoint-3/model")
    life.mirror.push(life.save(3))
    held.wait()
    life.mirror.push(life.save(4))
    wanted = life.state.contents()
    for step in (5, 6, 7):
        life.save(step)
        life.catalog.prune(Keep(1))
    assert not (life.root / "checkpoint-4").exists()
    held.let_go()
    assert life.mirror.settle()
    assert place.checkpoints() == ["checkpoint-3", "checkpoint-4"]
    assert resumed(tmp_path, place) == wanted
    assert list((life.catalog.private / MIRRORING).iterdir()) == []


def test_links_that_a_killed_one_has_left_are_removed_and_what_they_link_to_is_whole(
    life: Life, place: Watched
) -> None:
    place.hook = held = Held("send", "checkpoint-3/model")
    life.mirror.push(life.save(3))
    held.wait()
    wanted = life.state.contents()
    life.catalog.clean()
    life.save(4)  # would be written over what it took for spare space
    assert not (life.catalog.private / MIRRORING).exists()
    (life.root / "checkpoint-4" / RECORD).unlink()
    assert life.world.restore(life.state) is not None and life.state.contents() == wanted
    held.let_go()


@pytest.mark.parametrize(
    ("limit", "kept"), [(1, [5, 6]), (2, [5, 6]), (3, [4, 5, 6]), (None, [1, 2, 3, 4, 5, 6])]
)
def test_rotation_over_there_follows_the_limit_and_keeps_the_last_two(
    tmp_path: Path, place: Watched, limit: int | None, kept: list[int]
) -> None:
    with Life(tmp_path / "run", place, limit=limit) as life:
        life.start()
        for step in range(1, 7):
            life.copied(step)
    assert place.folders() == [f"checkpoint-{step}" for step in kept]


def test_what_somebody_refers_to_stays_over_there(tmp_path: Path, place: Watched) -> None:
    with Life(tmp_path / "run", place, limit=1) as life:
        life.start()
        life.keep = Keep(1, always=frozenset({"checkpoint-2"}))
        for step in range(1, 7):
            life.copied(step)
    assert place.folders() == ["checkpoint-2", "checkpoint-5", "checkpoint-6"]


def test_superseded_just_in_time_checkpoints_go_over_there_too(life: Life, place: Watched) -> None:
    for step in range(1, 5):
        life.copied(step, Kind.JIT)
    assert place.folders() == ["checkpoint-3", "checkpoint-4"]


def test_one_that_is_told_to_stop_again_and_again_leaves_no_more_behind_than_one_that_is_not(
    tmp_path: Path, place: Watched
) -> None:
    for step in range(1, 6):
        with Life(tmp_path / f"life-{step}", place) as life:
            assert life.start()
            life.mirror.push(life.save(step, Kind.JIT), urgent=True)
            assert life.mirror.settle(lambda: life.world.clock.now() + mirrors.PATIENCE)
    assert place.folders() == ["checkpoint-4", "checkpoint-5"]


def test_what_cannot_be_removed_keeps_nobody_who_was_told_to_stop(
    life: Life, place: Watched, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(upload, "_TIDY", 0.05)
    for step in (1, 2):
        life.copied(step, Kind.JIT)
    place.hook = held = Held("remove", "checkpoint-1/")
    life.mirror.push(life.save(3, Kind.JIT), urgent=True)
    assert life.mirror.settle(lambda: life.world.clock.now() + mirrors.PATIENCE)
    assert held.there.is_set() and not caplog.records
    held.let_go()


def test_nothing_is_rotated_before_it_is_known_what_must_stay(tmp_path: Path, place: Watched) -> None:
    with Life(tmp_path / "run", place) as life:
        life.start()
        for step in range(1, 5):
            life.copied(step)
        life.keep = Keep(1)
        life.mirror.push(life.save(5), rotate=False)
        assert life.mirror.settle()
    assert len(place.folders()) == 5


def test_a_removal_that_is_cut_off_leaves_no_checkpoint_and_is_done_later(
    life: Life, place: Watched, tmp_path: Path
) -> None:
    for step in (1, 2):
        life.copied(step)
    life.keep = Keep(1)
    place.hook = Failing("remove", "checkpoint-1/model")
    life.copied(3)
    assert place.folders() == ["checkpoint-1", "checkpoint-2", "checkpoint-3"]
    assert place.checkpoints() == ["checkpoint-2", "checkpoint-3"]
    with Life(tmp_path / "elsewhere", place) as other:
        assert other.start()
        other.copied(4)
    assert place.folders() == ["checkpoint-2", "checkpoint-3", "checkpoint-4"]


def test_what_has_not_changed_is_copied_over_there_and_not_sent(
    life: Life, place: Watched, tmp_path: Path
) -> None:
    life.copied(3)
    place.calls.clear()
    life.copied(4)
    assert place.done("copy") == ["checkpoint-4/base.safetensors"]
    assert "checkpoint-4/base.safetensors" not in place.done(
        "send"
    ) and "checkpoint-4/model.safetensors" in place.done("send")
    assert resumed(tmp_path, place) == life.state.contents()


def test_what_cannot_be_copied_over_there_is_sent(life: Life, place: Watched, tmp_path: Path) -> None:
    life.copied(3)
    place.hook = Failing("copy")
    life.copied(4)
    assert "checkpoint-4/base.safetensors" in place.done("send")
    assert resumed(tmp_path, place) == life.state.contents()


def test_a_step_that_is_saved_twice_never_overwrites_the_first_and_the_second_is_the_newest(
    life: Life, place: Watched, tmp_path: Path
) -> None:
    life.copied(3)
    before = {path.name: path.read_bytes() for path in (place.root / "checkpoint-3").iterdir()}
    life.state.change("model", 99)
    life.mirror.push(life.world.saver.save(life.state.capture(3), Request(Kind.PERIODIC, "test")))
    assert life.mirror.settle()
    assert place.checkpoints() == ["checkpoint-3", "checkpoint-3.replaced-0"]
    assert {path.name: path.read_bytes() for path in (place.root / "checkpoint-3").iterdir()} == before
    with Life(tmp_path / "elsewhere", place) as other:
        assert other.start()
        assert other.state.contents() == life.state.contents()
        assert [entry.path.name for entry in other.catalog.entries()] == ["checkpoint-3"]


def test_a_checkpoint_that_is_there_is_known_although_its_loss_is_not_a_number(
    life: Life, place: Watched, tmp_path: Path
) -> None:
    life.copied(3, metrics={"loss": math.nan})
    with Life(life.root.with_name("elsewhere"), place) as other:
        assert other.start()
        assert other.mirror.has(other.catalog.entries()[0].record)
        other.mirror.push(other.catalog.entries()[0])
        assert other.mirror.settle()
    assert place.checkpoints() == ["checkpoint-3"]


def test_a_place_that_fails_is_tried_again_and_what_has_arrived_is_not_sent_twice(
    life: Life, place: Watched, caplog: pytest.LogCaptureFixture
) -> None:
    place.hook = Failing("write", RECORD, times=2)
    entry = life.copied(3)
    assert caplog.text.count("Could not upload checkpoint-3") == 2 and caplog.text.count("; retrying") == 2
    assert sorted(place.done("send")) == sorted(f"checkpoint-3/{file.name}" for file in entry.record.files)


def test_where_no_attempt_helps_it_is_said_and_the_next_checkpoint_is_tried(
    life: Life, place: Watched, caplog: pytest.LogCaptureFixture
) -> None:
    place.hook = Failing("send", "checkpoint-3", times=1000)
    life.mirror.push(life.save(3))
    assert not life.mirror.settle()
    assert caplog.text.count("; retrying") == upload._TRIES - 1
    assert (
        f"The newest checkpoint is only in {life.root}; it was not uploaded to {place.url}: checkpoint-3/"
        in caplog.text
    )
    life.copied(4)
    assert place.checkpoints() == ["checkpoint-4"]


def test_a_refusal_is_not_tried_again(life: Life, place: Watched, caplog: pytest.LogCaptureFixture) -> None:
    place.hook = Failing("send", times=1000, error=errors.StorageRefused)
    life.mirror.push(life.save(3))
    assert not life.mirror.settle()
    assert "retrying" not in caplog.text


def test_whoever_was_told_to_stop_tries_for_as_long_as_it_may_live(life: Life, place: Watched) -> None:
    failing, held = Failing("send", times=3 * upload._TRIES), Held("send", "checkpoint-3/model")

    def hook(operation: str, name: str) -> None:
        held(operation, name)
        failing(operation, name)

    def until() -> float:
        held.let_go()  # somebody waits now
        return life.world.clock.now() + mirrors.PATIENCE

    place.hook = hook
    life.mirror.push(life.save(3))
    assert life.mirror.settle(until)
    assert place.checkpoints() == ["checkpoint-3"]


def test_at_the_deadline_nobody_waits_any_longer_and_it_is_said(
    life: Life, place: Watched, caplog: pytest.LogCaptureFixture
) -> None:
    place.hook = held = Held("send", "checkpoint-3/model")
    life.mirror.push(life.save(3))
    held.wait()
    began = life.world.clock.now()
    assert not life.mirror.settle(lambda: began)
    assert (
        f"The newest checkpoint is only in {life.root}; it was not uploaded to {place.url}: there was no "
        "time left" in caplog.text
    )
    held.let_go()
    life.copied(4)
    assert place.checkpoints() == ["checkpoint-4"]


def test_a_second_notice_brings_the_deadline_forward(life: Life, place: Watched) -> None:
    place.hook = held = Held("send", "checkpoint-3/model")
    life.mirror.push(life.save(3))
    held.wait()
    deadlines = iter([mirrors.PATIENCE, mirrors.PATIENCE])
    assert not life.mirror.settle(lambda: life.world.clock.now() + next(deadlines, -1.0))
    held.let_go()


def test_what_a_copy_takes_is_learned_from_those_that_were_large_enough(
    life: Life, place: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    life.copied(3)
    assert life.mirror.seconds(10**9) == 0.0
    monkeypatch.setattr(upload, "_WORTH_MEASURING", 1000)
    life.copied(4)
    assert life.mirror.seconds(10**9) > 0.0


def test_a_fault_in_a_copy_is_said_and_ends_nothing(
    life: Life, place: Watched, caplog: pytest.LogCaptureFixture
) -> None:
    def fault(operation: str, name: str) -> None:
        if "checkpoint-3" in name:
            raise ZeroDivisionError

    place.hook = fault
    life.mirror.push(life.save(3))
    assert not life.mirror.settle()
    assert "Internal error in lastcall: checkpoint-3 was not uploaded" in caplog.text
    life.copied(4)
