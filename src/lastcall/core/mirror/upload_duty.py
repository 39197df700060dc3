"""Which rank uploads to the mirror, and how long the others wait for it.

It is the lowest rank that is alive or, where the machines share no directory, the one whose directory has the
newest checkpoint. No rank leaves before the checkpoints are in the mirror, as long as there is time.
"""

from __future__ import annotations

import atexit
import math
from collections.abc import Callable

from lastcall.core import timing
from lastcall.core.checkpoint.record import Entry
from lastcall.core.context import RunContext
from lastcall.core.mirror.mirror import Mirror
from lastcall.core.mirror.upload import Until
from lastcall.core.ranks.peers import Ranks
from lastcall.types import Capture, Outcome

# seconds kept back before the deadline for the exit: the process is gone a second before it (exits.py)
_LAST = 1.5
_COPIED = "copied"  # the message of the rank that uploads


class UploadDuty:
    """`holder_of_newest`: the rank whose directory has the newest checkpoint, where the machines share none.
    `urgent`: whether this process is about to leave. `deadline`: of the notice that has come."""

    def __init__(
        self,
        context: RunContext,
        mirror: Mirror,
        ranks: Ranks | None,
        holder_of_newest: Callable[[], int | None],
        urgent: Callable[[], bool],
        deadline: Callable[[], float],
    ) -> None:
        self._context = context
        self._mirror = mirror
        self._ranks = ranks
        self._holder_of_newest = holder_of_newest
        self._urgent = urgent
        self._deadline = deadline
        self._former: int | None = None  # the holder when a checkpoint was uploaded last

    def on_commit(self, entry: Entry, capture: Capture | None = None) -> None:
        """A checkpoint was committed: upload it, if that is this rank's duty."""
        holder = self._holder_of_newest()
        if holder != self._former:  # the mirror is as the previous holder has left it
            self._former = holder
            self._mirror.forget()
        if self.uploads():
            self._mirror.push(entry, urgent=self._urgent())

    def settle(self) -> None:
        """Training that has finished has all the time, until a notice comes. A run that raised waits as long
        as one with a notice: it may be started again."""
        context = self._context
        finished = context.outcome.value is Outcome.FINISHED
        patience = math.inf if finished else context.clock.now() + context.jit.grace

        def until() -> float:
            return self._deadline() - _LAST if context.latch.raised else patience

        if not finished:
            self._await_the_uploader(until)
        if self.uploads():
            uploaded = self._mirror.settle(until)
            if self._ranks is not None:
                self._ranks.tell(_COPIED, {})
            if finished and not uploaded and context.latch.raised:
                # If it counted as finished it would not be started again, and its end may be lost with this
                # machine.
                context.outcome.decide(Outcome.SAVED)
            elif finished:
                atexit.register(self._mirror.copy_rest)

    def uploads(self) -> bool:
        """Whether this rank does."""
        holder, ranks = self._holder_of_newest(), self._ranks
        if ranks is None:
            return True
        return ranks.is_spokesrank() if holder is None else ranks.rank == holder

    def _await_the_uploader(self, until: Until) -> None:
        """Where another rank uploads. If this one left before, torchrun would take it for a failure, and kill
        the one that uploads."""
        ranks, clock = self._ranks, self._context.clock
        while not self.uploads() and clock.now() < until():  # it does when the lower ranks are gone
            if (
                ranks is None
                or self._holder_of_newest() in ranks.gone()
                or ranks.hear(_COPIED, timing.LOOK) is not None
            ):
                return
            clock.sleep(timing.LOOK / 10)  # a store that is lost answers at once
