"""In a real bash."""

from __future__ import annotations

import shlex
import subprocess
from pathlib import Path

import pytest

from helpers.cli import shells
from lastcall.cli import parser as parsers
from lastcall.cli.completion import bash
from lastcall.cli.completion.grammar import read

SCRIPT = bash.script(read(parsers.build(parsers.COMMANDS)))
ASK = """
[[ $(complete -p lastcall) == "complete -F _lastcall lastcall" ]] || exit 9
COMP_WORDS=({words})
COMP_CWORD=$((${{#COMP_WORDS[@]}} - 1))
_lastcall
printf '%s\\n' "${{COMPREPLY[@]}}"
"""


def complete(line: str, folder: Path) -> list[str]:
    words = " ".join(shlex.quote(word) for word in line.split(" "))
    argv = ["bash", "--norc", "-c", SCRIPT + ASK.format(words=words)]
    done = subprocess.run(argv, cwd=folder, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    return [word for word in done.stdout.splitlines() if word]


@shells.each_case
def test_a_line_is_completed(line: str, offered: set[str], others: set[str], tmp_path: Path) -> None:
    found = set(complete(line, shells.folder(tmp_path)))
    assert offered <= found, found
    assert not others & found, found


@pytest.mark.parametrize(
    ("words", "offered"),
    [
        ("lastcall export runs --format =", ["safetensors", "pt"]),
        ("lastcall export runs --format = p", ["pt"]),
        ("lastcall export --format = pt ru", ["runs"]),
        ("lastcall run --grace ", []),
        ("lastcall ls -- ru", []),
    ],
)
def test_a_value_behind_an_equals_sign_and_one_that_only_its_user_knows(
    words: str, offered: list[str], tmp_path: Path
) -> None:
    """bash takes --format=pt for three words."""
    assert complete(words, shells.folder(tmp_path)) == offered
