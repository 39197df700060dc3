"""What cannot be entered in the middle is made again from its beginning and thrown away: said beforehand,
with how long it will take, and shown while it runs."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Protocol

log = logging.getLogger("lastcall")
_EVERY = 5.0  # seconds between two lines of progress


def replay(
    what: str,
    count: int,
    seconds: float,
    draw: Callable[[], object],
    now: Callable[[], float] = time.monotonic,
) -> int:
    """Draw `count` times; `seconds` is what that took the last time, 0 if unknown. Returns how many there
    were."""
    log.info(
        "%s: replaying and discarding its first %d batches%s",
        what,
        count,
        f", which took {_told(seconds)} last time" if seconds else "",
    )
    began = shown = now()
    for done in range(count):
        try:
            draw()
        except StopIteration:
            return done
        at = now()
        if at - shown >= _EVERY:
            shown = at
            left = (at - began) / (done + 1) * (count - done - 1)
            log.info("%s: %d of %d batches replayed, about %s left", what, done + 1, count, _told(left))
    return count


class Costly(Protocol):
    """A pass over a stream."""

    over: str
    delivered: int
    seconds: float
    costly: float


def forewarn(passage: Costly) -> None:
    """Before anything is lost: what a resume would cost now. Said again when it has doubled."""
    passage.costly = 2 * passage.seconds
    log.info(
        "A resume at this place would read the first %d batches of `%s` again, which has taken %s so far. A "
        "StatefulDataLoader "
        "(torchdata) over a dataset with state_dict() begins in the middle.",
        passage.delivered,
        passage.over,
        _told(passage.seconds),
    )


def _told(seconds: float) -> str:
    if seconds < 1:
        return "less than a second"
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"
