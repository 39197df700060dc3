"""The script's own save, for those who want it to save now."""

from __future__ import annotations

import logging
from collections.abc import Callable
from types import FrameType

from lastcall.adapters.torch.script import finding
from lastcall.adapters.torch.script.entering import Entering
from lastcall.adapters.torch.script.learning import Learned
from lastcall.adapters.torch.script.points import Point, Saves
from lastcall.adapters.torch.script.replaying import Replay

log = logging.getLogger("lastcall")


def find(frame: FrameType | None, saves: Saves) -> Script:
    """`frame`: the caller of optimizer.step(). Static: works before the first save was ever reached."""
    return Script(frame, saves)


class Script:
    """`because`: why there are no points."""

    def __init__(self, frame: FrameType | None, saves: Saves) -> None:
        self.points: list[Point] = []
        self.because = ""
        self._saves = saves
        self._entering: Entering | None = None
        self._replay = Replay()
        self._learned = Learned()
        self.look(frame)

    @property
    def near(self) -> bool:
        """Whether a save point is passed at every step: it lies in the same innermost loop as the optimizer's step."""
        return any(point.near for point in self.points)

    @property
    def inside(self) -> bool:
        """Whether the script is between the first statement that has to do with the save and the last."""
        return self._replay.inside or (self._entering is not None and self._entering.inside)

    @property
    def place(self) -> str:
        return " or ".join(dict.fromkeys(point.place for point in self.points))

    def enter(self, frame: FrameType, after: Callable[[], None], *, wait: bool) -> bool:
        """In the training thread, from below the frame of the script: the next save point that is reached is taken as though its
        condition were true, and `after` is called in the script's frame when that is over. `after` may raise: that is raised there.
        `wait`: where a point is not for this process, another one may be; otherwise that is all there was to do. False if the script
        is not at work in these frames."""
        self.cancel()
        self.look(frame)
        if not self.points:
            return False
        entering = Entering(self.points, after, wait=wait)
        if not entering.begin(frame):
            return False
        self._entering = entering
        return True

    def cancel(self) -> None:
        """In the training thread."""
        if self._entering is not None:
            self._entering.cancel()
            self._entering = None

    def remember(self, frame: FrameType) -> None:
        """At every report, from its caller: the counts that hold there, and how the script came there if its source does not tell."""
        try:
            self._replay.remember(frame)
            if not self.points:
                self._learned.learn(frame, self._saves)
        except Exception:
            log.debug("the variables of the script cannot be read", exc_info=True)

    def replay(self, frame: FrameType) -> str:
        """In the training thread, at a completed step: runs the statements that save, here and now. Returns why that failed."""
        self.cancel()
        found = self.look(frame)
        return self._replay.run(frame, found, self._saves) if found is not None and found.points else self.because

    def look(self, frame: FrameType | None) -> finding.Found | None:
        """Again, from a step: there may be values that were not there before, the script may be in another loop, or something may
        have been learned. enter() and replay() do so themselves. Takes some 30 ms."""
        try:
            found = finding.look(frame, self._saves, self._learned)
        except Exception as error:
            log.debug("looking for the script's own save failed", exc_info=True)
            self.points, self.because = [], f"looking for it failed: {error!r}"
            return None
        self.points, self.because = found.points, found.because
        return found
