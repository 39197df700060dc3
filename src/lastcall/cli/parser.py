"""Which commands there are, and how a parser helps: commands in groups, examples at the end, and an error of
one line with what to type instead.

Only the requested command's module is imported: `lastcall run` precedes every training process, and `lastcall
--help` must be fast. So the one-line summaries are here and not in the modules.
"""

from __future__ import annotations

import argparse
import difflib
import importlib
import re
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NoReturn, cast
from weakref import WeakKeyDictionary

import lastcall
from lastcall import parsing

GROUPS: dict[str, tuple[str, ...]] = {
    "Train": ("run",),
    "Look at what was saved": ("ls", "show", "export"),
    "Act on a run": ("watch", "pause", "resume", "prune"),
    "Check and prove": ("doctor", "drill", "verify"),
    "Kubernetes": ("kube",),
    "Set up": ("completion",),
}
# command -> the module in lastcall.cli whose add() registers it, and a line for --help
COMMANDS: dict[str, tuple[str, str]] = {
    "run": ("run", "run a training command: save it when it must stop, resume it"),
    "ls": ("ls", "list the checkpoints of runs"),
    "show": ("show", "show one checkpoint in detail"),
    "export": ("export", "export a checkpoint as one safetensors or .pt file"),
    "watch": ("watch", "follow a run: step, metrics, speed, saves, notices"),
    "pause": ("pause", "save and stop a run, and keep it stopped"),
    "resume": ("pause", "resume a paused run"),
    "prune": ("prune", "remove old checkpoints; shows first what would be removed"),
    "doctor": ("doctor", "check what will happen here when this machine is preempted"),
    "drill": ("drill", "preempt a real run and report what was lost"),
    "verify": ("verify", "check every byte of checkpoints against its digest"),
    "kube": ("kube.command", "protect jobs in a cluster; pause, resume, status"),
    "completion": ("completion.command", "print completion for bash, zsh or fish"),
}
_EPILOG = """examples:
  lastcall run -- python train.py
  lastcall ls runs/exp1

Each command explains itself: lastcall COMMAND --help"""
_REMEDY = re.compile(
    r"For example|Did you mean|is not one of|choose |--help"
)  # in a message: it needs no other
_suggestions: WeakKeyDictionary[argparse.Action, tuple[str, ...]] = WeakKeyDictionary()


def suggest(action: argparse.Action, words: Sequence[str]) -> None:
    """What completion offers for an option whose values argparse does not check."""
    _suggestions[action] = tuple(words)


def suggestions(action: argparse.Action) -> tuple[str, ...]:
    return tuple(map(str, action.choices)) if action.choices else _suggestions.get(action, ())


def seconds(text: str) -> float:
    """The type of an option that takes seconds."""
    try:
        return parsing.seconds(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} {error}. For example: 30") from None


def build(wanted: Iterable[str]) -> LastcallParser:
    """The parser of `lastcall`; only the wanted commands are fully defined in it."""
    parser = LastcallParser(
        prog="lastcall",
        description="Saves a training run when it is asked to stop, and resumes it.",
        epilog=_EPILOG,
        allow_abbrev=False,
        groups=GROUPS,
    )
    parser.add_argument("--version", action="version", version=f"lastcall {lastcall.__version__}")
    subparsers = parser.add_subparsers(metavar="COMMAND", title="commands")
    modules = {COMMANDS[name][0] for name in wanted if name in COMMANDS}
    for name, (home, summary) in COMMANDS.items():
        if home not in modules:
            subparsers.add_parser(name, help=summary)
    for module in sorted(modules):
        importlib.import_module(f"lastcall.cli.{module}").add(subparsers)
    return parser


def below(parser: argparse.ArgumentParser) -> argparse._SubParsersAction[LastcallParser] | None:
    """The subcommands of a parser."""
    return next(
        (
            cast("argparse._SubParsersAction[LastcallParser]", action)
            for action in parser._actions
            if isinstance(action, argparse._SubParsersAction)
        ),
        None,
    )


class LastcallParser(argparse.ArgumentParser):
    """A parser of the command line. `groups`: titles, and the subcommands below each in --help."""

    def __init__(self, *args: Any, groups: Mapping[str, Sequence[str]] | None = None, **more: Any) -> None:
        super().__init__(*args, **{"formatter_class": HelpText, **more})
        self._groups = groups

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> tuple[argparse.Namespace, list[str]]:
        """As argparse does it, but each parser complains of its own unknown options: it knows the others."""
        found, rest = super().parse_known_args(args, namespace)
        if rest:
            self.error(_unknown(rest, self._option_string_actions))
        return found, rest

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is None or value in action.choices:
            return
        known = [str(choice) for choice in action.choices]
        if isinstance(action, argparse._SubParsersAction):
            remedy = f"List them with: {self.prog} --help"
            if close := difflib.get_close_matches(str(value), known, 1):
                remedy = f"Did you mean: {self.prog} {close[0]}?"
            self.error(f"there is no command {value!r}. {remedy}")
        raise argparse.ArgumentError(
            action, f"{value!r} is not one of {', '.join(known)}{_closest(value, known)}"
        )

    def error(self, message: str) -> NoReturn:
        """One line, and what to type. The usage of a command with many options would hide both."""
        text = " ".join(message.removeprefix("argument ").split())
        end = "" if _REMEDY.search(text) else f". See: {self.prog} --help"
        self.exit(2, f"{self.prog}: {text}{end}\n")

    def format_help(self) -> str:
        commands = below(self)
        if self._groups is None or commands is None:
            return super().format_help()
        formatter = self._get_formatter()
        formatter.add_usage(self.usage, self._actions, self._mutually_exclusive_groups)
        formatter.add_text(self.description)
        rows = {action.dest: action for action in commands._choices_actions}
        for title, names in self._groups.items():
            formatter.start_section(title)
            formatter.add_arguments([rows[name] for name in names if name in rows])
            formatter.end_section()
        formatter.start_section("options")
        formatter.add_arguments([action for action in self._actions if action.option_strings])
        formatter.end_section()
        formatter.add_text(self.epilog)
        return formatter.format_help()


class HelpText(argparse.HelpFormatter):
    """Paragraphs are filled; indented lines (examples) and titles stay as they are."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        lines: list[str] = []
        paragraph: list[str] = []
        for line in [*text.strip("\n").splitlines(), ""]:
            if line and not line.startswith(" ") and not line.endswith(":"):
                paragraph.append(line)
                continue
            if paragraph:
                lines += textwrap.wrap(
                    " ".join(paragraph), width, initial_indent=indent, subsequent_indent=indent
                )
                paragraph = []
            lines.append(f"{indent}{line}".rstrip())
        return "\n".join(lines[:-1])


def _unknown(words: Sequence[str], known: Iterable[str]) -> str:
    """Why these words cannot be understood."""
    word = words[0]
    if not word.startswith("-"):
        return f"{word!r} is one word too many"
    option = word.partition("=")[0]
    close = difflib.get_close_matches(option, known, 1)
    return f"there is no option {option}" + (f". Did you mean {close[0]}?" if close else "")


def _closest(word: object, known: Sequence[str]) -> str:
    close = difflib.get_close_matches(str(word), known, 1)
    return f". Did you mean {close[0]}?" if close else ""
