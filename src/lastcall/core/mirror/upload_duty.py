"""Which of the ranks copies to the mirror, and for how long the others stay for it.

It is the one that speaks, or where the machines share no directory the one whose directory has the newest checkpoint (the keeper).
Nobody leaves before the checkpoints are in the mirror, as long as there is time.
"""

from __future__ import annotations

import atexit
import math
from collections.abc import Callable

from lastcall.core.checkpoint.record import Entry
from lastcall.core.context import RunContext
from lastcall.core.mirror.mirror import Mirror
from lastcall.core.mirror.upload import Until
from lastcall.core.ranks.peers import Ranks
from lastcall.types import Capture, Outcome

_LAST = 1.5  # seconds kept back before the deadline for the way out: the process is gone a second before it (exits.py)
_COPIED = "copied"  # the word of the rank that uploads
_LOOK = 0.25


class UploadDuty:
    """`holder_of_newest`: the rank whose directory has the newest checkpoint, where the machines share none. `urgent`: whether this
    process is about to leave. `deadline`: of the notice that has come."""

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
        """A checkpoint was committed: have it uploaded, if that is for this rank to do."""
        holder = self._holder_of_newest()
        if holder != self._former:  # what is there is what the one before has made of it
            self._former = holder
            self._mirror.forget()
        if self.uploads():
            self._mirror.push(entry, urgent=self._urgent())

    def settle(self) -> None:
        """Training that has finished has all the time, until a notice comes. What raised waits as long as one that has a notice: it may
        be started again."""
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
                # As finished nobody would start it again, and its end may be lost with this machine.
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
        """Where that is another rank. If this one left before, torchrun would take it for a failure, and end the one that uploads."""
        ranks, clock = self._ranks, self._context.clock
        while not self.uploads() and clock.now() < until():  # it does when those before it are gone
            if ranks is None or self._holder_of_newest() in ranks.gone() or ranks.hear(_COPIED, _LOOK) is not None:
                return
            clock.sleep(_LOOK / 10)  # a store that is lost answers at once
