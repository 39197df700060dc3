"""What a session hears and says through files: the notice that `lastcall run` posts, a person's pause, and how far this process is."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from pathlib import Path

from lastcall import clock as clocks
from lastcall.core import registry
from lastcall.types import Notice

log = logging.getLogger("lastcall")
PAUSE = "pause.json"  # in the run's private folder, while a person wants it paused


class Outside:
    def __init__(self, root: Path, private: Path, clock: clocks.Clock, grace: float) -> None:
        self._root = root
        self._pause = private / PAUSE
        self._clock = clock
        self._grace = grace
        self._pid = os.getpid()
        self._membership = registry.Membership.of_environment(root)
        self.launched = self._membership is not None  # `lastcall run` is above us

    def tell(self, **changes: object) -> None:
        """Keep the launcher, if there is one, informed."""
        if self._membership is not None and os.getpid() == self._pid:  # not a forked child that unwinds our block
            self._membership.update(**changes)

    def paused(self) -> bool:
        return os.path.exists(self._pause)  # a folder that cannot be looked into is not paused; Path.exists would raise

    def wait_while_paused(self, given_up: Callable[[], bool]) -> bool:
        """A person has paused this run: whoever starts it before they resume it waits here, and holds no lock. False if `given_up`."""
        if self.paused():
            log.warning("This run is paused. It goes on after: lastcall resume %s", self._root)
        while self.paused():
            if given_up():
                return False
            self._clock.sleep(0.2)
        return True

    def notice(self) -> Notice | None:
        """News since the last look; a pause is news for as long as it lasts."""
        notice = self._membership.notice() if self._membership is not None else None
        if notice is None and self.paused():
            now = self._clock.now()
            notice = Notice("pause", "pause", now, now + self._grace)
        return notice
