"""The guarded state: committed as a whole or not at all, grown when it must, and saved by whoever finds
it."""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from helpers.core.bare_core import State, World, noise, put
from lastcall import errors
from lastcall.core.guard import guard
from lastcall.core.guard.guard import Area, Guard
from lastcall.core.startup import recovery
from lastcall.core.sync.gate import Gate
from lastcall.types import Capture, Kind


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    with World(tmp_path / "run") as made:
        yield made


@pytest.fixture
def memory_folder(tmp_path: Path) -> Path:
    folder = tmp_path / "memory"
    folder.mkdir()
    return folder


def made(world: World, folder: Path, **more: object) -> Guard:
    options = {"steps": 1, "seconds": None, **more}
    return Guard(folder, world.catalog.private, Gate(), {"run": "abc", "incarnation": 7}, **options)  # type: ignore[arg-type]


def settle() -> None:
    for thread in threading.enumerate():
        if thread.name == "lastcall-guard":
            thread.join()


def area_of(folder: Path) -> Area:
    (path,) = folder.iterdir()
    return Area.attach(path)


def test_an_area_without_a_commit_holds_nothing(tmp_path: Path) -> None:
    area = Area.create(tmp_path / "lastcall-0-1-a", 100, 100)
    assert area.newest() is None
    assert Area.attach(tmp_path / "lastcall-0-1-a").newest() is None


def test_the_newest_committed_slot_counts_and_a_writer_that_dies_leaves_the_other(tmp_path: Path) -> None:
    area = Area.create(tmp_path / "lastcall-0-1-a", 100, 100)
    for text in (b"one", b"two", b"three"):
        assert area.write(lambda address: True, text)
        found = Area.attach(tmp_path / "lastcall-0-1-a").newest()
        assert found is not None
        assert found[1] == text

    def dies(address: int) -> bool:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        area.write(dies, b"four")
    found = Area.attach(tmp_path / "lastcall-0-1-a").newest()
    assert found is not None
    assert found[1] == b"three"


def test_a_state_that_changed_under_the_copy_is_not_committed(tmp_path: Path) -> None:
    area = Area.create(tmp_path / "lastcall-0-1-a", 100, 100)
    assert area.write(lambda address: True, b"good")
    assert not area.write(lambda address: False, b"torn")
    found = area.newest()
    assert found is not None
    assert found[1] == b"good"


@pytest.mark.parametrize("data", [b"", b"x" * 100, b"y" * 8192, guard.MAGIC + b"\xff" * 8176])
def test_a_file_that_is_no_area_is_refused(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "lastcall-0-1-a").write_bytes(data)
    with pytest.raises(errors.CheckpointError):
        Area.attach(tmp_path / "lastcall-0-1-a")
    with pytest.raises(errors.CheckpointError):
        Area.attach(tmp_path / "missing")


def test_a_guarded_boundary_becomes_a_committed_checkpoint_of_the_same_bytes(
    world: World, memory_folder: Path
) -> None:
    state = State(seed=3)
    guarded = made(world, memory_folder)
    guarded.prepare(state.capture(5))
    assert guarded.due(5)
    guarded.take(lambda: state.capture(5), 5)
    settle()
    expected = state.contents()
    put(state.tensors["model"]["w"], noise(20_000, "later"))
    rescued = recovery.recover_into(world.catalog, "SIGKILL", world.clock)
    assert rescued is not None
    assert (rescued.step, rescued.path.name) == (5, "checkpoint-5")
    (entry,) = world.catalog.entries()
    assert (entry.record.kind, entry.record.reason, entry.record.exact) == (Kind.GUARD, "SIGKILL", True)
    assert (entry.record.run, entry.record.incarnation) == ("abc", 7)
    other = State(seed=9)
    assert world.restore(other) == entry
    assert other.contents() == expected
    assert list(memory_folder.iterdir()) == []
    assert recovery.recover_into(world.catalog, "SIGKILL", world.clock) is None


def test_a_guarded_step_that_is_not_newer_than_the_last_checkpoint_is_not_saved(
    world: World, memory_folder: Path
) -> None:
    state = State(seed=3)
    world.save(state, 6)
    guarded = made(world, memory_folder)
    guarded.prepare(state.capture(5))
    guarded.stage(state.capture(5), None)
    assert recovery.recover_into(world.catalog, "SIGKILL", world.clock) is None
    assert [entry.record.step for entry in world.catalog.entries()] == [6]
    assert list(memory_folder.iterdir()) == []


