"""Shell scripts around a training: does the shell block signals, and does the exit code reach the platform?

Doubtful cases are not reported: commands whose result a condition uses, and programs that are not known to
train.
"""

from __future__ import annotations

import os
import shlex
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from lastcall.launch.shell import outline
from lastcall.launch.shell.outline import ShellCommand

SHELLS = frozenset({"sh", "bash", "dash", "ash", "zsh", "ksh", "mksh"})
_LARGEST = 1024 * 1024


class LostExitCode(NamedTuple):
    why: str
    in_pipe: bool = False  # `set -o pipefail` would keep it


@dataclass(frozen=True)
class ShellScript:
    name: str  # its file, or the shell with -c
    path: str | None  # None: given with -c
    shell: str
    options: str  # of the command line and the first line: "e" for set -e
    statements: tuple[ShellCommand, ...]

    @property
    def _place(self) -> int | None:
        trains = [index for index, statement in enumerate(self.statements) if statement.trains]
        calls = [index for index, statement in enumerate(self.statements) if _calls(statement)]
        return max(trains or calls, default=None)

    @property
    def training(self) -> ShellCommand | None:
        """The last command that may train: the ones before it prepare."""
        return None if self._place is None else self.statements[self._place]

    @property
    def stays(self) -> bool:
        """Whether the shell still runs during training, so that signals reach it instead."""
        training = self.training
        if training is None or training.words[0] == "exec":
            return False
        # bash -c execs its last command automatically; dash does not, and no shell does so for a script.
        last = self.statements[-1] is training and training.joined == ";" and not training.conditional
        return not (self.path is None and last and not self.traps and _is_bash(self.shell))

    @property
    def traps(self) -> bool:
        """Whether it handles SIGTERM itself."""
        return any(
            item.words[0] == "trap" and {"TERM", "SIGTERM", "15"} & set(item.words)
            for item in self.statements
        )

    def _set(self, letter: str, name: str) -> bool:
        if letter and letter in self.options:
            return True
        for item in self.statements:
            if item.words[0] != "set":
                continue
            clusters = [word for word in item.words[1:] if word.startswith("-")]
            if name in item.words or (letter and any(letter in word for word in clusters)):
                return True
        return False

    def swallows(self) -> LostExitCode | None:
        """Why the training's exit code gets lost; None if it does not, or if that is unknown."""
        start = self._place
        if start is None or self.statements[start].conditional:
            return None
        return self._lost_after(start)

    def _lost_after(self, index: int) -> LostExitCode | None:
        item = self.statements[index]
        rest = self.statements[index + 1 :]
        if item.joined == "|" and not self._set("", "pipefail"):
            end = next((other for other in rest if other.joined != "|"), item)
            why = f"its exit code is lost in a pipe: that of `{shlex.join(end.words)}` counts"
            return LostExitCode(why, in_pipe=True)
        if item.words[0] == "exec":
            return None
        leaves = any(
            other.words[0] in ("exit", "return", "false") and other.words[1:2] != ("0",) for other in rest
        )
        if item.joined == "||" and rest and not leaves:
            return LostExitCode(f"`|| {shlex.join(rest[0].words)}` turns every exit code into 0")
        if item.joined == "&":
            return self._lost_in_background(index, rest)
        while rest and item.joined in ("|", "||", "&&"):
            item, rest = rest[0], rest[1:]
        if not rest or leaves or self._set("e", "errexit"):
            return None
        last = shlex.join(rest[-1].words)
        return LostExitCode(f"the script continues afterwards and ends with the exit code of `{last}`")

    def _lost_in_background(self, index: int, rest: Sequence[ShellCommand]) -> LostExitCode | None:
        for offset, other in enumerate(rest, index + 1):
            if other.words[0] == "wait":
                if len(other.words) == 1:
                    return LostExitCode("it runs in the background, and `wait` without a process answers 0")
                return self._lost_after(offset)
        return LostExitCode("it runs in the background, and nothing waits for it")


def _calls(statement: ShellCommand) -> bool:
    """Whether it runs another script, in which the training may be."""
    words = statement.program
    if not words:
        return False
    return words[0].endswith(".sh") or (os.path.basename(words[0]) in SHELLS and not is_interactive(words))


def of_command(words: Sequence[str], *, files: bool = True) -> ShellScript | None:
    """The script that a command runs. None if it is none, an interactive shell, or a file that cannot be
    read, or must not be (`files`): one that is meant for another machine."""
    if not words:
        return None
    shell = os.path.basename(words[0]).lstrip("-")
    if shell in SHELLS:
        return _of_shell(words[0], words[1:], files=files)
    if not files or outline.TRAINS.fullmatch(shell):
        return None  # a wrapper of pyenv or the like, which execs
    path = words[0] if os.sep in words[0] else shutil.which(words[0]) or ""
    text = _read(path)
    first = text.split("\n", 1)[0] if text else ""
    if text is None or not first.startswith("#!"):
        return None
    interpreter = [word for word in first[2:].split() if os.path.basename(word) not in ("env", "-S")]
    if not interpreter or os.path.basename(interpreter[0]) not in SHELLS:
        return None
    options = "".join(word[1:] for word in interpreter[1:] if word.startswith("-"))
    return ShellScript(path, path, interpreter[0], options, tuple(outline.read(text)))


def is_interactive(words: Sequence[str]) -> bool:
    """A shell without a script: somebody types into it, or talks to it through a pipe."""
    if not words or os.path.basename(words[0]).lstrip("-") not in SHELLS:
        return False
    options, operands, inline = _arguments(words[1:])
    return not inline and (not operands or "i" in options)


def _arguments(words: Sequence[str]) -> tuple[str, list[str], bool]:
    """The letters of a shell's options, what follows them, and whether -c is among them."""
    letters = ""
    left = list(words)
    while left and left[0][:1] in ("-", "+") and left[0] not in ("-", "--"):
        word = left.pop(0)
        if word.startswith("--"):
            continue
        letters += word[1:] if word[0] == "-" else ""
        if word.endswith("o") and left:
            letters += "e" if left[0] == "errexit" else ""
            left.pop(0)
    if left and left[0] in ("-", "--"):
        left.pop(0)
    return letters, left, "c" in letters


def _of_shell(shell: str, words: Sequence[str], *, files: bool) -> ShellScript | None:
    options, operands, inline = _arguments(words)
    if not operands:
        return None
    if inline:
        return ShellScript(
            f"{os.path.basename(shell)} -c", None, shell, options, tuple(outline.read(operands[0]))
        )
    text = _read(operands[0]) if files else None
    return (
        None
        if text is None
        else ShellScript(operands[0], operands[0], shell, options, tuple(outline.read(text)))
    )


def _read(path: str) -> str | None:
    try:
        if not os.path.isfile(path):
            return None
        with open(path, "rb") as file:
            data = file.read(_LARGEST)
    except OSError:
        return None
    return None if b"\0" in data else data.decode(errors="replace")


def _is_bash(shell: str) -> bool:
    found = shutil.which(shell)
    return found is not None and os.path.basename(os.path.realpath(found)) == "bash"
