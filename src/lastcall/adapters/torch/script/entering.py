"""Enters the user's own branch as though its condition had been true, with the user's variables, at its place in the loop.

A local trace function on the user's frame waits for the line of the condition, sets `f_lineno` to the first line of the body, and
calls `after` when the frame has left the body. Nothing is traced before that is asked for, and no other frame is.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any

from lastcall.adapters.torch.script.branches import Branch

log = logging.getLogger("lastcall")


class Entering:
    def __init__(self, branches: Sequence[Branch], after: Callable[[], None], *, wait: bool) -> None:
        """Whichever branch of the same frame is reached first. `after` may raise: that is raised in the user's frame. `wait`: where a
        branch is not for this process, another one may be; otherwise that is all there was to do."""
        self._branches = branches
        self._after = after
        self._wait = wait
        self._inside: Branch | None = None

    def begin(self, frame: FrameType | None) -> bool:
        """In the training thread, from below the frame. False if the frame is not there."""
        while frame is not None and frame.f_code is not self._branches[0].code:
            frame = frame.f_back
        if frame is None:
            return False
        frame.f_trace = self._trace
        frame.f_trace_lines = True
        if sys.gettrace() is None:
            sys.settrace(_no_other)
        return True

    def _trace(self, frame: FrameType, event: str, arg: Any) -> Any:
        if event == "line" and self._inside is None:
            branch = next((branch for branch in self._branches if frame.f_lineno in branch.test), None)
            if branch is not None and branch.allowed(frame):
                self._inside = branch
                frame.f_lineno = branch.body.start  # type: ignore[misc]  # a trace function may
            elif branch is not None and not self._wait:
                self._leave(frame)
        elif self._inside is not None and (event == "return" or (event == "line" and frame.f_lineno not in self._inside.body)):
            self._leave(frame)
        return self._trace

    def _leave(self, frame: FrameType) -> None:
        frame.f_trace = None
        if sys.gettrace() is _no_other:
            sys.settrace(None)
        self._after()


def _no_other(frame: FrameType, event: str, arg: Any) -> None:
    """Tracing is on, and no new frame wants it."""
