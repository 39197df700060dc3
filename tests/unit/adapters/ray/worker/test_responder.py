from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import pytest

from lastcall.adapters.ray import internals
from lastcall.adapters.ray.worker.connection import Line
from lastcall.adapters.ray.worker.preemption_info import Echo
from lastcall.adapters.ray.worker.responder import Serving
from lastcall.core.store import memory
from lastcall.settings import JITCheckpointConfig

PATIENCE = 60.0


class Script:
    """In the place of the script's own save: notes at which step it is asked for what."""

    def __init__(self, near: bool, points: bool = True) -> None:
        self.near = near
        self.inside = False
        self.asked: list[tuple[str, int]] = []
        self.serving: Any = None
        self.begins = True  # the save that is entered comes to its report
        self._points = points

    def look(self, frame: FrameType) -> None: ...

    def position(self) -> dict[str, Any]:
        return {"looked": True, "points": self._points, "near": self.near, "because": "no source"}

    def enter(self, frame: FrameType, left: Callable[[], None]) -> bool:
        self.asked.append(("enter", self.serving.boundary.steps))
        if self.begins:
            self.serving.begun.set()
        return True

    def replay(self, frame: FrameType) -> str:
        self.asked.append(("replay", self.serving.boundary.steps))
        self.serving.begun.set()
        return ""


class Rank:
    """A training thread that steps as fast as its peer allows, as with an all-reduce in every step."""

    def __init__(self, store: memory.MemoryStore, rank: int, size: int, allreduce: threading.Barrier, script: Script) -> None:
        jit = JITCheckpointConfig(kill_wait=0.0, grace=8.0, environ={})
        self.script = script
        self.serving = Serving(jit, Line(store.clone(), rank, size), Echo(object()), script)  # type: ignore[arg-type]
        self.serving.save_seconds = 0.1
        self.stateful: list[str] = []
        self.serving.fall_back = lambda because: (self.stateful.append(because), self.serving.begun.set())[0]
        script.serving = self.serving
        self._allreduce = allreduce
        threading.Thread(target=self.serving.listen, daemon=True).start()
        self._thread = threading.Thread(target=self._train, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def _train(self) -> None:
        frame = sys._getframe()
        while not self.serving.begun.is_set():
            try:
                self._allreduce.wait(PATIENCE)
            except threading.BrokenBarrierError:
                return
            if self.serving.boundary.before is not None:
                self.serving.boundary.before(frame)
            else:
                self.serving.boundary.passed(frame)

    def end(self) -> None:
        self._allreduce.abort()
        self.serving.begun.set()
        self.serving.close()


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., list[Rank]]]:
    monkeypatch.setattr(internals, "poll_seconds", lambda: 0.05)
    monkeypatch.setattr(internals, "node_id", lambda: "node")
    made: list[Rank] = []

    def make(*scripts: Script) -> list[Rank]:
        store, allreduce = memory.MemoryStore(), threading.Barrier(len(scripts))
        made.extend(Rank(store, rank, len(scripts), allreduce, script) for rank, script in enumerate(scripts))
        for rank in made:
            rank.start()
        until(lambda: all(rank.serving.boundary.steps > 20 for rank in made))
        return made

    yield make
    for rank in made:
        rank.end()


def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.002)


def test_all_ranks_enter_their_own_save_after_the_same_step_although_one_was_told(ranks: Any) -> None:
    one, other = ranks(Script(near=True), Script(near=True))
    other.serving.on_signal(15, 1)
    until(lambda: bool(one.script.asked and other.script.asked))
    assert one.script.asked == other.script.asked and one.script.asked[0][0] == "enter"


def test_all_ranks_told_at_once_come_to_one_decision(ranks: Any) -> None:
    group = ranks(*(Script(near=True) for _ in range(3)))
    for rank in group:
        rank.serving.on_signal(15, 1)
    until(lambda: all(rank.script.asked for rank in group))
    assert len({tuple(rank.script.asked) for rank in group}) == 1


def test_a_save_point_that_does_not_come_in_time_is_replayed_at_a_step_of_all(ranks: Any) -> None:
    scripts = [Script(near=False), Script(near=False)]
    for script in scripts:
        script.begins = False
    one, other = ranks(*scripts)
    one.serving.on_signal(15, 1)
    until(lambda: any(word == "replay" for word, _ in one.script.asked) and any(word == "replay" for word, _ in other.script.asked))
    assert one.script.asked[-1] == other.script.asked[-1]


def test_without_a_save_of_the_script_the_state_is_saved(ranks: Any) -> None:
    one, other = ranks(Script(near=True), Script(near=True, points=False))
    one.serving.on_signal(15, 1)
    until(lambda: bool(one.stateful and other.stateful))
    assert one.stateful == other.stateful == ["no source"]


def test_a_drain_of_ray_is_a_notice_with_its_own_deadline(ranks: Any) -> None:
    (alone,) = ranks(Script(near=True))
    alone.serving.on_drain(5.0, {"node": [0]})
    until(lambda: bool(alone.script.asked))
    assert alone.serving.latch.notice.source == "drain" and alone.serving.left() <= 5.0


def test_when_the_controller_is_gone_the_run_is_over_and_nothing_is_held(ranks: Any, caplog: pytest.LogCaptureFixture) -> None:
    (alone,) = ranks(Script(near=True))
    alone.serving._line.close()
    before = alone.serving.boundary.steps
    alone.serving.on_signal(15, 1)
    until(lambda: "the controller is gone" in caplog.text)
    until(lambda: alone.serving.boundary.steps > before + 5)
    assert alone.script.asked == []


def test_a_second_signal_changes_nothing(ranks: Any) -> None:
    (alone,) = ranks(Script(near=True))
    alone.serving.on_signal(15, 1)
    alone.serving.on_signal(15, 2)
    until(lambda: bool(alone.script.asked))
    assert len(alone.script.asked) == 1