def test_the_gate_is_shut_while_the_copy_is_made_and_open_afterwards(
    world: World, memory_folder: Path
) -> None:
    state = State(seed=3)
    guarded = made(world, memory_folder)
    guarded.prepare(state.capture(1))
    copying, go_on = threading.Event(), threading.Event()

    def still() -> bool:
        copying.set()
        return go_on.wait(30)

    guarded.take(lambda: dataclasses.replace(state.capture(1), still=still), 1)
    assert copying.wait(30)
    assert guarded._gate.closed
    assert not guarded.due(2), "one copy at a time"
    go_on.set()
    settle()
    assert not guarded._gate.closed
    assert guarded.due(2)
    assert not guarded.due(1), "this one is there already"


def test_a_state_that_has_grown_gets_a_larger_area(world: World, memory_folder: Path) -> None:
    small = State(seed=3, sizes={"model": {"w": 5000}})
    large = State(seed=4, sizes={"model": {"w": 5000}, "optimizer": {"m": 3_000_000}})
    guarded = made(world, memory_folder)
    guarded.prepare(small.capture(1))
    guarded.take(lambda: small.capture(1), 1)
    settle()
    guarded.take(lambda: large.capture(2), 2)
    settle()
    assert len(list(memory_folder.iterdir())) == 2, (
        "the smaller one holds the newest copy until the larger one has one"
    )
    guarded.take(lambda: large.capture(3), 3)
    settle()
    assert area_of(memory_folder).data > 3_000_000
    rescued = recovery.recover_into(world.catalog, "SIGKILL", world.clock)
    assert rescued is not None
    assert rescued.step == 3


