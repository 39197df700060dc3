"""Numbers, times and text of files, as people read them."""

from __future__ import annotations

import math
import time

_UNITS = ("kB", "MB", "GB", "TB", "PB")


def printable(text: str) -> str:
    """Text from a possibly hostile file: no control sequence in it reaches the terminal."""
    return "".join(
        char if char.isprintable() else char.encode("unicode_escape", "backslashreplace").decode()
        for char in text
    )


def size(nbytes: float) -> str:
    if nbytes < 1000:
        return f"{nbytes:.0f} B"
    power = 1
    while power < len(_UNITS) and nbytes / 1000**power >= 999.95:
        power += 1
    return f"{nbytes / 1000**power:.1f} {_UNITS[power - 1]}"


def duration(seconds: float, *, precise: bool = True) -> str:
    """A length of time; short ones in hundredths unless whole seconds will do."""
    if not math.isfinite(seconds):
        return "?"
    seconds = max(seconds, 0.0)
    if seconds < 9.995 and precise:
        return f"{seconds:.2f} s"
    if seconds < 119.5:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    if minutes < 120:
        return f"{minutes} min"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min" if hours < 48 else f"{hours // 24} d {hours % 24} h"


def age(at: float, now: float) -> str:
    if at > now + 60:
        return "in the future"  # the clock of another machine
    return f"{duration(now - at, precise=False)} ago"


def moment(at: float) -> str:
    """Local time, as precise as a person needs it."""
    try:
        return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(at))
    except (OverflowError, ValueError, OSError):
        return "?"


def number(value: object) -> str:
    """A metric."""
    return (
        f"{value:.6g}"
        if isinstance(value, int | float) and not isinstance(value, bool)
        else printable(str(value))
    )


def plural(count: int, what: str) -> str:
    return f"{count} {what}" if count == 1 else f"{count} {what}s"
