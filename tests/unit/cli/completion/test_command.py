from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from helpers.cli.harness import Cli
from lastcall.cli.completion import command


@pytest.mark.parametrize("shell", list(command.SHELLS))
def test_it_prints_a_script_and_nothing_else(shell: str, cli: Cli) -> None:
    said = cli("completion", shell)
    assert (said.code, said.err) == (0, "")
    assert said.out.startswith("#") and "prune" in said.out
    assert not any(f"@{name}@" in said.out for name in ("values", "commands", "functions", "tables"))


def test_the_help_says_how_to_install_it_for_each_shell(cli: Cli) -> None:
    said = cli("completion", "--help").out
    assert 'eval "$(lastcall completion bash)"' in said
    assert 'eval "$(lastcall completion zsh)"' in said
    assert "lastcall completion fish > ~/.config/fish/completions/lastcall.fish" in said


def test_what_the_help_says_for_bash_works(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "script").write_text(cli("completion", "bash").out)
    program = 'eval "$(cat script)" && complete -p lastcall'
    done = subprocess.run(
        ["bash", "-c", program], cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.stdout == "complete -F _lastcall lastcall\n", done.stderr
