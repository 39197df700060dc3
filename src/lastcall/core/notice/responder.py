"""The responder: turns a notice into an outcome, in the same order for every adapter.

    WAITING    the kill wait: training continues, unless the save would then come too late
    HOLDING    where to save: one process saves at its next boundary, many ranks agree on one
    BOUNDARY   the training thread comes to it, and saves
    INSTANT    it does not come in time: save from the side, or say why not

What differs between plain loops, many ranks, a script's own save and Ray's report is a `Strategy`. Two
threads can save: the training thread at its boundary, and the agent from the side. `phases` decides which of
them does.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from lastcall.core import timing
from lastcall.core.context import NoticeContext
from lastcall.core.notice.answer import Answer
from lastcall.core.notice.phases import Phase
from lastcall.core.save import budget
from lastcall.types import Notice, Outcome

log = logging.getLogger("lastcall")
# seconds before the deadline at which a stuck process is ended: a GPU's driver takes half of one to end it
_WAY_OUT = (0.2, 1.0)
_LEAVE = 5.0  # seconds that a stuck training thread gets to leave on its own after an exact rescue


@dataclass(frozen=True)
class Where:
    """What a strategy has decided: where the training thread saves, or that it will not."""

    boundary: bool = True  # False: no boundary can be agreed on; save from the side
    dismissed: bool = False  # nothing to save: training is over, or the script handles the notice itself
    because: str = ""


class Strategy(Protocol):
    """How one adapter saves. Called on the agent's thread, in this order."""

    def needs(self, deadline: float) -> float:
        """Seconds that the save takes, with all that must follow before the process may be killed."""

    def announce(self, notice: Notice) -> None:
        """Announce the notice to the other ranks."""

    def hurried(self, notice: Notice) -> bool:
        """Whether there is no kill wait and no boundary to wait for: a rank was lost."""

    def hold(self) -> None:
        """HOLDING: let the training thread come by at its next boundary."""

    def decide(self) -> Where:
        """HOLDING: agree with the other ranks where to save."""

    def boundary_until(self) -> float:
        """BOUNDARY: until when to wait for it."""

    def hopeless(self, saving: bool) -> str:
        """BOUNDARY and SAVING, a few times a second: why the boundary will not come, or its save will fail;
        empty while it may work."""

    def aside(self, because: str) -> None:
        """INSTANT: save without a boundary. Leaves the phase at COMMITTED, FAILED or DISMISSED, or at
        BOUNDARY where only that can still save."""

    def continues(self) -> bool:
        """After a hang that was answered: whether training continues. Leaves the phase at QUIET then."""

    def stuck(self) -> None:
        """The deadline has come, nothing is saved, and the training thread does not leave."""

    def fault(self) -> None:
        """run() has raised: no thread may wait for it any longer."""


