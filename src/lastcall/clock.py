"""Time, behind one small class so that tests can control it (lastcall.testing.FakeClock)."""

from __future__ import annotations

import time


class Clock:
    """The real clock. `now` is monotonic and what deadlines are measured in; `wall` is for people and file
    names."""

    def now(self) -> float:
        return time.monotonic()

    def wall(self) -> float:
        return time.time()

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)
