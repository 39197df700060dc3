"""What the terminal can show: how wide it is, and whether it wants colours.

Colours are few and say how something stands: green for what is fine, yellow for what to look at, red for what
is lost. `NO_COLOR` switches them off wherever it is set; `FORCE_COLOR` and `CLICOLOR_FORCE` switch them on
without a terminal.
"""

from __future__ import annotations

import enum
import os
import re
import shutil
import sys
from typing import TextIO

UNKNOWN = 80  # columns where there is no terminal
NARROWEST = 40  # a table is not squeezed further than this
_RESET = "\x1b[0m"
_END = re.compile(r"[,:;]| \(")  # of the words that say how something stands


class Colour(enum.Enum):
    GOOD = "\x1b[32m"
    WARN = "\x1b[33m"
    BAD = "\x1b[31m"
    PLAIN = ""


STATES: dict[str, Colour] = {
    # a checkpoint
    "yes": Colour.GOOD,
    "valid": Colour.GOOD,
    "ok": Colour.GOOD,
    "no": Colour.WARN,
    "partial": Colour.WARN,
    "unchecked": Colour.WARN,
    "incomplete": Colour.WARN,
    "gone": Colour.WARN,
    "damaged": Colour.BAD,
    "set aside": Colour.BAD,
    "remove": Colour.WARN,
    # a run
    "running": Colour.GOOD,
    "finished": Colour.GOOD,
    "saved": Colour.GOOD,
    "pausing": Colour.WARN,
    "paused": Colour.WARN,
    "not saved": Colour.BAD,
    "failed": Colour.BAD,
    "killed": Colour.BAD,
    # the doctor and the drill
    "warning": Colour.WARN,
    "risk": Colour.BAD,
    "nothing lost": Colour.GOOD,
    "Identical": Colour.GOOD,
    "NOT PROVED": Colour.WARN,
    "DIFFERENT": Colour.BAD,
    "Nothing was proved": Colour.BAD,
    "WITHOUT saving": Colour.BAD,
    "not exact": Colour.WARN,
    "LOST": Colour.BAD,
    "did not resume": Colour.BAD,
}


def width() -> int:
    """Columns of the terminal; `COLUMNS` takes precedence."""
    return max(shutil.get_terminal_size((UNKNOWN, 24)).columns, NARROWEST)


def interactive(stream: TextIO | None) -> bool:
    """Whether this is a terminal that understands more than plain text."""
    return stream is not None and stream.isatty() and os.environ.get("TERM") != "dumb"


def coloured(stream: TextIO | None = None) -> bool:
    if os.environ.get("NO_COLOR"):
        return False
    if any(os.environ.get(name, "0") not in ("", "0") for name in ("FORCE_COLOR", "CLICOLOR_FORCE")):
        return True
    return interactive(sys.stdout if stream is None else stream)


def paint(text: str, colour: Colour) -> str:
    if colour is Colour.PLAIN or not text or not coloured():
        return text
    return f"{colour.value}{text}{_RESET}"


def state(text: str) -> str:
    """The text with its first words, which say how something stands, in their colour."""
    word = _END.split(text.strip(), maxsplit=1)[0]
    return text.replace(word, paint(word, STATES.get(word, Colour.PLAIN)), 1)
