"""What one rank of many does about a notice, both of its threads played by the test. The others:
test_joint.py."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from helpers.core.answers import NOW, Left, nobody_leaves
from helpers.core.solo import Solo
from lastcall import errors
from lastcall.core.joint.many_ranks import ManyRanks
from lastcall.core.notice.inbox import Inbox
from lastcall.core.notice.phases import Phase
from lastcall.core.ranks.election import Decision
from lastcall.core.ranks.heartbeat import HANG, LOST
from lastcall.types import Kind, Notice, Outcome

P = Phase


@pytest.fixture(autouse=True)
def _nobody_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    nobody_leaves(monkeypatch)


class Rank(Solo):
    """Rank 0 of two; what the two save together is a function of the test's."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.save_together: Callable[[], Any] = fail
        ranks: Any = SimpleNamespace(rank=0, size=2, token="t" * 8)
        joint_save: Any = SimpleNamespace(
            portion=lambda capture, writers: capture, save=lambda capture, order: self.save_together()
        )
        common = self.context, self.answer, self.checkpointer, self.periodic, self.started.saver
        self.strategy: ManyRanks = ManyRanks(*common, Inbox.of_run(self.context), ranks, joint_save)
        self.strategy.decision = Decision("boundary", step=3, writers=(0, 1), because="the next boundary")


@pytest.fixture
def rank(tmp_path: Path) -> Iterator[Rank]:
    with Rank(tmp_path) as made:
        yield made


def fail() -> None:
    raise errors.SaveError("the disk of rank 1 is full")


def leaves(rank: Rank, code: int) -> None:
    with pytest.raises(errors.Preempted) as left:
        rank.strategy.at_boundary()
    assert left.value.code == code and rank.phases.phase is P.LEAVING


# ---- a fault in lastcall -----------------------------------------------------------------------------------


def test_a_boundary_whose_save_fails_after_a_fault_of_the_agent_is_not_held_for_ever(rank: Rank) -> None:
    """Nobody saves from the side any more."""

    def save() -> None:
        rank.strategy.fault()
        fail()

    rank.save_together = save
    rank.notify(P.BOUNDARY)
    leaves(rank, 143)
    assert rank.context.outcome.value is Outcome.NOT_SAVED


def test_a_fault_of_the_agent_right_after_a_save_has_failed_lets_go_of_the_boundary(rank: Rank) -> None:
    rank.save_together = fail
    rank.notify(P.BOUNDARY)
    wait_while = rank.phases.wait_while

    def waits(phases: Any, timeout: float | None = None) -> Phase:
        if rank.phases.phase is P.INSTANT:
            rank.strategy.fault()
        return wait_while(phases, timeout)

    rank.phases.wait_while = waits  # type: ignore[method-assign]
    leaves(rank, 143)


def test_a_boundary_that_is_saved_in_spite_of_a_fault_is_saved(
    rank: Rank, monkeypatch: pytest.MonkeyPatch
) -> None:
    def save() -> Any:
        rank.strategy.fault()
        return SimpleNamespace(path=Path("checkpoint-3"))

    monkeypatch.setattr(rank.strategy, "_save_together", lambda capture, order: save())
    rank.notify(P.BOUNDARY)
    leaves(rank, 75)
    assert rank.context.outcome.saved


@pytest.mark.parametrize("phase", [P.HOLDING, P.BOUNDARY, P.INSTANT, P.SAVING_ASIDE])
@pytest.mark.parametrize("passing", [False, True])
def test_a_fault_of_the_agent_lets_go_of_the_training_thread_also_during_a_hang(
    rank: Rank, phase: Phase, passing: bool
) -> None:
    rank.notify(phase)
    if passing:
        rank.answer.begin(Notice("hang", "rank 1 hangs", NOW, NOW + 30.0, 15), passing=True)
    rank.strategy.fault()
    assert rank.phases.phase is P.FAILED and rank.subject.stops == 1
    leaves(rank, 143)


# ---- a save that raises ------------------------------------------------------------------------------------


def of_no_kind() -> None:
    raise ValueError("a state_dict() of the user's")


@pytest.mark.parametrize("where", ["capture", "save"])
def test_a_boundary_whose_save_raises_what_was_not_foreseen_is_left_to_the_side(
    rank: Rank, where: str
) -> None:
    """Out of the training loop it would leave the other ranks waiting for this one's part."""
    if where == "capture":
        rank.subject.before_capture = of_no_kind
    else:
        rank.save_together = of_no_kind
    rank.notify(P.BOUNDARY)
    wait_while, aside = rank.phases.wait_while, []

    def waits(phases: Any, timeout: float | None = None) -> Phase:
        if rank.phases.phase is P.INSTANT:
            aside.append(rank.phases.because)
            rank.strategy.fault()
        return wait_while(phases, timeout)

    rank.phases.wait_while = waits  # type: ignore[method-assign]
    leaves(rank, 143)
    assert aside == ["the save at the agreed boundary failed (a state_dict() of the user's)"]
    assert rank.said("not-saved")[0]["because"] == "a state_dict() of the user's"


