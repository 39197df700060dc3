"""Where in the script an iterator is opened. The script that is resumed opens it at the same place, so the
place tells the training loop's iterator from a peek at the loader, or from a pass that only measures
something.

A place is the function and the text of the line: line numbers change with every edit above them.
"""

from __future__ import annotations

import linecache
import os
import sys
import sysconfig
from types import FrameType

import lastcall

BATCHES = "run.batches()"
_OURS = os.path.dirname(os.path.abspath(lastcall.__file__)) + os.sep
_LIBRARIES = tuple(
    {os.path.join(sysconfig.get_paths()[name], "") for name in ("stdlib", "platstdlib", "purelib", "platlib")}
)


def here() -> str:
    """The innermost line of the script itself that led to this call; "" where there is none."""
    frame = script_frame()
    if frame is None:
        return ""
    text = linecache.getline(frame.f_code.co_filename, frame.f_lineno).strip()
    return f"{frame.f_code.co_qualname}: {text}"


def script_frame() -> FrameType | None:
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and not _of_script(frame.f_code.co_filename):
        frame = frame.f_back
    return frame


def _of_script(file: str) -> bool:
    return not file.startswith((_OURS, "<frozen")) and not file.startswith(_LIBRARIES)
