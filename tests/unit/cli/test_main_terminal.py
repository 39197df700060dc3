"""What the commands print, on terminals and in pipes: how wide it is, where it has colours, and its JSON."""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from pathlib import Path

import pytest

from helpers.cli import terminal
from helpers.cli.harness import Cli, MakeRun
from helpers.core.bare_core import flip
from helpers.processes.forkserver import environment
from lastcall.cli import output
from lastcall.cli import parser as parsers
from lastcall.notices import ancestry

LONG = "a reason that is much longer than the column in which it stands, as those of schedulers are"
STEPS = (100, 2000, 30_000, 400_000)
# each says something about the directory RUN
COMMANDS = [
    "ls RUN",
    "show RUN",
    "show RUN/checkpoint-2000",
    "verify RUN",
    "prune RUN --keep 2",
    "prune RUN --keep 2 --damaged --spare",
    "watch RUN --once",
    "pause RUN",
    "resume RUN",
    "export RUN OUT --name model --force",
    "doctor RUN --settings --no-write-test",
    "doctor RUN --no-write-test -- bash train.sh",
]


def words(line: str) -> list[str]:
    return line.replace("RUN", "run").replace("OUT", "out.safetensors").split()


@pytest.fixture
def run(make_run: MakeRun, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """With all that makes lines long: a damaged checkpoint, one that was set aside, a long reason."""
    root = make_run("run", *STEPS, reason=LONG)
    flip(root / "checkpoint-100" / "model.safetensors", -1)
    (root / "checkpoint-2000" / "model.safetensors").unlink()
    (root / "checkpoint-5.damaged-0").mkdir()
    (root / "checkpoint-9").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(
        ancestry, "parent_of", lambda pid: 0
    )  # a make above these tests, which doctor would quote
    (tmp_path / "train.sh").write_text("python train.py\n")
    return Path("run")


@pytest.mark.parametrize("line", COMMANDS)
@pytest.mark.parametrize("width", [60, 80, 100])
def test_no_line_is_wider_than_the_terminal_and_no_name_is_cut(
    line: str, width: int, run: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    said = cli(*words(line))
    assert said.code in (0, 1) and said.lines and not said.err, said.err
    # a path and a command to paste are never broken
    whole = [one for one in said.lines if "command: [" in one or max(map(len, one.split() or [""])) > 35]
    assert [one for one in said.lines if len(one) > width and one not in whole] == []
    if line.startswith(("ls", "prune")):
        assert all(f"checkpoint-{step} " in said.out for step in STEPS)


def test_a_wider_terminal_shows_more(run: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    narrow = cli("ls", run).lines[0].split()
    monkeypatch.setenv("COLUMNS", "220")
    wide = cli("ls", run)
    assert {"TOOK", "CREATED"} <= set(wide.lines[0].split()) - set(narrow)
    assert LONG in wide.out


def test_a_pipe_is_80_columns_wide(run: Path) -> None:
    env = environment()
    del env["COLUMNS"]
    argv = [sys.executable, "-m", "lastcall", "ls", str(run)]
    done = subprocess.run(argv, capture_output=True, text=True, env=env, timeout=90, check=True)
    assert 70 < max(map(len, done.stdout.splitlines())) <= 80


# ---- colours -----------------------------------------------------------------------------------------------


def in_a_terminal(run: Path, *line: str, **env: str) -> str:
    environ = environment(**{"TERM": "xterm", **env})
    del environ["COLUMNS"]
    return terminal.shown([sys.executable, "-m", "lastcall", *line, str(run)], environ, columns=100)


def test_a_terminal_gets_colours_and_its_own_width(run: Path) -> None:
    seen = in_a_terminal(run, "ls")
    assert "\x1b[32myes\x1b[0m" in seen and "\x1b[31mdamaged\x1b[0m" in seen
    plain = re.sub(r"\x1b\[\d+m", "", seen)
    assert 80 < max(map(len, plain.splitlines())) <= 100
    assert "\x1b[31mrisk\x1b[0m  " in in_a_terminal(run, "doctor", "--no-write-test", "--size", "900TB")


@pytest.mark.parametrize("env", [{"NO_COLOR": "1"}, {"NO_COLOR": "1", "FORCE_COLOR": "1"}, {"TERM": "dumb"}])
@pytest.mark.parametrize("line", [("ls",), ("verify",), ("watch", "--once")])
def test_a_terminal_that_wants_no_colours_gets_none(
    line: tuple[str, ...], env: dict[str, str], run: Path
) -> None:
    seen = in_a_terminal(run, *line, **env)
    assert seen and not re.search(r"\x1b\[\d+m", seen)
    assert env.get("TERM") != "dumb" or "\x1b" not in seen


def test_a_pipe_gets_colours_only_on_request_and_json_never(
    run: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "\x1b" not in cli("ls", run).out
    monkeypatch.setenv("CLICOLOR_FORCE", "1")
    assert "\x1b[32myes" in cli("ls", run).out
    assert "\x1b" not in cli("ls", run, "--json").out


# ---- JSON --------------------------------------------------------------------------------------------------


def declared(name: str) -> dict[str, str]:
    below = parsers.below(parsers.build([name]))
    assert below is not None
    (flag,) = [action for action in below.choices[name]._actions if isinstance(action, output.JsonFlag)]
    return flag.fields


def fields(body: object, prefix: str = "") -> set[str]:
    """The names in a document, as they are declared."""
    if isinstance(body, list):
        return {name for item in body for name in fields(item, f"{prefix}[]")}
    if not isinstance(body, dict):
        return set()
    start = f"{prefix}." if prefix else ""
    own = {f"{start}{name}" for name in body}
    return own | {below for name, item in body.items() for below in fields(item, f"{start}{name}")}


@pytest.mark.parametrize("line", COMMANDS)
def test_the_fields_of_a_document_are_those_that_are_declared(line: str, run: Path, cli: Cli) -> None:
    said = (
        cli(*words(line), "--json") if "--" not in words(line) else cli("doctor", "--json", *words(line)[1:])
    )
    body = said.json
    assert body.pop("schema") == 1 and not said.err
    known = declared(line.split()[0])
    assert set(body) == {name for name in known if not re.search(r"[.\[]", name)}
    if line.startswith("prune"):  # checkpoints as in ls, with a reason
        return
    # where some parts of a thing are declared, all are; the others are maps and events
    things = {name.rpartition(".")[0] for name in known if "." in name}
    for name in fields(body):
        assert name.rpartition(".")[0] not in things or name in known, name


def test_every_command_that_prints_something_takes_json() -> None:
    def without(parser: argparse.ArgumentParser) -> set[str]:
        below = parsers.below(parser)
        if below is not None:
            return {name for each in below.choices.values() for name in without(each)}
        return set() if "--json" in parser._option_string_actions else {parser.prog}

    # a script for a shell is no document; the log of the webhook is JSON anyway
    assert without(parsers.build(parsers.COMMANDS)) == {"lastcall completion", "lastcall kube webhook"}


def test_errors_stay_text_on_stderr(cli: Cli) -> None:
    said = cli("ls", "/no/such/folder", "--json")
    assert (said.code, said.out) == (1, "")
    assert said.err.startswith("lastcall: /no/such/folder does not exist. ")
