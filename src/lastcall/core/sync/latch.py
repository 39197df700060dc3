"""One sticky notice: where every source of notices meets the training loop."""

from __future__ import annotations

import dataclasses
import threading
from typing import NoReturn

from lastcall.types import Notice


class Latch:
    """Holds the first notice for good. A later one can only shorten its deadline: no platform takes back what
    it said.

    `raised` is a plain attribute because the training loop reads it at every step. Threads may offer and wait
    at will; a signal handler may not (it could interrupt its own thread while that holds the lock).
    """

    def __init__(self) -> None:
        self.raised = False
        self._notice: Notice | None = None
        self._lock = threading.Lock()
        self._event = threading.Event()

    @property
    def notice(self) -> Notice | None:
        return self._notice

    def offer(self, notice: Notice) -> bool:
        """True if it changed anything: it was the first, or it brought the deadline forward."""
        with self._lock:
            held = self._notice
            if held is None:
                self._notice = notice
                self.raised = True  # after the notice: a reader that sees the flag finds the notice
                self._event.set()
                return True
            # a run that cannot save dies of it, whichever notice came first
            if held.signum is None and notice.signum is not None:
                held = self._notice = dataclasses.replace(held, signum=notice.signum)
            if notice.deadline is None or (held.deadline is not None and held.deadline <= notice.deadline):
                return False
            self._notice = dataclasses.replace(held, deadline=notice.deadline)
            return True

    def wait(self, timeout: float | None = None) -> bool:
        """Wait for a notice; False if none came in time."""
        return self._event.wait(timeout)

    def __bool__(self) -> NoReturn:
        raise TypeError(
            "a Latch has no truth value, it could mean 'exists' or 'has a notice': read .raised or .notice"
        )
