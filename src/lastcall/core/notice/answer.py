"""One notice on its way to an outcome: what the responder, its strategy and the training thread share.

After an exact checkpoint is committed the training thread may not touch the state again: it leaves at the
gate or at its boundary, and where it is stuck the agent ends the process.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from typing import NoReturn

from lastcall import errors
from lastcall.core.context import NoticeContext
from lastcall.core.notice.phases import Phase, Phases
from lastcall.core.process import exits
from lastcall.types import Notice, Outcome

log = logging.getLogger("lastcall")


class Answer:
    """`wind_up` is called before the process is ended by force: from any thread, whatever the training thread
    is doing."""

    def __init__(
        self, context: NoticeContext, phases: Phases, wind_up: Callable[[], None] = lambda: None
    ) -> None:
        self._context = context
        self._wind_up = wind_up
        self._current: Notice | None = None
        self.phases = phases
        self.whole = False  # an exact checkpoint is committed: nothing may change the state any more
        self.committed = False  # some checkpoint is committed for this notice
        self.passing = False  # a hang: training continues after the save, and no rank leaves
        # the training thread stands at a boundary, or has left its loop: it leaves on its own
        self.arrived = False
        # it has left in the middle of its step, and may still hang in a `finally` of the script
        self.at_gate = False
        self._left = False  # Preempted was raised into the loop

    # ---- the notice ----------------------------------------------------------------------------------------

    def begin(self, notice: Notice, *, passing: bool = False) -> None:
        """From here on this notice is answered; it may be the loss of a rank, which no latch holds. One that
        the latch holds is read there: a later one may bring the signal that a run which cannot save dies
        of."""
        latched = self._context.latch.notice
        self._current = (
            None
            if latched is not None and (latched.source, latched.at) == (notice.source, notice.at)
            else notice
        )
        self.passing = passing

    def reset(self) -> None:
        """Training continues: the next notice starts from a clean slate."""
        self._current = None
        self.whole = self.committed = self.passing = self.arrived = self.at_gate = False

    @property
    def notice(self) -> Notice:
        notice = self._context.latch.notice if self._current is None else self._current
        assert notice is not None
        return notice

    @property
    def deadline(self) -> float:
        """The deadline of this notice, or of a later one that left less time."""
        notice, later = self.notice, self._context.latch.notice
        mine = notice.deadline if notice.deadline is not None else notice.at + self._context.jit.grace
        return mine if later is None or later.deadline is None else min(mine, later.deadline)

    @property
    def left(self) -> float:
        return self.deadline - self._context.clock.now()

    # ---- how it ends ---------------------------------------------------------------------------------------

    def saved(self, how: str) -> None:
        """An exact checkpoint, or one that is as good as it gets, answers the notice."""
        # first: the training thread leaves with its code once this is `whole`
        self._context.outcome.decide(Outcome.SAVED)
        self.whole = self.committed = True
        # not "stopping": after a hang training continues, and so it does with a Ray that knows no preemption
        notice = self._current or self._context.latch.notice
        log.info("After %s: %s", "the notice" if notice is None else notice.reason, how)
        # Both threads may come here, where the ranks gave up on a boundary that was committed all the same.
        self.phases.try_enter(Phase.COMMITTED, how)

    def saved_in_part(self, how: str) -> None:
        """An inexact checkpoint is committed; a late boundary may still save a better one."""
        self.committed = True
        self.phases.enter(Phase.COMMITTED, how)

    def not_saved(self, kind: str, because: str, **facts: object) -> None:
        """One attempt has failed."""
        self._context.events.emit("not-saved", save=kind, because=because, **facts)

    def preempted(self) -> errors.Preempted:
        """The exception that leaves the training loop."""
        saved = self._context.outcome.saved
        what = "saved and stopped" if saved else "stopped without a checkpoint"
        return errors.Preempted(self.exit_code, f"{what} after {self.notice.reason}")

    @property
    def exit_code(self) -> int:
        return exits.code(self.notice, self._context.outcome.saved, self._context.jit.exit_code)

    def leave_if_saved(self) -> None:
        """On the training thread, before it would change the state."""
        if self.whole and not self.passing:
            self.at_gate = not self.arrived
            self.leave()

    def leave(self) -> NoReturn:
        """Out of the training loop, by an exception that only `finally` and `with` see. A loop that catches
        it and continues is not asked twice."""
        # refused where the agent leaves by force, or is about to say what it has committed
        self.phases.try_enter(Phase.LEAVING)
        if self._left and "pytest" not in sys.modules:
            self.leave_by_force("The training loop caught Preempted and continued")
        self._left = True
        raise self.preempted()

    def leave_by_force(self, why: str, *, by_signal: bool = True) -> NoReturn:
        """`by_signal`: where nothing is saved, die of the signal that came."""
        context = self._context
        notice, code = self.notice, self.exit_code
        log.warning("%s: leaving with exit code %d", why, code)
        self._wind_up()
        if by_signal and not context.outcome.saved and notice.signum is not None:
            exits.die_of(notice.signum)
        exits.leave(code)
