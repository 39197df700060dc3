"""Sentences and tables that fit the terminal.

Sentences break between words. A command to paste is one word here, and so are names and paths: each stays
whole, even where it is longer than a line. Tables leave out columns that can be spared, then shorten or wrap
those that may be; the name of a checkpoint is never touched.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping, Sequence

from lastcall.cli.output import terminal
from lastcall.cli.output.values import printable

_GAP = "  "
_CUT = "..."
# A command begins with its program, and ends where the sentence continues. The others are a line of YAML, a
# call, and an option with its value.
_COMMAND = re.compile(
    r"(?<![\w./-])(?:lastcall|docker|kubectl|pip|export|exec|mkdir|mount|scontrol|mv|chmod) "
    r"[^;,`]*?(?=; |, |\. |\.$| \(|\)|`|$)|\w+: \[[^]]*\]|\w\([^)]*\)|--[\w-]+ [\w./]+"
)
_SPACE = "\0"  # in a command, until the lines are made
_NONE: Mapping[str, int] = {}


def write(text: str = "") -> None:
    """A line as it is."""
    sys.stdout.write(f"{text}\n")


def say(text: str, hang: str = "", state: str = "") -> None:
    """A sentence, on as many lines as it needs. `state` is the part of it that has a colour."""
    first, *others = wrapped(text, terminal.width(), hang)
    write(first.replace(state, terminal.state(state), 1) if state else first)
    for line in others:
        write(line)


def pair(name: str, value: str, column: int, indent: str = "  ", *, states: Sequence[str] = ()) -> None:
    """A name and its value, which continues below itself. `states`: the names whose values have a colour."""
    start = f"{indent}{name:<{column}} "
    lines = wrapped(printable(value), terminal.width() - len(start))
    for number, line in enumerate(lines):
        if number == 0:
            write(start + (terminal.state(line) if name in states else line))
        else:
            write(" " * len(start) + line)


def wrapped(text: str, room: int, hang: str = "") -> list[str]:
    """The lines of a text. Those after the first begin with `hang`."""
    whole = _COMMAND.sub(lambda found: found[0].replace(" ", _SPACE), text)
    lines: list[str] = []
    for word in whole.split(" "):
        if lines and len(lines[-1]) + 1 + len(word) <= room and lines[-1] != hang:
            lines[-1] += f" {word}"
        else:
            lines.append(f"{hang if lines else ''}{word}")
    return [line.replace(_SPACE, " ").rstrip() for line in lines]


def table(
    head: Sequence[str],
    rows: Sequence[Sequence[str]],
    right: Sequence[str] = (),
    indent: str = "",
    *,
    states: Sequence[str] = (),
    spared: Sequence[str] = (),
    shortened: Mapping[str, int] = _NONE,
    folded: Mapping[str, int] = _NONE,
) -> None:
    """Columns as wide as what is in them, if that fits. Otherwise those in `spared` are left out, the first
    one first; then those in `shortened` are cut, and those in `folded` continue on the next line, at no fewer
    characters than given. `right`: aligned to the right; `states`: in colour."""
    columns = [
        _Column(name, [name, *(printable(row[number]) for row in rows)]) for number, name in enumerate(head)
    ]
    least = {**shortened, **folded}
    room = terminal.width() - len(indent)
    for name in spared:
        if _total(columns, least) > room:
            columns = [column for column in columns if column.name != name]
    for column in columns:
        if column.name in least:
            over = max(_total(columns, {}) - room, 0)
            column.width = max(column.width - over, min(column.width, least[column.name]))
    for number in range(len(rows) + 1):
        cells = [_lines(column, number, column.name in folded) for column in columns]
        for below in range(max(map(len, cells))):
            line = [
                _cell(column, lines[below] if below < len(lines) else "", column.name in right)
                for column, lines in zip(columns, cells, strict=True)
            ]
            if number:
                line = [
                    terminal.state(text) if column.name in states else text
                    for column, text in zip(columns, line, strict=True)
                ]
            write((indent + _GAP.join(line)).rstrip())


class _Column:
    """A column of a table, its name included."""

    def __init__(self, name: str, texts: list[str]) -> None:
        self.name = name
        self.texts = texts
        self.width = max(map(len, texts))


def _total(columns: Sequence[_Column], least: Mapping[str, int]) -> int:
    """The width of the table with each of these columns at its narrowest."""
    widths = [min(column.width, least.get(column.name, column.width)) for column in columns]
    return sum(widths) + len(_GAP) * (len(columns) - 1)


def _lines(column: _Column, number: int, folded: bool) -> list[str]:
    text = column.texts[number]
    if len(text) <= column.width:
        return [text]
    if folded:
        return wrapped(text, column.width)
    return [text[: column.width - len(_CUT)].rstrip() + _CUT]


def _cell(column: _Column, text: str, right: bool) -> str:
    return text.rjust(column.width) if right else text.ljust(column.width)
