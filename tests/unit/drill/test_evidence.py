"""What is read from a directory: real event logs, real checkpoints, and what may be wrong with both."""

from __future__ import annotations

from pathlib import Path

from helpers.core.bare_core import State, World
from lastcall.drill import evidence
from lastcall.drill.evidence import CommittedCheckpoint, RecordedStart, Traces
from lastcall.events import EventLog
from lastcall.testing import FakeClock
from lastcall.types import Kind


def log_of(root: Path, clock: FakeClock, rank: int = 0) -> EventLog:
    return EventLog(root / ".lastcall" / f"events-{rank}.jsonl", clock)


def test_a_notice_is_followed_from_its_arrival_to_the_end(tmp_path: Path) -> None:
    clock = FakeClock(100.0)
    log = log_of(tmp_path, clock)
    for seconds, kind, fields in [
        (0, "notice", {"deadline_in": 30.0, "step": 7}),
        (1, "notice", {"deadline_in": 20.0}),
        (1, "committed", {"save": "periodic", "step": 5}),
        (2, "save-begins", {"save": "rescue", "step": 8}),
        (3, "not-saved", {"save": "rescue", "because": "half a disk"}),
        (4, "save-begins", {"save": "jit", "step": 9}),
        (5, "committed", {"save": "jit", "step": 9}),
        (6, "stop", {"outcome": "saved", "step": 9}),
    ]:
        clock._now = 100.0 + seconds
        log.emit(kind, **fields)
    log.flush()
    assert evidence.traces(tmp_path, 100.0) == Traces(
        100.0, 30.0, 7, 102.0, 8, 105.0, "half a disk", "saved", 9
    )


def test_what_was_before_the_notice_does_not_count(tmp_path: Path) -> None:
    clock = FakeClock(100.0)
    log = log_of(tmp_path, clock)
    log.emit("notice", deadline_in=30.0)
    log.emit("stop", outcome="saved", step=3)
    log.flush()
    assert evidence.traces(tmp_path, 100.5) == Traces()


def test_a_start_is_the_last_one_since_then(tmp_path: Path) -> None:
    clock = FakeClock(100.0)
    log = log_of(tmp_path, clock)
    log.emit("start", incarnation=1, resumed=None, seconds=0.1)
    clock.advance(10)
    log.emit("start", incarnation=2, resumed="checkpoint-4", seconds=0.2)
    log.flush()
    assert evidence.start(tmp_path, 100.0) == RecordedStart(110.0, "checkpoint-4", 0.2)
    assert evidence.start(tmp_path, 111.0) is None


def test_the_logs_of_all_ranks_are_read_in_order_of_time(tmp_path: Path) -> None:
    late, early = log_of(tmp_path, FakeClock(105.0), 0), log_of(tmp_path, FakeClock(101.0), 1)
    late.emit("notice", deadline_in=1.0)
    early.emit("notice", deadline_in=2.0)
    late.flush()
    early.flush()
    assert evidence.traces(tmp_path, 100.0).noticed == 101.0


def test_torn_and_strange_lines_say_nothing(tmp_path: Path) -> None:
    folder = tmp_path / ".lastcall"
    folder.mkdir()
    (folder / "events-0.jsonl").write_text(
        '{"at": "soon", "kind": "notice"}\n{"at": 101, "kind": "stop", "step": true, "outcome": 7}\n{"at": 1'
    )
    (folder / "events-1.jsonl").mkdir()
    assert evidence.traces(tmp_path, 100.0) == Traces()
    assert evidence.start(tmp_path, 100.0) is None


def test_a_directory_that_is_not_there_holds_nothing(tmp_path: Path) -> None:
    assert evidence.newest(tmp_path / "none") is None
    assert evidence.traces(tmp_path / "none", 0.0) == Traces()


def test_the_newest_checkpoint_is_the_one_that_was_committed_last(tmp_path: Path) -> None:
    state = State()
    with World(tmp_path) as world:
        world.save(state, 9)
        state.step(1)
        world.save(state, 4, Kind.RESCUE)
    found = evidence.newest(tmp_path)
    assert found is not None
    assert found[0] == CommittedCheckpoint("checkpoint-4", 4, "rescue", True, "", True, found[1].size)


def test_a_checkpoint_that_was_pruned_meanwhile_keeps_its_name_and_step(tmp_path: Path) -> None:
    assert evidence.named(tmp_path, "checkpoint-3", 3) == CommittedCheckpoint("checkpoint-3", 3)


def test_a_name_from_the_log_leads_nowhere_else(tmp_path: Path) -> None:
    run = tmp_path / "run"
    with World(tmp_path / "other") as world:
        world.save(State(), 5)
    run.mkdir()
    assert evidence.named(run, "../other/checkpoint-5", 5).kind is None
