from __future__ import annotations

import errno
import json
import os
import threading
from pathlib import Path

import pytest

from lastcall import events
from lastcall.clock import Clock


class HandClock(Clock):
    """Goes forward when told."""

    def __init__(self) -> None:
        self.time = 100.0

    def now(self) -> float:
        return self.time

    def wall(self) -> float:
        return 1_000_000.0 + self.time


class Unprintable:
    def __repr__(self) -> str:
        raise RuntimeError("no")


@pytest.fixture
def clock() -> HandClock:
    return HandClock()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / ".lastcall" / "events-0.jsonl"


@pytest.fixture
def log(path: Path, clock: HandClock) -> events.EventLog:
    return events.EventLog(path, clock)


def kinds(path: Path) -> list[object]:
    return [event["kind"] for event in events.read(path)]


def test_an_event_is_one_line_with_its_time_kind_and_fields(
    log: events.EventLog, path: Path, clock: HandClock
) -> None:
    log.emit("notice", source="signal", reason="SIGTERM", seconds=1.5)
    clock.time += 5  # the time is that of the event, not of the flush
    log.flush()
    assert (
        path.read_text()
        == '{"at": 1000100.0, "kind": "notice", "source": "signal", "reason": "SIGTERM", "seconds": 1.5}\n'
    )


def test_emitting_touches_no_file_and_flushing_nothing_makes_none(log: events.EventLog, path: Path) -> None:
    log.flush()
    assert not path.parent.exists()
    log.emit("notice")
    assert not path.parent.exists()
    log.flush()
    assert kinds(path) == ["notice"]


def test_values_that_json_does_not_know_are_printed(log: events.EventLog, path: Path) -> None:
    cycle: list[object] = []
    cycle.append(cycle)
    log.emit(
        "odd",
        path=Path("/x"),
        nan=float("nan"),
        big=10**5000,
        bad=Unprintable(),
        nested={1: (2, {3})},
        cycle=cycle,
        text="\ud800",
        at="not the time",
        kind="not the kind",
    )
    log.flush()

    def strict(constant: str) -> object:
        raise AssertionError(f"{constant} is not JSON")

    event = json.loads(path.read_text(), parse_constant=strict)
    assert event["path"] == repr(Path("/x"))
    assert event["nan"] == "nan"
    assert event["big"] == hex(10**5000)
    assert event["bad"] == "<Unprintable that cannot be printed: RuntimeError>"
    assert event["nested"] == {"1": [2, "{3}"]}
    assert "[[...]]" in json.dumps(event["cycle"])
    assert event["text"] == "\ud800"
    assert (event["at"], event["kind"]) == (1000100.0, "odd")


def test_a_field_that_breaks_while_it_is_rendered_costs_the_fields_not_the_event(
    log: events.EventLog, path: Path
) -> None:
    class Key:
        __str__ = Unprintable.__repr__

    log.emit("odd", mapping={Key(): 1})
    log.emit("next")
    log.flush()
    odd, following = events.read(path)
    assert odd["kind"] == "odd" and "RuntimeError" in str(odd["unprintable"])
    assert following["kind"] == "next"


def test_an_endless_field_does_not_make_an_endless_line(log: events.EventLog, path: Path) -> None:
    log.emit("wordy", text="x" * 1_000_000)
    log.flush()
    (event,) = events.read(path)
    assert event["too_long"] > 1_000_000  # type: ignore[operator]
    assert path.stat().st_size < 1000


def test_over_the_limit_the_file_is_rotated_and_read_back_in_order(path: Path, clock: HandClock) -> None:
    log = events.EventLog(path, clock, limit_bytes=300)
    for number in range(20):
        log.emit("step", number=number)
        log.flush()
    rotated = path.with_name(f"{path.name}.1")
    assert 0 < path.stat().st_size <= 300 and 0 < rotated.stat().st_size <= 300
    numbers = [event["number"] for event in events.read(path)]
    assert numbers == list(range(20 - len(numbers), 20)) and len(numbers) > 5
    assert sorted(path.parent.iterdir()) == [path, rotated]


