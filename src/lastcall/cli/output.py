"""Output of the commands: plain tables for people, JSON for programs. There are no colours, so no option to
disable them."""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Mapping, Sequence

SCHEMA = 1  # raised when a field changes its meaning or is removed; fields may be added at any time
_UNITS = ("kB", "MB", "GB", "TB", "PB")


def add_json(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print JSON (the schemas are in docs/)")


def write(text: str = "") -> None:
    sys.stdout.write(f"{text}\n")


def document(body: Mapping[str, object]) -> None:
    """The one JSON document of a command."""
    write(json.dumps({"schema": SCHEMA, **_finite(body)}, indent=2, allow_nan=False))


def line(body: Mapping[str, object]) -> None:
    """One JSON document on a line of its own, flushed at once: its reader may be waiting for it."""
    write(json.dumps({"schema": SCHEMA, **_finite(body)}, allow_nan=False))
    sys.stdout.flush()


def _finite(value: object) -> dict[str, object]:
    made = _plain(value)
    assert isinstance(made, dict)
    return made


def _plain(value: object) -> object:
    """Replaces NaN and infinity, which most JSON readers refuse, by text."""
    if isinstance(value, float) and not math.isfinite(value):
        return repr(value)
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value


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


def table(
    head: Sequence[str], rows: Sequence[Sequence[str]], right: Sequence[str] = (), indent: str = ""
) -> None:
    """Columns as wide as what is in them; those named in `right` are aligned to the right."""
    cells = [list(head), *([printable(cell) for cell in row] for row in rows)]
    widths = [max(len(row[column]) for row in cells) for column in range(len(head))]
    for row in cells:
        padded = [
            cell.rjust(width) if name in right else cell.ljust(width)
            for name, cell, width in zip(head, row, widths, strict=True)
        ]
        write((indent + "  ".join(padded)).rstrip())
