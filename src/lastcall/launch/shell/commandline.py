"""What the command after `--` comes down to: `lastcall run`, shells, and the program inside."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field

from lastcall import settings
from lastcall.launch import processes
from lastcall.launch.shell import scripts

_FLAGS = ("--guard", "--no-auto", "-h", "--help")  # options of `lastcall run` without a value
_DEEPEST = 6
_AGENTS = ("torchrun", "torch.distributed.run", "torch.distributed.launch")


@dataclass(frozen=True)
class Launch:
    """The command, understood as far as it can be read."""

    given: tuple[str, ...] = ()
    words: tuple[str, ...] = ()  # the innermost program
    wrapped: bool = False  # `lastcall run` is its ancestor: in the command, or above the doctor
    options: Mapping[str, str] = field(default_factory=dict)  # the options of `lastcall run` in the command
    shells: tuple[
        scripts.ShellScript, ...
    ] = ()  # the shells without a `lastcall run` above them, outermost first

    @property
    def torchrun(self) -> bool:
        return processes.program_of(self.words)[0] in _AGENTS or (
            processes.program_of(self.words)[0] == "accelerate"
            and processes.program_of(self.words)[1][:1] == ("launch",)
        )

    def option(self, name: str) -> str | None:
        """The value of an option of the innermost program: --shutdown-timeout=60."""
        for index, word in enumerate(self.words):
            found, _, value = word.partition("=")
            if found.replace("_", "-") == name:
                return value if "=" in word else "".join(self.words[index + 1 : index + 2])
        return None

    @property
    def text(self) -> str:
        return shlex.join(self.given)


def understand(command: tuple[str, ...], environ: Mapping[str, str], *, files: bool = True) -> Launch:
    """`files`: scripts may be opened. Not those of a command that is meant for another machine."""
    wrapped = settings.registry_folder(environ) is not None
    options: dict[str, str] = {}
    shells: list[scripts.ShellScript] = []
    words = command
    for _ in range(_DEEPEST):
        words = _bare(words)
        program, rest = processes.program_of(words)
        if program == "lastcall" and rest[:1] == ("run",):
            found, words = _of_run(rest[1:])
            options, wrapped = {**found, **options}, True
            continue
        script = scripts.of_command(words, files=files)
        if script is None:
            break
        if not wrapped:
            shells.append(script)
        if script.training is None or script.training.program[0].startswith("$"):
            break
        words = script.training.program
    return Launch(command, words, wrapped, options, tuple(shells))


def _bare(words: tuple[str, ...]) -> tuple[str, ...]:
    """Without what only passes a command on."""
    while words and words[0] in ("env", "exec", "nohup", "time"):
        words = words[1:]
        while words and "=" in words[0] and not words[0].startswith("-"):
            words = words[1:]
    return words


def _of_run(words: tuple[str, ...]) -> tuple[dict[str, str], tuple[str, ...]]:
    """The options of `lastcall run`, and its command."""
    options: dict[str, str] = {}
    left = list(words)
    while left and left[0].startswith("-"):
        word = left.pop(0)
        if word == "--":
            break
        name, equals, value = word.partition("=")
        options[name] = value if equals or name in _FLAGS or not left else left.pop(0)
    return options, tuple(left)
