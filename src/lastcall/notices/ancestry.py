"""The ancestors of this process, from /proc."""

from __future__ import annotations

import os
import time
from pathlib import Path


def began_with(variable: str, value: str) -> float:
    """The start time, in seconds since 1970, of the oldest ancestor that was started with the variable: in a
    container whose specification sets it, the container's first process. If there is none, that of this
    process."""
    pid = os.getpid()
    while (above := parent_of(pid)) > 0 and carries(above, f"{variable}={value}"):
        pid = above
    return _began(pid)


def carries(pid: int, assignment: str) -> bool:
    """Whether a process was started with this in its environment."""
    try:
        return assignment.encode() in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return False


def parent_of(pid: int) -> int:
    """0 if there is none that is visible from here."""
    try:
        return int(_stat(pid)[1])
    except (OSError, IndexError, ValueError):
        return 0


def _began(pid: int) -> float:
    try:
        since_boot = int(_stat(pid)[19]) / os.sysconf("SC_CLK_TCK")
    except (OSError, IndexError, ValueError):
        return time.time()
    return time.time() - (time.clock_gettime(time.CLOCK_BOOTTIME) - since_boot)


def _stat(pid: int) -> list[str]:
    # The name in parentheses may contain anything, spaces and parentheses included.
    return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
