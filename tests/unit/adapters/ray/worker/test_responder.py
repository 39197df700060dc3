from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any, cast

import pytest

from lastcall.adapters.ray import internals
from lastcall.adapters.ray.worker.connection import RankConnection
from lastcall.adapters.ray.worker.preemption_info import PreemptionInfoWriter
from lastcall.adapters.ray.worker.responder import ReportSave
from lastcall.core.notice.phases import Phase
from lastcall.core.store import memory
from lastcall.settings import JITCheckpointConfig
from lastcall.types import Outcome

PATIENCE = 60.0
EXACT = {"exact": True, "because": ""}


class Script:
    """In the place of the script's own save: notes at which step it is asked for what."""

    def __init__(self, near: bool, points: bool = True) -> None:
        self.near = near
        self.inside = False
        self.asked: list[tuple[str, int]] = []
        self.strategy: Any = None
        self.begins = True  # the save that is entered comes to its report
        self._points = points

    def look(self, frame: FrameType) -> None: ...

    def position(self) -> dict[str, Any]:
        return {"looked": True, "points": self._points, "near": self.near, "because": "no source"}

    def enter(self, frame: FrameType, left: Callable[[], None]) -> bool:
        self.asked.append(("enter", self.strategy.boundary.steps))
        if self.begins:
            self.strategy.begin()
        return True

    def replay(self, frame: FrameType) -> str:
        self.asked.append(("replay", self.strategy.boundary.steps))
        self.strategy.begin()
        return ""


