"""Bytes to write, bandwidth measured, time left: what may be attempted, and why."""

from __future__ import annotations

from collections.abc import Callable

from lastcall import clock as clocks
from lastcall.types import Plan

# bytes a second, until a save or the preparation of spare space has measured it: a slow network disk
ASSUMED = 200e6
FIXED = 0.25  # seconds of every save that do not depend on its size: planning, fsync, rename
SAFETY = 1.3  # a disk that others use, too, is not always as fast as it was


class Budget:
    def __init__(self, clock: clocks.Clock) -> None:
        self._clock = clock
        self._bandwidth: float | None = None
        self.afterwards: Callable[[int], float] = lambda nbytes: 0.0  # seconds that follow a save: its upload

    @property
    def bandwidth(self) -> float:
        return self._bandwidth or ASSUMED

    @property
    def measured(self) -> bool:
        return self._bandwidth is not None

    def observe(self, nbytes: int, seconds: float) -> None:
        """Learn from a save or a probe. Small writes say more about latency than about bandwidth."""
        if nbytes < 16 * 1024 * 1024 or seconds <= 0:
            return
        seen = nbytes / seconds
        self._bandwidth = seen if self._bandwidth is None else 0.5 * self._bandwidth + 0.5 * seen

    def seconds(self, nbytes: int) -> float:
        """What a save of so many bytes is expected to take, cautiously."""
        return FIXED + SAFETY * nbytes / self.bandwidth

    def until_safe(self, nbytes: int, deadline: float) -> float:
        """... with what follows it before the process may be killed, if there is time for both: hurrying
        gains nothing if the upload cannot be completed anyway."""
        both = self.seconds(nbytes) + self.afterwards(nbytes)
        return both if both <= deadline - self._clock.now() else self.seconds(nbytes)

    def kill_wait(self, wanted: float, nbytes: int, deadline: float | None) -> float:
        """How long to wait before the save, cut short where the grace is too short for both."""
        return (
            wanted
            if deadline is None
            else wait_within(wanted, deadline - self._clock.now(), self.until_safe(nbytes, deadline))
        )

    def plan(self, nbytes: int, deadline: float | None) -> Plan:
        needed = self.seconds(nbytes)
        if deadline is None:
            return Plan("full", "no deadline is known", needed)
        left = deadline - self._clock.now()
        speed = f"{nbytes / 1e6:.0f} MB at {self.bandwidth / 1e6:.0f} MB/s"
        if needed <= left:
            return Plan("full", f"needs about {needed:.1f} s ({speed}), {left:.1f} s left", needed)
        return Plan(
            "partial",
            f"needs about {needed:.1f} s ({speed}), only {left:.1f} s left: the most important files first",
            needed,
        )


def wait_within(wanted: float, left: float, needed: float) -> float:
    """The kill wait of every adapter: as long as is wanted, but the save that follows takes `needed` of the
    seconds that are left, and one more is kept back."""
    return max(0.0, min(wanted, left - needed - 1.0))