def test_a_flush_larger_than_the_limit_keeps_the_newest_and_says_how_many_are_missing(
    path: Path, clock: HandClock
) -> None:
    log = events.EventLog(path, clock, limit_bytes=300)
    for number in range(20):
        log.emit("step", number=number)
    log.flush()
    numbers = [event["number"] for event in events.read(path)]
    assert numbers[-1] == 19 and path.stat().st_size <= 300
    assert log.dropped == 20 - len(numbers)
    log.flush()
    assert list(events.read(path))[-1] == {"at": 1000100.0, "kind": "dropped", "count": log.dropped}
    log.emit("after")
    log.flush()
    assert kinds(path).count("dropped") == 1


def test_the_oldest_pending_events_make_room_and_are_counted(
    log: events.EventLog, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(events, "_PENDING", 3)
    for number in range(5):
        log.emit("step", number=number)
    assert log.dropped == 2
    log.flush()
    first, *rest = events.read(path)
    assert (first["kind"], first["count"]) == ("dropped", 2)
    assert [event["number"] for event in rest] == [2, 3, 4]


def test_a_full_disk_costs_the_lines_and_nothing_else(
    log: events.EventLog, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(fd: int, data: bytes) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", full)
        log.emit("one")
        log.emit("two")
        log.flush()
    assert log.dropped == 2
    assert log.error is not None and log.error.errno == errno.ENOSPC
    log.emit("three")
    log.flush()
    assert kinds(path) == ["dropped", "three"]
    assert next(events.read(path))["count"] == 2


def test_a_line_that_was_cut_off_by_a_full_disk_does_not_spoil_the_next(
    log: events.EventLog, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = os.write
    with monkeypatch.context() as patch:
        patch.setattr(os, "write", lambda fd, data: write(fd, data[:10]))
        log.emit("torn")
        log.flush()
    assert log.dropped == 1 and log.error is not None
    log.emit("whole")
    log.flush()
    assert kinds(path) == ["dropped", "whole"]


def test_a_line_that_a_killed_incarnation_left_unfinished_does_not_spoil_the_next(
    log: events.EventLog, path: Path
) -> None:
    path.parent.mkdir()
    path.write_bytes(b'{"at": 1, "kind": "a"}\n{"at": 2, "ki')
    log.emit("b")
    log.flush()
    assert kinds(path) == ["a", "b"]


def test_reading_skips_what_is_not_an_event(path: Path) -> None:
    path.parent.mkdir()
    path.write_bytes(b'\n[1]\n\xff\xfe\n{"kind": "a"}\n' + b"[" * 100_000 + b"\n" + b'{"kind": "b"}')
    assert kinds(path) == ["a", "b"]
    assert kinds(path.with_name("missing")) == []


def test_a_directory_that_was_removed_does_not_come_back(log: events.EventLog, path: Path) -> None:
    log.emit("one")
    log.flush()
    path.unlink()
    path.parent.rmdir()
    log.emit("two")
    log.flush()
    assert not path.parent.exists()
    assert isinstance(log.error, FileNotFoundError) and log.dropped == 1


def test_close_flushes_and_later_events_are_dropped(log: events.EventLog, path: Path) -> None:
    log.emit("one")
    log.close()
    log.emit("two")
    assert kinds(path) == ["one"]
    assert log.dropped == 1


def test_emit_and_close_do_not_wait_for_a_flush_that_hangs(
    log: events.EventLog, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(events, "_CLOSE_SECONDS", 0.01)
    hangs, release = threading.Event(), threading.Event()
    write = os.write

    def slow(fd: int, data: bytes) -> int:
        hangs.set()
        assert release.wait(30)
        return write(fd, data)

    monkeypatch.setattr(os, "write", slow)
    log.emit("one")
    side = threading.Thread(target=log.flush)
    side.start()
    try:
        assert hangs.wait(30)
        log.emit("two")
        log.flush()
        log.close()
    finally:
        release.set()
        side.join(30)
    assert kinds(path) == ["one"]


def test_events_of_many_threads_all_arrive_whole(log: events.EventLog, path: Path) -> None:
    def emit(thread: int) -> None:
        for number in range(200):
            log.emit("step", thread=thread, number=number)

    threads = [threading.Thread(target=emit, args=(thread,)) for thread in range(4)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        log.flush()
    log.close()
    seen = [(event["thread"], event["number"]) for event in events.read(path)]
    assert sorted(seen) == [(thread, number) for thread in range(4) for number in range(200)]


def test_who_listens_hears_each_event_at_once(log: events.EventLog) -> None:
    heard: list[tuple[float, str, dict[str, object]]] = []
    log.heard = lambda at, kind, fields: heard.append((at, kind, dict(fields)))
    log.emit("notice", reason="SIGTERM")
    assert heard == [(1000100.0, "notice", {"reason": "SIGTERM"})]
    log.close()
    log.emit("late")
    assert len(heard) == 1


# Progress


@pytest.fixture
def progress(tmp_path: Path, clock: HandClock) -> events.Progress:
    return events.Progress(tmp_path / ".lastcall" / "progress.json", clock, total=100)


def shown(progress: events.Progress) -> dict[str, object]:
    progress.flush()
    document: dict[str, object] = json.loads(progress.path.read_text())
    return document


def test_progress_is_written_as_one_document(progress: events.Progress) -> None:
    progress.update(10, 0.5, {"loss": 2})
    assert not progress.path.parent.exists()
    assert shown(progress) == {
        "step": 10,
        "epoch": 0.5,
        "metrics": {"loss": 2.0},
        "eval_metrics": {},
        "steps_per_second": None,
        "eta_seconds": None,
        "total": 100,
        "total_epochs": None,
        "at": 1000100.0,
    }
    assert [entry.name for entry in progress.path.parent.iterdir()] == ["progress.json"]


def test_speed_and_remaining_time_come_from_what_happened_between_flushes(
    progress: events.Progress, clock: HandClock
) -> None:
    for step in (10, 20, 30):
        progress.update(step)
        document = shown(progress)
        clock.time += 5
    assert document["steps_per_second"] == pytest.approx(2.0)
    assert document["eta_seconds"] == pytest.approx(35.0)


def test_speed_follows_a_change_slowly_over_a_short_time_and_fully_over_a_long_one(
    progress: events.Progress, clock: HandClock
) -> None:
    progress.update(0)
    progress.flush()
    clock.time += 5
    progress.update(5)
    assert shown(progress)["steps_per_second"] == pytest.approx(1.0)
    clock.time += 3
    progress.update(35)
    after_a_moment = shown(progress)["steps_per_second"]
    assert isinstance(after_a_moment, float) and 1.0 < after_a_moment < 3.0
    clock.time += 3000
    progress.update(35 + 30_000)
    assert shown(progress)["steps_per_second"] == pytest.approx(10.0)


def test_the_remaining_time_counts_what_this_incarnation_did_and_nothing_before(
    progress: events.Progress, clock: HandClock
) -> None:
    progress.total = 1000
    progress.update(900)  # resumed there
    assert shown(progress)["eta_seconds"] is None
    clock.time += 20
    progress.update(910)  # at one step in two seconds, 90 more
    assert shown(progress)["eta_seconds"] == pytest.approx(180.0)


def test_a_pause_for_an_evaluation_counts_for_the_remaining_time_by_its_share(
    progress: events.Progress, clock: HandClock
) -> None:
    progress.total = 2000
    for step in range(0, 1001, 10):
        progress.update(step)
        progress.flush()
        clock.time += 10
    progress.update(1001)  # an evaluation of a quarter of an hour
    clock.time += 890
    document = shown(progress)
    assert document["steps_per_second"] == pytest.approx(0.0, abs=0.01)  # lately
    assert document["eta_seconds"] == pytest.approx(999 * 1900 / 1001)


def test_what_an_update_leaves_out_stays_as_it_was(progress: events.Progress) -> None:
    progress.total_epochs = 3
    progress.update(1, 0.25, {"loss": 2, "learning_rate": 1e-4})
    progress.update(2, 0.5)
    first = shown(progress)
    assert (first["step"], first["epoch"], first["metrics"]) == (2, 0.5, {"loss": 2.0, "learning_rate": 1e-4})
    progress.update(3, eval_metrics={"eval_loss": float("nan")})
    second = shown(progress)
    assert (second["epoch"], second["metrics"], second["eval_metrics"]) == (
        0.5,
        first["metrics"],
        {"eval_loss": "nan"},
    )
    assert second["total_epochs"] == 3
    progress.update(4, metrics={})
    assert (shown(progress)["metrics"], shown(progress)["eval_metrics"]) == ({}, {"eval_loss": "nan"})


def test_a_run_that_says_nothing_is_looked_at(progress: events.Progress, clock: HandClock) -> None:
    steps = [40]
    progress.where = lambda: steps[-1]
    progress.flush()
    clock.time += 3600  # data is being prepared
    progress.flush()
    assert not progress.path.exists()
    for step in (41, 42):
        steps.append(step)
        clock.time += 10
        document = shown(progress)
    assert (document["step"], document["steps_per_second"]) == (42, pytest.approx(0.1))
    assert document["eta_seconds"] == pytest.approx(580.0)
    progress.path.unlink()
    progress.flush()
    assert not progress.path.exists()  # it has not moved


def test_what_was_said_counts_more_than_a_look(progress: events.Progress) -> None:
    progress.where = lambda: 7
    progress.update(8, 1.0, {"loss": 1})
    assert shown(progress)["step"] == 8
    assert progress.document is not None and progress.document["step"] == 8


def test_a_number_that_is_none_is_known_to_readers_in_the_process(progress: events.Progress) -> None:
    progress.update(1, metrics={"loss": float("inf")})
    progress.flush()
    assert progress.document is not None and progress.document["metrics"] == {"loss": float("inf")}


def test_no_remaining_time_is_made_up(progress: events.Progress, clock: HandClock) -> None:
    progress.update(5)
    progress.flush()
    clock.time += 10
    progress.update(5)
    standing = shown(progress)
    assert (standing["steps_per_second"], standing["eta_seconds"]) == (0.0, None)
    clock.time += 10
    progress.update(120)
    assert shown(progress)["eta_seconds"] == 0.0  # past the total, never negative
    progress.total = None
    clock.time += 10
    progress.update(130)
    unknown = shown(progress)
    assert (unknown["total"], unknown["eta_seconds"]) == (None, None)


def test_a_run_that_went_back_forgets_its_speed(progress: events.Progress, clock: HandClock) -> None:
    for step in (10, 20, 15):
        progress.update(step)
        document = shown(progress)
        clock.time += 5
    assert document["steps_per_second"] is None
    progress.update(20)
    assert shown(progress)["steps_per_second"] == pytest.approx(1.0)


def test_metrics_are_turned_into_numbers_only_when_flushed(progress: events.Progress) -> None:
    class Lazy:
        converted = 0

        def __float__(self) -> float:
            self.converted += 1
            return 0.25

    class Graph(Lazy):
        """Like a tensor that wants a gradient: only what it is detached to is a number."""

        def __float__(self) -> float:
            raise UserWarning("requires_grad")

        def detach(self) -> Lazy:
            return Lazy()

    class Broken:
        def __float__(self) -> float:
            raise ValueError("two elements")

    lazy = Lazy()
    metrics = {
        "lazy": lazy,
        "graph": Graph(),
        "broken": Broken(),
        "nan": float("nan"),
        "phase": "warm",
        "none": None,
    }
    progress.update(1, 0, metrics)
    assert lazy.converted == 0
    assert shown(progress)["metrics"] == {
        "lazy": 0.25,
        "graph": 0.25,
        "broken": None,
        "nan": "nan",
        "phase": "warm",
        "none": None,
    }
    assert lazy.converted == 1


def test_nothing_new_writes_nothing(progress: events.Progress) -> None:
    progress.flush()
    assert not progress.path.exists()
    progress.update(1)
    progress.flush()
    progress.path.unlink()
    progress.flush()
    assert not progress.path.exists()


def test_a_disk_that_refuses_the_progress_file_is_remembered_not_raised(
    progress: events.Progress, monkeypatch: pytest.MonkeyPatch
) -> None:
    progress.update(1)
    before = shown(progress)

    def refuse(old: Path, new: Path) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", refuse)
        progress.update(2)
        progress.flush()
    assert progress.error is not None and progress.error.errno == errno.EROFS
    assert json.loads(progress.path.read_text()) == before
    progress.update(3)
    assert shown(progress)["step"] == 3