class Responder:
    """`look`: looks for a later notice, which may shorten the deadline."""

    def __init__(
        self, context: NoticeContext, answer: Answer, strategy: Strategy, look: Callable[[], None]
    ) -> None:
        self._context = context
        self._answer = answer
        self._strategy = strategy
        self._look = look
        self._phases = answer.phases

    def run(self, notice: Notice, *, passing: bool = False) -> None:
        """Answer this notice. Returns when the training thread has taken over, when training may continue, or
        when the session ends; may leave the process. `passing`: training continues after the save."""
        answer, strategy = self._answer, self._strategy
        answer.begin(notice, passing=passing)
        hurried = strategy.hurried(notice)
        if not hurried and not self._phases.try_enter(Phase.WAITING, notice.reason):
            return  # training raised in this moment, and its thread saves
        strategy.announce(notice)
        if not hurried:
            self._wait_before(notice)
        if not self._phases.try_enter(Phase.HOLDING):
            return
        strategy.hold()
        where = Where(boundary=False, because=notice.reason) if hurried else strategy.decide()
        if where.dismissed:
            self._phases.try_enter(Phase.DISMISSED, where.because)
            return
        if self._comes_to_nothing(where):
            strategy.aside(self._phases.because)
        elif answer.arrived:
            return  # the training thread has taken over, and leaves on its own however late it is
        if not (answer.passing and not self._phases.closed and strategy.continues()):
            self._stay_until_the_end()

    def fault(self) -> None:
        """run() has raised."""
        self._strategy.fault()

    def _wait_before(self, notice: Notice) -> None:
        """The kill wait, cut short where the save would otherwise come too late."""
        context, answer = self._context, self._answer
        wanted, needs = context.jit.kill_wait, self._strategy.needs(answer.deadline)
        wait = budget.wait_within(wanted, answer.left, needs)
        log.info("%s received, initiating JIT checkpoint in %.1fs", notice.reason, wait)
        if wait < wanted:
            log.warning(
                "Kill wait cut from %.1fs to %.1fs: the save needs about %.1fs and %.1fs are left",
                wanted, wait, needs, answer.left,
            )  # fmt: skip
        until = notice.at + wait
        while (
            self._phases.phase is Phase.WAITING
            and (left := min(until, answer.deadline) - context.clock.now()) > 0
        ):
            if self._phases.wait_closed(min(left, timing.LOOK)):
                return
            self._look()

    def _comes_to_nothing(self, where: Where) -> bool:
        """Wait for the boundary. True once no save at a boundary will come: the phase is INSTANT then."""
        phases = self._phases
        if not where.boundary:
            return phases.try_enter(Phase.INSTANT, where.because, only_from={Phase.HOLDING})
        if not phases.try_enter(Phase.BOUNDARY, where.because):
            return False
        deadline, until = self._answer.deadline, self._strategy.boundary_until()
        while not phases.closed:
            left = until - self._context.clock.now()
            phase = phases.wait_while(
                {Phase.BOUNDARY, Phase.SAVING}, min(timing.TICK, left) if left > 0 else timing.TICK
            )
            if phase not in (Phase.BOUNDARY, Phase.SAVING):
                # the save at the boundary failed, and the strategy has another way
                return phase is Phase.INSTANT
            self._look()
            if self._answer.deadline < deadline:
                deadline, until = self._answer.deadline, min(until, self._strategy.boundary_until())
            saving = phase is Phase.SAVING
            late = not saving and self._context.clock.now() >= until
            because = "no boundary in time" if late else self._strategy.hopeless(saving)
            if because and phases.try_enter(Phase.INSTANT, because, only_from={phase}):
                return True
        return False

    def _last_moment(self) -> float:
        least, most = _WAY_OUT
        deadline = self._answer.deadline
        return deadline - max(least, min(most, 0.1 * (deadline - self._answer.notice.at)))

    def _stay_until_the_end(self) -> None:
        """Give the training thread time to leave on its own; while only an inexact checkpoint is saved, it
        may still save a better one."""
        clock, phases, answer = self._context.clock, self._phases, self._answer
        until = self._last_moment()
        if answer.whole:
            until = min(until, clock.now() + _LEAVE)
        while not self._gone() and (left := until - clock.now()) > 0:
            if phases.wait_closed(min(left, timing.LOOK)):
                return
            self._look()
            until = min(until, self._last_moment())
        if self._gone():
            return
        if not answer.committed:
            log.error("The deadline has come and nothing could be saved")
            if not answer.arrived:
                self._strategy.stuck()
        elif not answer.arrived and self._leaves_for("the training thread does not return"):
            self._context.outcome.decide(Outcome.SAVED)
            answer.leave_by_force("The training thread does not return")

    def _gone(self) -> bool:
        """Whether the training thread leaves on its own."""
        phases = self._phases
        return (
            phases.closed
            or phases.phase is Phase.DISMISSED
            or (phases.phase is Phase.LEAVING and not self._answer.at_gate)
        )

    def _leaves_for(self, why: str) -> bool:
        return self._phases.phase is Phase.LEAVING or self._phases.try_enter(
            Phase.LEAVING, why, only_from={Phase.COMMITTED}
        )
