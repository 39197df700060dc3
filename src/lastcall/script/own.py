"""The script's own save, for adapters that want it to save now."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import CodeType, FrameType

from lastcall.script.enter import reachability, trial
from lastcall.script.enter.entry import SaveEntry
from lastcall.script.find import search
from lastcall.script.find.observed import Learned
from lastcall.script.find.points import Saves
from lastcall.script.replay.replay import Replay

log = logging.getLogger("lastcall")


def find(frame: FrameType | None, saves: Saves) -> Script:
    """`frame`: the caller of optimizer.step(). Static: works before the first save was ever reached."""
    return Script(frame, saves)


@dataclass(frozen=True)
class Spot:
    """A description of a save point. The point itself refers to the script's variables: keeping it would keep
    a batch on the GPU."""

    place: str
    near: bool
    kept_from: str = ""  # a condition that does not hold at any step


class Script:
    """`because`: why there are no points. `looped`: whether the step was one of a loop."""

    def __init__(self, frame: FrameType | None, saves: Saves) -> None:
        self.points: list[Spot] = []
        self.because = ""
        self.looped = False
        self._saves = saves
        self._entry: SaveEntry | None = None
        self._replay = Replay()
        self._learned = Learned()
        self._stops: Mapping[CodeType, search.Stop] = {}
        self.look(frame)

    @property
    def near(self) -> bool:
        """Whether a save point is passed at every step: it lies in the same innermost loop as the optimizer's
        step."""
        return any(point.near for point in self.points)

    @property
    def inside(self) -> bool:
        """Whether the script is between the first statement that has to do with the save and the last."""
        return self._replay.inside or (self._entry is not None and self._entry.inside)

    @property
    def place(self) -> str:
        return " or ".join(dict.fromkeys(point.place for point in self.points))

    @property
    def kept_from(self) -> str:
        """What makes all of the script's saves unreachable, whatever the step."""
        kept = [point.kept_from for point in self.points]
        return " and ".join(f"`{each}`" for each in dict.fromkeys(kept)) if all(kept) else ""

    def enter(self, frame: FrameType, after: Callable[[], None], *, wait: bool) -> bool:
        """In the training thread, from below the script's frame: the next save point that is reached runs as
        if its condition were true, and `after` is called in the script's frame when it is done. What `after`
        raises is raised there. `wait`: where a point is not for this process, another one may be; otherwise
        that is all there was to do. False if the script is not at work in these frames."""
        self.cancel()
        found = self.look(frame)
        if not self.points:
            return False
        self._entry = SaveEntry(found.points, after, wait=wait)
        self._entry.begin(frame)
        return True

    def cancel(self) -> None:
        """In the training thread."""
        if self._entry is not None:
            self._entry.cancel()
            self._entry = None

    def remember(self, frame: FrameType) -> None:
        """At every report, from its caller: records the current counts, and the call path if the source does
        not show it."""
        try:
            self._replay.remember(frame)
            if not self.points and self._learned.learn(frame, self._saves):
                self._say(search.look(frame, self._saves, self._learned, self._stops), frame)
        except Exception:
            log.debug("cannot read the variables of the script", exc_info=True)

    def replay(self, frame: FrameType) -> str:
        """In the training thread, at a completed step: runs the statements that save, here and now. Returns
        why that failed."""
        self.cancel()
        found = self.look(frame)
        return self._replay.run(frame, found, self._saves) if found.points else self.because

    def look(self, frame: FrameType | None) -> search.FoundSaves:
        """Search again, from a step: there may be new values, and the script may be in another loop. enter()
        and replay() do so themselves. Takes some 30 ms."""
        try:
            found = search.look(frame, self._saves, self._learned)
        except Exception as error:
            log.debug("looking for the script's own save failed", exc_info=True)
            found = search.FoundSaves([], [], f"looking for it failed: {error!r}")
        self._stops = search.stops(found.chain)
        self.looped = found.looped
        self._say(found, frame)
        return found

    def _say(self, found: search.FoundSaves, frame: FrameType | None) -> None:
        refused = trial.refusal() if found.points else ""
        self.points = [
            Spot(point.place, point.near, reachability.kept_from(point, frame))
            for point in found.points
            if not refused
        ]
        self.because = refused or found.because