# ---- after a hang ------------------------------------------------------------------------------------------


def test_a_rank_that_is_lost_in_the_last_instant_of_an_answered_hang_is_answered_next(rank: Rank) -> None:
    inbox, lost = rank.strategy._inbox, Notice(LOST, "rank 1 is gone", NOW, NOW + 30.0)
    inbox.lose_rank(hang := Notice(HANG, "rank 1 hangs", NOW, NOW + 30.0))
    rank.answer.begin(hang, passing=True)
    rank.enter(P.SAVING_ASIDE)
    rank.answer.saved("saved checkpoint-3 together")
    rank.strategy._ranks.next_round = lambda: None  # type: ignore[method-assign]
    reset = rank.answer.reset

    def at_last() -> None:
        reset()
        inbox.lose_rank(lost)

    rank.answer.reset = at_last  # type: ignore[method-assign]
    assert rank.strategy.continues() and rank.phases.phase is P.QUIET
    assert inbox.rank_loss == lost and inbox.wait(0.0)


# ---- two savers --------------------------------------------------------------------------------------------


def test_a_boundary_that_was_committed_after_all_still_gives_the_others_its_part_from_the_side(
    rank: Rank, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They may not know of it, and wait."""
    taken: list[Kind] = []

    def together(capture: object, order: Any) -> Any:
        taken.append(order.kind)
        record = SimpleNamespace(exact=True, because="")
        return SimpleNamespace(path=Path("checkpoint-3"), record=record)

    monkeypatch.setattr(rank.strategy, "_save_together", together)
    rank.notify(P.INSTANT)
    rank.answer.saved("saved checkpoint-3 together")
    rank.strategy._save_aside(
        Decision("instant", step=3, writers=(0, 1), because="no boundary in time"), Kind.RESCUE
    )
    assert taken == [Kind.RESCUE] and rank.phases.phase is P.COMMITTED and rank.context.outcome.saved


def test_a_boundary_that_fails_is_handed_to_the_agents_and_waited_at(rank: Rank) -> None:
    rank.save_together = fail
    rank.notify(P.BOUNDARY)
    wait_while = rank.phases.wait_while

    def waits(phases: Any, timeout: float | None = None) -> Phase:
        if rank.phases.phase is P.INSTANT:
            assert (
                rank.phases.because == "the save at the agreed boundary failed (the disk of rank 1 is full)"
            )
            rank.phases.enter(P.SAVING_ASIDE)
            rank.answer.saved("saved checkpoint-3 together")
        return wait_while(phases, timeout)

    rank.phases.wait_while = waits  # type: ignore[method-assign]
    leaves(rank, 75)
    assert rank.answer.arrived


# ---- stuck -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("outcome", [None, Outcome.NOT_SAVED, Outcome.FAILED])
def test_a_training_thread_that_is_stuck_and_has_nothing_saved_is_left_behind_also_where_it_has_raised(
    rank: Rank, outcome: Outcome | None
) -> None:
    rank.notify(P.INSTANT)
    rank.phases.enter(P.FAILED, "no rank holds the whole state")
    if outcome is not None:
        rank.context.outcome.decide(outcome)
    with pytest.raises(Left, match="143"):
        rank.strategy.stuck()
    assert rank.context.outcome.value is (outcome or Outcome.NOT_SAVED) and rank.phases.phase is P.LEAVING


@pytest.mark.parametrize("phase", [P.HOLDING, P.BOUNDARY, P.INSTANT, P.SAVING_ASIDE])
def test_a_rank_is_not_left_behind_before_it_is_known_that_nothing_is_saved(rank: Rank, phase: Phase) -> None:
    rank.notify(phase)
    rank.strategy.stuck()
    assert rank.phases.phase is phase and not rank.context.outcome.decided


# ---- a rank that is let through ----------------------------------------------------------------------------


def test_a_rank_that_is_let_through_to_the_others_step_has_not_arrived(rank: Rank) -> None:
    rank.notify(P.INSTANT)
    rank.answer.arrived = True
    rank.context.gate.let(rank.context.gate.steps + 1)
    rank.strategy.at_boundary()
    assert not rank.answer.arrived and rank.phases.phase is P.INSTANT


def test_a_rank_that_is_not_at_the_agreed_boundary_yet_trains_on(rank: Rank) -> None:
    rank.strategy.decision = Decision(
        "boundary", step=4, writers=(0, 1), because="rank 1 has passed the next one"
    )
    rank.notify(P.BOUNDARY)
    rank.strategy.at_boundary()
    assert rank.phases.phase is P.BOUNDARY
