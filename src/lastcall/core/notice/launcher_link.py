"""What a session reads and writes in files: the notice that `lastcall run` posts, a pause that a user asks
for, and the progress of this process. It also finds out when this process has become an orphan."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from pathlib import Path

from lastcall import clock as clocks
from lastcall.core.context import NOWHERE
from lastcall.core.process import orphans, registry
from lastcall.types import Notice

log = logging.getLogger("lastcall")
PAUSE = "pause.json"  # in the run's private folder, while a user wants it paused


class LauncherLink:
    """`root`: of the run; None where no launcher started it."""

    def __init__(self, root: Path | None, private: Path, clock: clocks.Clock, grace: float) -> None:
        self._root = root
        self._pause = private / PAUSE
        self._clock = clock
        self._grace = grace
        self._pid = os.getpid()
        self._membership = None if root is None else registry.Membership.of_environment(root)
        self.launched = self._membership is not None  # `lastcall run` is above us
        ancestors = orphans.RequiredAncestors
        self._elders = ancestors() if root is None else ancestors.of_start()
        self._introduced = False
        self._orphaned = False

    @classmethod
    def absent(cls, clock: clocks.Clock, grace: float) -> LauncherLink:
        """A link that informs no launcher and finds no file."""
        return cls(None, NOWHERE, clock, grace)

    def tell(self, **changes: object) -> None:
        """Keep the launcher, if there is one, informed."""
        # not a forked child that unwinds our block
        if self._membership is not None and os.getpid() == self._pid:
            self._membership.update(**changes)

    def paused(self) -> bool:
        # an unreadable folder counts as not paused; Path.exists would raise
        return os.path.exists(self._pause)

    def wait_while_paused(self, given_up: Callable[[], bool]) -> bool:
        """A user has paused this run: a process that starts before it is resumed waits here, and holds no
        lock. False if `given_up`."""
        if self.paused():
            log.warning("This run is paused. To continue: lastcall resume %s", self._root)
        while self.paused():
            if given_up():
                return False
            self._clock.sleep(0.2)
        return True

    def notice(self) -> Notice | None:
        """A notice that is new since the last look; a pause is new for as long as it lasts."""
        notice = self._membership.notice() if self._membership is not None else None
        if notice is None and self.paused():
            now = self._clock.now()
            notice = Notice("pause", "pause", now, now + self._grace)
        return notice or self._orphan()

    def _orphan(self) -> Notice | None:
        """Reported once. A launcher that exits in order waits for every process that has joined, and removes
        its folder: so it is looked up only now, when this one has joined."""
        if not self._introduced and self._membership is not None:
            self._elders.add_launcher(self._membership.launcher())
        self._introduced = True
        gone = "" if self._orphaned else self._elders.gone()
        if not gone:
            return None
        self._orphaned = True
        log.warning("%s: this process is an orphan and will save and stop", gone[:1].upper() + gone[1:])
        now = self._clock.now()
        return Notice("orphan", gone, now, now + self._grace)
