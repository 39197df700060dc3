"""Which of the ranks copies to the mirror, and for how long the others stay for it.

It is the one that speaks, or where the machines share no directory the one whose directory has the newest checkpoint (the keeper).
Nobody leaves before the checkpoints are in the mirror, as long as there is time.
"""

from __future__ import annotations

import atexit
import math
from typing import TYPE_CHECKING

from lastcall.core.checkpoint.catalog import Entry
from lastcall.core.mirror.mirror import Mirror
from lastcall.core.mirror.upload import Until
from lastcall.types import Outcome

if TYPE_CHECKING:
    from lastcall.core.session import Session

_LAST = 1.5  # seconds kept back before the deadline for the way out: the process is gone a second before it (exits.py)
_COPIED = "copied"  # the word of the rank that copies
_LOOK = 0.25


class Copier:
    def __init__(self, session: Session, mirror: Mirror) -> None:
        self._session = session
        self._mirror = mirror
        self._former: int | None = None  # the keeper when a checkpoint was copied last

    def copy(self, entry: Entry) -> None:
        """A checkpoint was committed: have it copied, if that is for this rank to do."""
        session = self._session
        if self._keeper != self._former:  # what is there is what the one before has made of it
            self._former = self._keeper
            self._mirror.forget()
        if self.copies():
            self._mirror.push(entry, urgent=session.latch.raised or session.pressing is not None)

    def settle(self) -> None:
        """Whoever has finished has all the time, until it is told to stop. What raised waits as long as one that was told: it may be
        started again."""
        session = self._session
        finished = session.outcome is Outcome.FINISHED
        patience = math.inf if finished else session.clock.now() + session.jit.grace

        def until() -> float:
            return session.serving.deadline() - _LAST if session.latch.raised else patience

        if not finished:
            self._await_the_one_that_copies(until)
        if self.copies():
            copied = self._mirror.settle(until)
            if session.ranks is not None:
                session.ranks.tell(_COPIED, {})
            if finished and not copied and session.latch.raised:
                session.outcome = Outcome.SAVED  # as finished nobody would start it again, and its end may be lost with this machine
            elif finished:
                atexit.register(self._mirror.copy_rest)

    def copies(self) -> bool:
        """Whether this rank does."""
        ranks = self._session.ranks
        return self._session.speaks() if ranks is None or self._keeper is None else ranks.rank == self._keeper

    @property
    def _keeper(self) -> int | None:
        return self._session.gathering.keeper if self._session.gathering is not None else None

    def _await_the_one_that_copies(self, until: Until) -> None:
        """Where that is another rank. If this one left before, torchrun would take it for a failure, and end the one that copies."""
        ranks, clock = self._session.ranks, self._session.clock
        while not self.copies() and clock.now() < until():  # it does when those before it are gone
            if ranks is None or self._keeper in ranks.gone() or ranks.hear(_COPIED, _LOOK) is not None:
                return
            clock.sleep(_LOOK / 10)  # a store that is lost answers at once
