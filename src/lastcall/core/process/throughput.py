"""Log lines about the progress of long transfers."""

from __future__ import annotations

import logging
import threading

from lastcall import clock as clocks

log = logging.getLogger("lastcall")
_TELL = 10.0  # seconds between two lines


def amount(nbytes: float) -> str:
    if nbytes < 1000:
        return f"{nbytes:.0f} bytes"
    units = ["TB", "GB", "MB", "kB"]
    while (nbytes := nbytes / 1000) >= 1000 and len(units) > 1:
        units.pop()
    return f"{nbytes:.0f} {units[-1]}" if nbytes >= 100 else f"{nbytes:.1f} {units[-1]}"


class ThroughputLog:
    """Any thread adds the bytes that it has moved."""

    def __init__(self, what: str, clock: clocks.Clock, size: int = 0) -> None:
        self._what = what
        self._of = f" of {amount(size)}" if size else ""
        self._clock = clock
        self._next = clock.now() + _TELL
        self._done = 0
        self._lock = threading.Lock()

    def more(self, count: int) -> None:
        with self._lock:
            self._done += count
            self.at(self._done)

    def at(self, done: int) -> None:
        if self._clock.now() >= self._next:
            self._next = self._clock.now() + _TELL
            log.info("%s: %s%s so far", self._what, amount(done), self._of)
