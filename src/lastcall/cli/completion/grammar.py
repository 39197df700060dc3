"""What the parser accepts, as values that a script can be written from."""

from __future__ import annotations

import argparse
import enum
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from lastcall.cli import parser as parsers


class Completes(enum.Enum):
    """What a shell offers for a value."""

    WORDS = "words"  # some known ones
    FOLDERS = "folders"
    FILES = "files"
    NOTHING = "nothing"  # a number, a name: only its user knows


@dataclass(frozen=True)
class CompletedValue:
    """The value of an option, or an argument without one."""

    name: str
    completes: Completes
    words: tuple[str, ...] = ()
    repeats: bool = False
    required: bool = True


@dataclass(frozen=True)
class CompletedOption:
    names: tuple[str, ...]
    help: str
    value: CompletedValue | None  # None: it takes none
    repeats: bool = False


@dataclass(frozen=True)
class CompletedCommand:
    """A command. `path`: the words that call it, without `lastcall` itself."""

    path: tuple[str, ...]
    help: str
    options: tuple[CompletedOption, ...]
    values: tuple[CompletedValue, ...]
    below: tuple[CompletedCommand, ...]
    runs_another: bool  # after `--`, or after its values, another command follows

    def all(self) -> Iterator[CompletedCommand]:
        yield self
        for command in self.below:
            yield from command.all()


def read(parser: argparse.ArgumentParser, path: tuple[str, ...] = (), help: str = "") -> CompletedCommand:
    options, values = [], []
    for action in parser._actions:
        if action.help == argparse.SUPPRESS or isinstance(action, argparse._SubParsersAction):
            continue
        if action.option_strings:
            options.append(_option(parser, action))
        elif action.nargs != argparse.REMAINDER:
            values.append(_value(action))
    commands = parsers.below(parser)
    below = []
    if commands is not None:
        helps = {name: summary for name, (_, summary) in parsers.COMMANDS.items()}
        if path:
            helps = {each.dest: each.help or "" for each in commands._choices_actions}
        below = [read(one, (*path, name), helps[name]) for name, one in commands.choices.items()]
    return CompletedCommand(
        path,
        help,
        tuple(options),
        tuple(values),
        tuple(below),
        # the doctor takes what follows `--` out of argparse's hands
        any(action.nargs == argparse.REMAINDER for action in parser._actions)
        or parser.get_default("command") is not None,
    )


def _option(parser: argparse.ArgumentParser, action: argparse.Action) -> CompletedOption:
    help = parser._get_formatter()._expand_help(action) if action.help else ""
    first = re.split(r"[;:.] | \(", " ".join(help.split()))[0]
    return CompletedOption(
        tuple(action.option_strings),
        first,
        None if action.nargs == 0 else _value(action),
        isinstance(action, argparse._AppendAction),
    )


def _value(action: argparse.Action) -> CompletedValue:
    name = action.metavar if isinstance(action.metavar, str) else action.dest.upper()
    words = parsers.suggestions(action)
    completes = Completes.WORDS if words else Completes.NOTHING
    if not words and re.search("DIR|CHECKPOINT", name):
        completes = Completes.FOLDERS
    elif not words and (action.type is Path or name in ("FILE", "PATH")):
        completes = Completes.FILES
    return CompletedValue(name, completes, words, action.nargs in ("+", "*"), action.nargs not in ("?", "*"))
