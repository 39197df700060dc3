"""Whether a save of the script's can be entered on this Python: tried out once, on a frame of our own.

A trace function leads the frame to another line, gives a variable another value, and sees in the instruction
of a return that it is one. All three are CPython's, and each of its versions has changed one of them.

Discarded: a list of versions. What a version is known for says nothing of the next one, of PyPy, or of a
build of a distribution's own.
"""

from __future__ import annotations

import functools
import sys
from types import FrameType
from typing import Any

from lastcall.script.enter import jumps
from lastcall.script.enter.entry import returns


@functools.cache
def refusal() -> str:
    """Why none can be entered; empty where one can."""
    try:
        works = _works()
    except Exception as error:
        return f"{_interpreter()} does not let lastcall enter a save ({error!r})"
    return "" if works else f"{_interpreter()} does not let lastcall enter a save"


def _works() -> bool:
    first = _subject.__code__.co_firstlineno
    seen: list[bool] = []

    def trace(frame: FrameType, event: str, arg: Any) -> Any:
        if frame.f_code is not _subject.__code__:
            return None
        if event == "line" and frame.f_lineno == first + 2:
            jumps.jump(frame, first + 3)
            frame.f_locals.update({"value": 2})
        elif event == "return":
            seen.append(returns(frame))
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        found = _subject(False)
    finally:
        sys.settrace(before)
    return found == 2 and seen == [True]


def _subject(due: bool) -> int:
    value, saved = 1, 0
    if due:
        saved = value
    return saved


def _interpreter() -> str:
    return f"{sys.implementation.name} {sys.version.split()[0]}"
