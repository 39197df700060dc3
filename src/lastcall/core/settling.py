"""The last wait of an incarnation: nobody leaves before the checkpoints are in the mirror, as long as there is time."""

from __future__ import annotations

import atexit
from typing import TYPE_CHECKING

from lastcall.core.copying import Until
from lastcall.core.mirror import Mirror
from lastcall.types import Outcome

if TYPE_CHECKING:
    from lastcall.core.session import Session

_LAST = 0.5  # seconds kept back before the deadline for the way out
_COPIED = "copied"  # the word of the rank that copies
_LOOK = 0.25


def settle(session: Session, mirror: Mirror) -> None:
    """Whoever has finished has all the time. What raised waits as long as one that was told to stop: it may be started again."""
    finished, patience = session.outcome is Outcome.FINISHED, session.clock.now() + session.jit.grace

    def until() -> float:
        return session.serving.deadline() - _LAST if session.latch.raised else patience

    if not finished:
        _await_the_one_that_copies(session, until)
    if session.copies():
        mirror.settle(None if finished else until)
        if session.ranks is not None:
            session.ranks.tell(_COPIED, {})
        if finished:
            atexit.register(mirror.copy_rest)


def _await_the_one_that_copies(session: Session, until: Until) -> None:
    """Where that is another rank. If this one left before, torchrun would take it for a failure, and end the one that copies."""
    while not session.copies() and session.clock.now() < until():  # it does when those before it are gone
        keeper = session.gathering.keeper if session.gathering is not None else None
        if session.ranks is None or keeper in session.ranks.gone() or session.ranks.hear(_COPIED, _LOOK) is not None:
            return
        session.clock.sleep(_LOOK / 10)  # a store that is lost answers at once
