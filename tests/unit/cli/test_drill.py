"""The command line of the drill: what it takes, and what it refuses."""

from __future__ import annotations

import argparse
import signal
from pathlib import Path

import pytest

from helpers.drill import harness
from lastcall import errors
from lastcall.cli import drill as command
from lastcall.cli import main
from lastcall.drill.options import DrillOptions


def parsed(*words: str) -> DrillOptions:
    parser = argparse.ArgumentParser()
    command.add(parser.add_subparsers())
    return command.parsed(parser.parse_args(["drill", *words]))


def test_the_defaults_are_those_that_are_documented() -> None:
    assert parsed("--", "python", "x.py") == DrillOptions(("python", "x.py"))
    assert (
        DrillOptions(("x",)).grace == 30.0
        and DrillOptions(("x",)).signal_name == "SIGTERM"
        and DrillOptions(("x",)).patience == 300.0
    )


def test_every_option_arrives() -> None:
    words = [
        "--after",
        "1.5",
        "--grace",
        "9",
        "--signal",
        "usr1",
        "--times",
        "3",
        "--to",
        "group",
        "--to-the-end",
    ]
    words += ["--patience", "7", "--log", "log"]
    assert parsed(*words, "--", "x") == DrillOptions(
        ("x",), None, 1.5, 9.0, signal.SIGUSR1, "group", 3, 7.0, True, Path("log")
    )  # fmt: skip
    assert parsed("--at", "40", "x").at == 40


def test_what_follows_the_command_belongs_to_it() -> None:
    assert parsed("--times", "2", "--", "python", "x.py", "--times", "9", "--json", "--", "y").command == (
        "python", "x.py", "--times", "9", "--json", "--", "y",
    )  # fmt: skip
    assert parsed("python", "x.py", "--json").command == ("python", "x.py", "--json")


@pytest.mark.parametrize(
    ("text", "signum"), [("15", 15), ("TERM", 15), ("sigterm", 15), ("SIGUSR2", 12), ("9", 9)]
)
def test_a_signal_may_be_a_name_or_a_number(text: str, signum: int) -> None:
    assert parsed("--signal", text, "x").signum == signum


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "no command given. Put it after two dashes, for example: lastcall drill -- python train.py"),
        (["--times", "0", "x"], "--times 0: must be a whole number of at least 1"),
        (["--times", "many", "x"], "--times many: must be a whole number"),
        (["--at", "-3", "x"], "--at -3: must be a whole number"),
        (["--after", "soon", "x"], "--after soon: must be a number of seconds"),
        (["--grace", "-1", "x"], "--grace -1: must be a number of seconds"),
        (["--grace", "nan", "x"], "--grace nan: must be a number of seconds"),
        (["--patience", "inf", "x"], "--patience inf: must be a number of seconds"),
        (["--signal", "SIGNONE", "x"], "--signal SIGNONE: no such signal"),
        (["--signal", "0", "x"], "--signal 0: no such signal"),
        (
            ["--log", "/nowhere/log", "true"],
            "--log /nowhere/log: No such file or directory. Name a writable file.",
        ),
        (
            ["--", "no-such-program"],
            "no-such-program: command not found. Is it installed, and is it in PATH?",
        ),
        (["--", "/etc"], "/etc is a directory"),
        (["--", "/etc/passwd"], "/etc/passwd is not executable. Run: chmod +x /etc/passwd"),
    ],
)
def test_bad_input_leaves_with_78(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["drill", *words]) == errors.EXIT_CONFIG
    seen = capsys.readouterr()
    assert f"lastcall: {said}" in seen.err and seen.out == ""


def test_a_script_without_an_interpreter_leaves_with_78(tmp_path: Path) -> None:
    script = tmp_path / "train"
    script.write_text("#!/no/such/python\n")
    script.chmod(0o755)
    done = harness.drill(tmp_path, "--", script)
    assert done.returncode == errors.EXIT_CONFIG
    assert (
        f"cannot start {script}: No such file or directory. Check that the interpreter in its first line "
        "exists" in done.stderr
    )


def test_two_moments_at_once_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["drill", "--at", "3", "--after", "4", "--", "true"]) == 2
    assert "not allowed with" in capsys.readouterr().err


def test_the_help_says_what_it_leaves_behind(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["drill", "--help"]) == 0
    assert "Afterwards the run is stopped" in capsys.readouterr().out