class Rank:
    """A training thread that steps as fast as its peer allows, as with an all-reduce in every step."""

    def __init__(
        self, store: memory.MemoryStore, rank: int, size: int, allreduce: threading.Barrier, script: Script
    ) -> None:
        jit = JITCheckpointConfig(kill_wait=0.0, grace=8.0, environ={})
        self.script = script
        self.strategy = ReportSave(
            jit, RankConnection(store.clone(), rank, size), PreemptionInfoWriter(object()), script
        )  # type: ignore[arg-type]
        self.strategy.save_seconds = 0.1
        self.stateful: list[str] = []
        self.strategy.fall_back = lambda because: (self.stateful.append(because), self.strategy.begin())[0]
        script.strategy = self.strategy
        self._allreduce = allreduce
        self.strategy.start(None)
        self._thread = threading.Thread(target=self._train, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def _train(self) -> None:
        frame = sys._getframe()
        while not self.strategy.begun:
            try:
                self._allreduce.wait(PATIENCE)
            except threading.BrokenBarrierError:
                return
            if self.strategy.boundary.before is not None:
                self.strategy.boundary.before(frame)
            else:
                self.strategy.boundary.passed(frame)

    def end(self) -> None:
        self._allreduce.abort()
        self.strategy.begin()
        self.strategy.stop()


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
        until(lambda: all(rank.strategy.boundary.steps > 20 for rank in made))
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
    other.strategy.notices.on_signal(15, 1)
    until(lambda: bool(one.script.asked and other.script.asked))
    assert one.script.asked == other.script.asked and one.script.asked[0][0] == "enter"


def test_all_ranks_told_at_once_come_to_one_decision(ranks: Any) -> None:
    group = ranks(*(Script(near=True) for _ in range(3)))
    for rank in group:
        rank.strategy.notices.on_signal(15, 1)
    until(lambda: all(rank.script.asked for rank in group))
    assert len({tuple(rank.script.asked) for rank in group}) == 1


def test_a_save_point_that_does_not_come_in_time_is_replayed_at_a_step_of_all(ranks: Any) -> None:
    scripts = [Script(near=False), Script(near=False)]
    for script in scripts:
        script.begins = False
    one, other = ranks(*scripts)
    one.strategy.notices.on_signal(15, 1)
    until(
        lambda: (
            any(word == "replay" for word, _ in one.script.asked)
            and any(word == "replay" for word, _ in other.script.asked)
        )
    )
    assert one.script.asked[-1] == other.script.asked[-1]


def test_without_a_save_of_the_script_the_state_is_saved(ranks: Any) -> None:
    one, other = ranks(Script(near=True), Script(near=True, points=False))
    one.strategy.notices.on_signal(15, 1)
    until(lambda: bool(one.stateful and other.stateful))
    assert one.stateful == other.stateful == ["no source"]


def test_a_drain_of_ray_is_a_notice_with_its_own_deadline(ranks: Any) -> None:
    (alone,) = ranks(Script(near=True))
    alone.strategy.notices.on_drain(5.0, {"node": [0]})
    until(lambda: bool(alone.script.asked))
    assert alone.strategy.latch.notice.source == "drain" and alone.strategy.left() <= 5.0


def test_when_the_controller_is_gone_the_run_is_over_and_nothing_is_held(
    ranks: Any, caplog: pytest.LogCaptureFixture
) -> None:
    (alone,) = ranks(Script(near=True))
    alone.strategy._connection.close()
    before = alone.strategy.boundary.steps
    alone.strategy.notices.on_signal(15, 1)
    until(lambda: "the controller is gone" in caplog.text)
    until(lambda: alone.strategy.boundary.steps > before + 5)
    assert alone.script.asked == []


def test_a_second_signal_changes_nothing(ranks: Any) -> None:
    (alone,) = ranks(Script(near=True))
    alone.strategy.notices.on_signal(15, 1)
    alone.strategy.notices.on_signal(15, 2)
    until(lambda: bool(alone.script.asked))
    assert len(alone.script.asked) == 1


# ---- phase by phase: one rank, whose training thread is the test -------------------------------------------


class Alone:
    def __init__(
        self, folder: Path, near: bool = True, native: bool = False, restarts: bool = True, **jit: Any
    ) -> None:
        config = JITCheckpointConfig(**{"kill_wait": 0.0, "grace": 30.0, **jit}, environ={})
        writer = PreemptionInfoWriter(SimpleNamespace(preemption_context=None) if restarts else object())
        flow: Any = SimpleNamespace(
            native=native, own_checkpoints=False, look=lambda frame: None, warn=lambda saves: None
        )
        self.script = Script(near)
        self.script.begins = False
        self.strategy = ReportSave(
            config, RankConnection(memory.MemoryStore(), 0, 1), writer, cast(Any, self.script), flow, folder
        )
        self.strategy.save_seconds = 0.1
        self.script.strategy = self.strategy
        self.phases, self.outcome = self.strategy.phases, self.strategy.context.outcome
        self.events: list[tuple[str, dict[str, object]]] = []
        self.strategy.context.events.heard = lambda at, kind, facts: self.events.append((kind, dict(facts)))
        self.strategy.start(None)

    def step(self) -> None:
        self.strategy.boundary.passed(sys._getframe())

    def is_in(self, phase: Phase) -> None:
        until(lambda: self.phases.phase is phase)

    def walked(self) -> list[object]:
        return [facts["phase"] for kind, facts in self.events if kind == "phase"]


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Callable[..., Alone]]:
    monkeypatch.setattr(internals, "poll_seconds", lambda: 0.05)
    monkeypatch.setattr(internals, "node_id", lambda: "node")
    made: list[Alone] = []

    def make(**more: Any) -> Alone:
        made.append(Alone(tmp_path, **more))
        return made[-1]

    yield make
    for each in made:
        each.strategy.stop()


def test_the_step_after_the_agreement_asks_for_the_scripts_own_save_and_its_report_answers(
    alone: Callable[..., Alone],
) -> None:
    one = alone()
    one.step()
    one.strategy.notices.on_signal(15, 1)
    one.is_in(Phase.BOUNDARY)
    one.step()
    assert one.script.asked == [("enter", 2)]
    one.strategy.begin()
    one.strategy.saved("checkpoint_000001", "is committed", EXACT)
    one.strategy.leave()
    assert one.walked() == ["waiting", "holding", "boundary", "saving", "committed", "leaving"]
    assert one.outcome.value is Outcome.SAVED


