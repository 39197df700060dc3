"""In a real fish."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from helpers.cli import shells
from lastcall.cli import parser as parsers
from lastcall.cli.completion import fish
from lastcall.cli.completion.grammar import read

SCRIPT = fish.script(read(parsers.build(parsers.COMMANDS)))
pytestmark = pytest.mark.skipif(not shutil.which("fish"), reason="fish is not installed")


def complete(line: str, folder: Path) -> list[str]:
    """What it offers, each with its description behind a tab."""
    (folder / "lastcall.fish").write_text(SCRIPT)
    argv = ["fish", "--no-config", "-c", f"source lastcall.fish; complete -C '{line}'"]
    done = subprocess.run(argv, cwd=folder, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout.splitlines()


@shells.each_case
def test_a_line_is_completed(line: str, offered: set[str], others: set[str], tmp_path: Path) -> None:
    found = {one.partition("\t")[0].rstrip("/") for one in complete(line, shells.folder(tmp_path))}
    assert offered <= found, found
    assert not others & found, found


def test_commands_and_options_are_described(tmp_path: Path) -> None:
    assert complete("lastcall sh", tmp_path) == ["show\tshow one checkpoint in detail"]
    assert "--json\tprint JSON" in complete("lastcall ls --", tmp_path)
