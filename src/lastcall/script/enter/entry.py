"""Runs the script's own save as if its condition had been true, with the script's variables, at its place in
the loop.

Local trace functions on the script's frames wait for the lines of the conditions and set `f_lineno` to where
they should lead. Nothing is traced before that is requested, nor any frame that has nothing to do with the
save. If a condition has no line of its own (`if due: save()`), its statement is run here, with the condition
as needed, and the frame continues behind it.
"""

from __future__ import annotations

import dis
import sys
from collections.abc import Callable, Sequence
from types import CodeType, FrameType
from typing import Any

from lastcall.script.enter import jumps
from lastcall.script.enter.jumps import Force
from lastcall.script.find.points import Point

_RETURNS = {
    code
    for name, code in dis.opmap.items()
    if name.startswith(("RETURN_", "YIELD_", "INSTRUMENTED_RETURN", "INSTRUMENTED_YIELD"))
}


def returns(frame: FrameType) -> bool:
    """At the event "return": whether it is one, and no exception that propagates."""
    return frame.f_code.co_code[frame.f_lasti] in _RETURNS


class SaveEntry:
    def __init__(self, points: Sequence[Point], after: Callable[[], None], *, wait: bool) -> None:
        self.inside = False
        self._after = after
        self._wait = wait
        self._anchor = points[0].scope.code
        self._regions = [point.lines for point in points]
        # nothing but to wait for it
        self._open = not any(need.assumed is not None for point in points for need in point.needs)
        self._forces: dict[CodeType, list[Force]] = {self._anchor: []}
        for force in jumps.of(points):
            self._forces.setdefault(force.code, []).append(force)
        self._frame: FrameType | None = None
        self._taken = False
        self._before: Any = None  # another tool's trace function

    def begin(self, frame: FrameType) -> None:
        """From below the frame that the points were found in."""
        while frame.f_code != self._anchor:
            assert frame.f_back is not None
            frame = frame.f_back
        self._frame = frame
        frame.f_trace = self._trace
        frame.f_trace_lines = True
        self._before = sys.gettrace()
        sys.settrace(self._called)

    def cancel(self) -> None:
        if self._frame is not None:
            self._frame.f_trace = None
            self._frame = None
            sys.settrace(self._before)

    def _called(self, frame: FrameType, event: str, arg: Any) -> Any:
        if frame.f_code in self._forces:
            return self._trace
        return self._before(frame, event, arg) if self._before is not None else None

    def _trace(self, frame: FrameType, event: str, arg: Any) -> Any:
        if self._frame is None:
            return None
        if event == "line":
            self._line(frame)
        elif event == "return" and frame is self._frame and self.inside:
            if returns(frame):
                self._left()
            else:  # the script's own exception, propagating
                self.cancel()
        return self._trace

    def _line(self, frame: FrameType) -> None:
        if frame.f_code == self._anchor:
            self._frame = frame  # a function that is called once a pass has a new frame each time
            if any(frame.f_lineno in region for region in self._regions):
                self.inside = True
                self._taken = self._taken or self._open
            elif self.inside:
                self._left()
                return
        met, line = jumps.follow(frame, self._forces.get(frame.f_code, ()))
        self._taken = self._taken or met
        if line is None:
            self._left()

    def _left(self) -> None:
        self.inside = False
        if self._taken or not self._wait:
            self.cancel()
            self._after()
