"""Where the ranks of a run meet before they begin. A rank that leaves, or fails, before all have voted says
so: no rank waits for it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

from lastcall import clock as clocks
from lastcall import errors
from lastcall.core.ranks.world import World
from lastcall.core.store import Store
from lastcall.core.sync.stopped import Stopped

TOGETHER = 1800.0  # seconds that the slowest rank may take to join: torch gives its process groups as long
_LEFT = "left"  # a rank was asked to stop
_FAILED = "failed"  # a rank cannot begin, and why


class Rendezvous:
    def __init__(self, world: World, clock: clocks.Clock, stop_requested: Callable[[], bool]) -> None:
        """`told`: whether a notice has come to this rank."""
        self.store: Store = world.meet()
        self.stop_requested = stop_requested
        self._rank = world.rank
        self._clock = clock

    def leave(self) -> None:
        """This rank was asked to stop: the others must not wait for it. There is no vote yet that could be
        vetoed."""
        with contextlib.suppress(errors.StoreLost):
            self.store.set(_LEFT, b"1")

    def fail(self, error: BaseException) -> None:
        """This rank cannot begin, so no rank can."""
        with contextlib.suppress(errors.StoreLost):
            self.store.set(_FAILED, f"rank {self._rank}: {type(error).__name__}: {error}".encode())

    def left(self) -> bool:
        """Whether a rank was asked to stop, and has left, before there was anything to vote on."""
        return self._said(_LEFT) is not None

    def failed(self) -> str:
        """Why a rank could not begin; empty while nothing is known of that."""
        return (self._said(_FAILED) or b"").decode(errors="replace")

    def _said(self, key: str) -> bytes | None:
        try:
            return self.store.get_many([key])[0]
        except errors.StoreLost:
            return None

    def check(self) -> None:
        """Stopped or RanksError where waiting for the others is useless."""
        if self.left():
            raise Stopped
        if why := self.failed():
            raise errors.RanksError(f"not all ranks could begin: {why}")

    def wait(self, key: str, what: str) -> bytes:
        """Wait for a message of the others, unless a notice comes first: before the vote no rank depends on
        this one."""
        until = self._clock.now() + TOGETHER
        while (found := self.store.get(key, 1.0)) is None:
            if self.stop_requested():
                self.leave()
                raise Stopped
            self.check()
            if self._clock.now() >= until:
                raise errors.RanksError(f"rank {self._rank} waited {TOGETHER:.0f} s for {what}")
        return found