def test_without_room_it_is_said_with_the_size_needed(
    world: World, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(guard, "available_memory", lambda: 1_000_000)
    guarded = made(world, tmp_path)
    with caplog.at_level(logging.WARNING):
        guarded.prepare(State(seed=1).capture(1))
    assert "This run is not guarded: two copies of its state need" in caplog.text
    assert "1 MB are free" in caplog.text  # four fifths of what there is
    assert not guarded.due(100)
    guarded.stage(State(seed=1).capture(1), None)  # nothing to put it into, and no reason to fail


def test_a_run_that_ends_in_order_leaves_nothing_behind(world: World, memory_folder: Path) -> None:
    guarded = made(world, memory_folder)
    guarded.prepare(State(seed=1).capture(1))
    guarded.stage(State(seed=1).capture(1), None)
    guarded.close()
    assert list(memory_folder.iterdir()) == []
    assert not (world.catalog.private / guard.POINTER).exists()


def test_an_area_that_is_gone_with_the_machine_is_forgotten(world: World, tmp_path: Path) -> None:
    pointer = world.catalog.private / guard.POINTER
    pointer.write_text(json.dumps({"areas": [str(tmp_path / "gone")]}))
    assert recovery.recover_into(world.catalog, "SIGKILL", world.clock) is None
    assert not pointer.exists()


def test_a_damaged_area_is_left_alone_with_a_warning(
    world: World, memory_folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    guarded = made(world, memory_folder)
    guarded.prepare(State(seed=1).capture(1))
    guarded.stage(State(seed=1).capture(1), None)
    area = area_of(memory_folder)
    found = area.newest()
    assert found is not None
    begin = 4096 + area.commits().index(max(area.commits())) * int(area._words[2]) + area.data
    area._view[begin + 40] ^= 1
    with caplog.at_level(logging.WARNING):
        assert recovery.recover_into(world.catalog, "SIGKILL", world.clock) is None
    assert "cannot be used" in caplog.text
    assert world.catalog.entries() == []


def test_how_often_by_steps_by_seconds_and_by_cost(world: World, memory_folder: Path) -> None:
    capture = State(seed=1).capture(10)
    by_steps = made(world, memory_folder, steps=4)
    assert by_steps.next_step() is None, "there is no area yet"
    by_steps.prepare(capture)
    by_steps.stage(capture, None)
    assert (by_steps.next_step(), by_steps.due(13), by_steps.due(14)) == (14, False, True)
    by_steps.close()
    by_time = made(world, memory_folder, steps=None, seconds=1000.0)
    by_time.prepare(capture)
    assert by_time.due(1)
    by_time.stage(capture, None)
    assert not by_time.due(50)
    by_time.close()
    by_cost = made(world, memory_folder, steps=None, seconds=None)
    by_cost.prepare(capture)
    by_cost.take(lambda: capture, 10)
    settle()
    by_cost._next_at += 1000.0  # as if the copy had taken ten seconds
    assert not by_cost.due(50)
    by_cost.close()


def test_a_dead_runs_directory_is_taken_hold_of_and_let_go(world: World, memory_folder: Path) -> None:
    guarded = made(world, memory_folder)
    guarded.prepare(State(seed=1).capture(8))
    guarded.stage(State(seed=1).capture(8), None)
    root = world.catalog.root
    with pytest.raises(errors.BusyError):
        recovery.recover(root, "SIGKILL")
    world.catalog.close()
    rescued = recovery.recover(root, "SIGKILL")
    assert rescued is not None
    assert rescued.step == 8
    assert recovery.recover(root, "SIGKILL") is None
    assert os.path.exists(rescued.path / "lastcall.json")


def test_a_boundary_that_is_not_exact_is_not_copied_and_the_reason_is_said_once(
    world: World, memory_folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    guarded = made(world, memory_folder)
    guarded.prepare(State(seed=1).capture(1))
    with caplog.at_level(logging.INFO):
        for step in (1, 2):
            guarded.stage(
                State(seed=1).capture(step, exact=False, because="gradients were being accumulated"), None
            )
    assert caplog.text.count("gradients were being accumulated") == 1
    assert area_of(memory_folder).newest() is None


def test_what_cannot_be_saved_now_is_kept_until_it_can(
    world: World, memory_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A full disk on start: the next incarnation guards its own steps, and the older state is not lost."""
    guarded = made(world, memory_folder)
    guarded.prepare(State(seed=1).capture(4))
    guarded.stage(State(seed=1).capture(4), None)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(world.files, "rename", full)
        assert recovery.recover_into(world.catalog, "SIGKILL", world.clock) is None
    following = made(world, memory_folder)
    following.prepare(State(seed=2).capture(4))
    assert len(list(memory_folder.iterdir())) == 2
    following.close()  # it ended before its first copy
    assert len(list(memory_folder.iterdir())) == 1
    rescued = recovery.recover_into(world.catalog, "SIGKILL", world.clock)
    assert rescued is not None
    assert rescued.step == 4
    assert list(memory_folder.iterdir()) == []


def test_an_older_area_goes_once_the_new_one_holds_something(world: World, memory_folder: Path) -> None:
    first, second = made(world, memory_folder), made(world, memory_folder)
    first.prepare(State(seed=1).capture(4))
    first.stage(State(seed=1).capture(4), None)
    second.prepare(State(seed=2).capture(9))
    second.stage(State(seed=2).capture(9), None)
    assert len(list(memory_folder.iterdir())) == 1
    rescued = recovery.recover_into(world.catalog, "SIGKILL", world.clock)
    assert rescued is not None
    assert rescued.step == 9


def test_a_run_that_ends_while_its_area_is_being_made_leaves_nothing(
    world: World, memory_folder: Path
) -> None:
    guarded = made(world, memory_folder)
    guarded.close()
    guarded.prepare(State(seed=1).capture(1))
    assert list(memory_folder.iterdir()) == []
    assert not guarded.due(1)


def test_what_cannot_be_captured_is_passed_over_and_the_gate_is_open(
    world: World, memory_folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    guarded = made(world, memory_folder)
    guarded.prepare(State(seed=1).capture(1))

    def unsavable() -> Capture:
        raise errors.StateError("extra['fn']: a function cannot be saved")

    with caplog.at_level(logging.INFO):
        guarded.take(unsavable, 1)
    assert "a function cannot be saved" in caplog.text
    assert not guarded._gate.closed
    guarded.take(lambda: State(seed=1).capture(2), 2)
    settle()
    assert area_of(memory_folder).newest() is not None


def test_kept_for_the_guardian_an_area_outlives_the_end(world: World, memory_folder: Path) -> None:
    guarded = made(world, memory_folder)
    guarded.prepare(State(seed=1).capture(5))
    guarded.stage(State(seed=1).capture(5), None)
    guarded.close(keep=True)
    rescued = recovery.recover_into(world.catalog, "the deadline", world.clock)
    assert rescued is not None
    assert rescued.step == 5


def test_without_time_to_spare_a_save_is_not_held_up_by_a_copy(world: World, memory_folder: Path) -> None:
    guarded = made(world, memory_folder)
    guarded.prepare(State(seed=1).capture(5))
    guarded.stage(State(seed=1).capture(5), -1.0)
    assert area_of(memory_folder).newest() is None


def test_a_state_that_keeps_changing_under_the_copy_is_copied_while_training_waits(
    world: World, memory_folder: Path
) -> None:
    guarded = made(world, memory_folder)
    guarded.prepare(State(seed=1).capture(1))
    here = threading.current_thread()

    def still() -> bool:
        return threading.current_thread() is here  # what another thread copies, this one changes

    for step in range(1, 5):
        guarded.take(lambda: dataclasses.replace(State(seed=1).capture(step), still=still), step)  # noqa: B023
        settle()
    assert not guarded._gate.closed
    rescued = recovery.recover_into(world.catalog, "SIGKILL", world.clock)
    assert rescued is not None
    assert rescued.step == 4