def test_a_report_with_a_checkpoint_during_the_kill_wait_is_the_save(alone: Callable[..., Alone]) -> None:
    one = alone(kill_wait=20.0)
    one.strategy.notices.on_signal(15, 1)
    one.is_in(Phase.WAITING)
    one.step()
    assert one.script.asked == [], "training goes on"
    one.strategy.begin()
    one.strategy.saved("checkpoint_000001", "is committed", EXACT)
    one.strategy.leave()
    assert one.walked() == ["waiting", "saving", "committed", "leaving"]


def test_a_save_point_that_is_not_reached_has_the_ranks_agree_again(alone: Callable[..., Alone]) -> None:
    one = alone(near=False, grace=6.0)
    one.step()
    one.strategy.notices.on_signal(15, 1)
    one.is_in(Phase.BOUNDARY)
    until(lambda: "instant" in one.walked())
    one.is_in(Phase.BOUNDARY)
    one.step()
    before = one.strategy.boundary.before
    assert before is not None, "the replay comes before the next step of the optimizer"
    before(sys._getframe())
    assert one.script.asked[-1][0] == "replay" and one.phases.phase is Phase.SAVING


def test_no_report_in_time_is_no_save_but_one_that_comes_late_is(
    alone: Callable[..., Alone], caplog: pytest.LogCaptureFixture
) -> None:
    one = alone(grace=2.0)
    one.strategy.notices.on_signal(15, 1)
    one.is_in(Phase.FAILED)
    assert one.outcome.value is Outcome.NOT_SAVED and "did not reach a save in time" in caplog.text
    one.strategy.begin()
    one.strategy.saved("checkpoint_000001", "is committed", EXACT)
    assert (one.outcome.value, one.phases.phase) == (Outcome.SAVED, Phase.COMMITTED)


def test_a_script_that_handles_a_preemption_itself_is_left_alone(alone: Callable[..., Alone]) -> None:
    one = alone(native=True)
    one.strategy.notices.on_signal(15, 1)
    one.is_in(Phase.DISMISSED)
    one.step()
    assert one.script.asked == [] and one.outcome.value is None


def test_where_nobody_restarts_the_run_training_goes_on_after_the_save(alone: Callable[..., Alone]) -> None:
    one = alone(restarts=False)
    one.step()
    one.strategy.notices.on_signal(15, 1)
    one.is_in(Phase.BOUNDARY)
    one.strategy.begin()
    one.strategy.saved("checkpoint_000001", "is committed", EXACT)
    one.strategy.continue_training()
    one.is_in(Phase.QUIET)
    until(lambda: one.outcome.value is None)
    one.step()
    assert one.script.asked == [], "it is saved once"


def test_where_no_process_restarts_the_run_a_second_signal_is_not_answered_after_the_save(
    alone: Callable[..., Alone],
) -> None:
    one = alone(restarts=False)
    one.step()
    one.strategy.notices.on_signal(15, 1)
    one.is_in(Phase.BOUNDARY)
    one.strategy.notices.on_drain(20.0, {})
    one.strategy.begin()
    one.strategy.saved("checkpoint_000001", "is committed", EXACT)
    one.strategy.continue_training()
    one.is_in(Phase.QUIET)
    one.strategy.notices.on_signal(15, 2)
    assert not one.strategy._inbox.pending
    one.strategy.stop()
    assert one.walked() == ["waiting", "holding", "boundary", "saving", "committed", "quiet"]


def test_a_save_that_fails_is_said(alone: Callable[..., Alone]) -> None:
    one = alone()
    one.strategy.notices.on_signal(15, 1)
    one.is_in(Phase.BOUNDARY)
    one.strategy.begin()
    one.strategy.not_saved("its parts are of different steps")
    assert (one.outcome.value, one.phases.phase) == (Outcome.NOT_SAVED, Phase.FAILED)
    assert one.phases.because == "its parts are of different steps"


def test_a_deadline_that_comes_forward_ends_the_wait_for_a_report(alone: Callable[..., Alone]) -> None:
    one = alone(grace=PATIENCE)
    one.strategy.notices.on_signal(15, 1)
    one.is_in(Phase.BOUNDARY)
    one.strategy.notices.on_drain(0.5, {"node": [0]})
    one.is_in(Phase.FAILED)
