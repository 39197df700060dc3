"""A script's own save as the answer to a notice, phase by phase: the test plays the training thread, and
turns the clock by hand."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lastcall import clock as clocks
from lastcall import errors
from lastcall.adapters.accelerate import script_save
from lastcall.adapters.accelerate.script_save import ScriptSave
from lastcall.core.context import NoticeContext
from lastcall.core.notice.answer import Answer
from lastcall.core.notice.phases import Phase, Phases
from lastcall.core.notice.responder import Responder
from lastcall.core.ranks.agreement import Agreement
from lastcall.core.save import budget
from lastcall.core.store.memory import MemoryStore
from lastcall.settings import JITCheckpointConfig
from lastcall.testing import FakeClock
from lastcall.types import Notice, Outcome

PATIENCE = 60.0


class Process:
    """One rank: its agent is a thread, its training thread is the test."""

    def __init__(
        self,
        folder: Path,
        clock: clocks.Clock,
        store: MemoryStore | None = None,
        rank: int = 0,
        size: int = 1,
    ) -> None:
        self.clock = clock
        self.died = threading.Event()
        jit = JITCheckpointConfig(kill_wait=3.0, grace=30.0, environ={})
        self.context = NoticeContext.beside(folder, jit, rank, clock)
        self.phases = Phases(self.context.events.emit)
        self.answer = Answer(self.context, self.phases)
        self.save = ScriptSave(self.context, self.answer, lambda: 0, self.died.set)
        self.on_look: Callable[[], None] = lambda: None
        self.responder = Responder(self.context, self.answer, self.save, lambda: self.on_look())
        self.ranks = None if store is None else Agreement(store.clone(), rank, size, clock)
        if self.ranks is not None:
            self.save.join(self.ranks)

    def notice(self, left: float = 30.0, source: str = "signal") -> Notice:
        now = self.clock.now()
        notice = Notice(source, "SIGTERM", now, now + left, 15)
        self.context.latch.offer(notice)
        return notice

    def told(self, left: float = 30.0, source: str = "signal") -> None:
        self.thread = threading.Thread(target=self._run, args=(self.notice(left, source),), daemon=True)
        self.thread.start()

    def _run(self, notice: Notice) -> None:
        try:
            self.responder.run(notice)
        except Exception:
            self.responder.fault()

    def step(self) -> bool:
        self.save.steps += 1
        return self.save.due()

    def is_in(self, *phases: Phase) -> None:
        until(lambda: self.phases.phase in phases)

    def ends(self) -> None:
        self.thread.join(PATIENCE)
        assert not self.thread.is_alive()

    def walked(self) -> list[str]:
        self.context.events.flush()
        lines = map(json.loads, self.context.events.path.read_text().splitlines())
        return [line["phase"] for line in lines if line["kind"] == "phase"]


def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.002)


@pytest.fixture
def alone(tmp_path: Path) -> Process:
    return Process(tmp_path, FakeClock())


@pytest.fixture
def two(tmp_path: Path) -> list[Process]:
    store, clock = MemoryStore(), clocks.Clock()
    return [Process(tmp_path, clock, store, rank, 2) for rank in range(2)]


def test_training_goes_on_during_the_kill_wait_and_saves_at_the_next_step_after_it(alone: Process) -> None:
    alone.told()
    alone.is_in(Phase.WAITING)
    assert not any(alone.step() for _ in range(3))
    alone.clock.sleep(4.0)
    alone.is_in(Phase.BOUNDARY)
    assert alone.save.target == 4 and alone.step()
    alone.save.begin()
    assert alone.save.conclude(saved=True)
    alone.ends()
    assert alone.walked() == ["waiting", "holding", "boundary", "saving", "committed", "leaving"]
    assert alone.context.outcome.value is Outcome.SAVED and not alone.died.is_set()


@pytest.mark.parametrize(
    ("wait", "left", "waited"),
    [(3.0, 30.0, 3.0), (3.0, 2.0, 0.75), (10.0, 12.0, 10.0), (10.0, 6.0, 4.75), (3.0, 0.5, 0.0)],
)
def test_b12_the_kill_wait_is_cut_by_the_notices_own_deadline(
    alone: Process, wait: float, left: float, waited: float
) -> None:
    """B12: as in core.budget, not by a third of a grace that the notice does not give."""
    alone.notice(left)
    assert budget.wait_within(wait, alone.answer.left, alone.save.needs(alone.answer.deadline)) == waited
    alone.notice(0.0)
    assert budget.wait_within(wait, alone.answer.left, alone.save.needs(alone.answer.deadline)) == 0.0, (
        "a second notice leaves no time"
    )


def test_b12_a_second_notice_ends_the_wait(alone: Process) -> None:
    """B12"""
    alone.told()
    alone.is_in(Phase.WAITING)
    alone.notice(0.1)
    alone.clock.sleep(0.2)
    alone.is_in(*set(Phase) - {Phase.QUIET, Phase.WAITING})
    assert alone.save.target == 1


def test_without_a_save_in_time_nothing_is_saved_and_the_process_dies(
    alone: Process, caplog: pytest.LogCaptureFixture
) -> None:
    alone.on_look = lambda: alone.clock.sleep(5.0)
    alone.told()
    alone.ends()
    assert alone.died.is_set() and alone.context.outcome.value is Outcome.NOT_SAVED
    assert alone.walked() == ["waiting", "holding", "boundary", "instant", "failed"]
    assert "did not reach its own save in time: nothing was saved" in caplog.text
    assert not alone.step(), "nothing is left to do"


def test_a_save_that_does_not_end_in_time_is_not_waited_for(alone: Process) -> None:
    alone.told()
    alone.is_in(Phase.WAITING)
    alone.clock.sleep(4.0)
    alone.is_in(Phase.BOUNDARY)
    assert alone.step()
    alone.save.begin()
    alone.clock.sleep(PATIENCE)
    alone.ends()
    assert alone.died.is_set() and alone.walked()[-3:] == ["saving", "instant", "failed"]


def test_a_later_notice_shortens_the_time_that_the_save_is_waited_for(alone: Process) -> None:
    alone.told()
    alone.is_in(Phase.WAITING)
    alone.clock.sleep(4.0)
    alone.is_in(Phase.BOUNDARY)
    alone.notice(0.1)
    alone.ends()
    assert alone.died.is_set()


def test_a_branch_that_saves_nothing_is_no_save(alone: Process, caplog: pytest.LogCaptureFixture) -> None:
    alone.told()
    alone.is_in(Phase.WAITING)
    alone.clock.sleep(4.0)
    alone.is_in(Phase.BOUNDARY)
    assert alone.step() and not alone.save.conclude(saved=False)
    assert alone.context.outcome.value is Outcome.NOT_SAVED and alone.phases.phase is Phase.FAILED
    assert "did not call save_state()" in caplog.text


def test_training_that_ends_by_itself_is_waited_for_no_longer(alone: Process) -> None:
    alone.told()
    alone.is_in(Phase.WAITING)
    alone.phases.close()
    alone.ends()
    assert not alone.died.is_set() and alone.context.outcome.value is None


def test_after_a_fault_one_process_saves_at_its_next_step(alone: Process) -> None:
    alone.notice()
    alone.save.steps = 7
    alone.responder.fault()
    assert alone.phases.phase is Phase.BOUNDARY and alone.step() and alone.save.conclude(saved=True)


# ---- many ranks --------------------------------------------------------------------------------------------


def follow(ranks: list[Process]) -> None:
    """Their listeners: who hears of a notice answers it."""
    for rank in ranks:
        assert rank.ranks is not None

        def hear(notice: Notice, rank: Process = rank) -> None:
            if rank.phases.phase is Phase.QUIET:
                rank.told(
                    notice.deadline - rank.clock.now() if notice.deadline is not None else 30.0, notice.source
                )

        threading.Thread(target=rank.save.listen, args=(rank.ranks.clone(), hear), daemon=True).start()


def train(rank: Process, lockstep: threading.Barrier, ends: dict[int, int], saves: bool) -> None:
    while True:
        lockstep.wait(PATIENCE)
        if rank.step():
            rank.save.begin()
            assert rank.save.conclude(saves)
            assert rank.ranks is not None
            ends[rank.ranks.rank] = rank.save.steps
            return
        time.sleep(0.001)


@pytest.mark.parametrize("told", [(0,), (1,), (0, 1)])
def test_all_ranks_save_after_the_same_step_whoever_was_told(
    two: list[Process], told: tuple[int, ...], tmp_path: Path
) -> None:
    follow(two)
    for rank in two:
        object.__setattr__(
            rank.context, "jit", JITCheckpointConfig(kill_wait=0.3, grace=PATIENCE, environ={})
        )
    lockstep, ends = threading.Barrier(2), dict[int, int]()
    # One rank saves for all: the other has nothing to do but to hear of it.
    threads = [
        threading.Thread(target=train, args=(rank, lockstep, ends, rank is two[0]), daemon=True)
        for rank in two
    ]
    for thread in threads:
        thread.start()
    until(lambda: two[0].save.steps > 10)
    for number in told:
        two[number].told()
    for thread in threads:
        thread.join(PATIENCE)
    assert ends[0] == ends[1] == two[0].save.target == two[1].save.target
    assert [rank.context.outcome.value for rank in two] == [Outcome.SAVED] * 2
    assert (tmp_path / "events-1.jsonl").exists() or two[1].walked()[-1] == "leaving"


def test_where_no_rank_has_saved_none_is_saved(two: list[Process]) -> None:
    found: dict[int, bool] = {}

    def leave(number: int) -> None:
        rank = two[number]
        rank.notice()
        for phase in (Phase.WAITING, Phase.HOLDING, Phase.BOUNDARY):
            rank.phases.enter(phase)
        found[number] = rank.save.conclude(saved=False)

    threads = [threading.Thread(target=leave, args=(number,), daemon=True) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
    assert found == {0: False, 1: False}


def test_ranks_that_cannot_agree_save_nothing_rather_than_parts_of_different_steps(
    two: list[Process], caplog: Any
) -> None:
    one = two[0]
    assert one.ranks is not None and one.save._agents is not None
    one.save._agents.close()
    with pytest.raises(errors.StoreLost):
        one.save.announce(one.notice())
    one.told()
    one.ends()
    assert one.phases.phase is Phase.FAILED and not one.step()
    assert "the ranks cannot agree on a step" in caplog.text


def test_a_rank_that_is_held_is_at_most_one_step_further_than_it_has_said() -> None:
    assert script_save._first({0: {"step": 7}, 1: {"step": 8}}) == {"step": 9}
