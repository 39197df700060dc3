"""In a real zsh, which completes only on a terminal."""

from __future__ import annotations

import shutil
from collections.abc import Iterator

import pytest

from helpers.cli import shells
from helpers.cli.terminal import Terminal, opened
from helpers.processes.forkserver import environment
from lastcall.cli import parser as parsers
from lastcall.cli.completion import zsh
from lastcall.cli.completion.grammar import read

SCRIPT = zsh.script(read(parsers.build(parsers.COMMANDS)))
START = (
    "LISTMAX=9999; unsetopt beep; autoload -U compinit; compinit -u -D; source ./lastcall.zsh; echo rea''dy\n"
)
LIST, CLEAR = "\x04", "\x15"  # Ctrl-D, Ctrl-U
pytestmark = pytest.mark.skipif(not shutil.which("zsh"), reason="zsh is not installed")


@pytest.fixture(scope="module")
def shell(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Terminal]:
    folder = shells.folder(tmp_path_factory.mktemp("zsh"))
    (folder / "lastcall.zsh").write_text(SCRIPT)
    with opened(["zsh", "-f", "-i"], environment(TERM="dumb", PS1="@@ "), folder, columns=200) as terminal:
        terminal.until("@@ ")
        terminal.type(START)
        settle(terminal, "ready\r\n")
        yield terminal


def settle(shell: Terminal, said: str) -> None:
    """Wait until it has said this, and then for its prompt: it is ready for keys."""
    shell.until(said)
    while "@@ " not in shell.text.rpartition(said)[2]:
        shell.read(0.05)


def complete(line: str, shell: Terminal) -> str:
    """What it lists for the line."""
    shell.text = ""
    shell.type(f"{line}{LIST}{CLEAR}echo en''d\n")
    settle(shell, "end\r\n")
    return shell.text.partition(line)[2].partition("@@ ")[0]


@shells.each_case
def test_a_line_is_completed(line: str, offered: set[str], others: set[str], shell: Terminal) -> None:
    seen = complete(line, shell)
    found = {word.rstrip("/") for word in seen.split()}
    assert offered <= found, seen
    assert not others & found, seen


def test_commands_are_described(shell: Terminal) -> None:
    assert "show one checkpoint in detail" in complete("lastcall ", shell)
