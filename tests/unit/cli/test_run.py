from __future__ import annotations

import json
import subprocess
import sys

import pytest

from helpers.processes.forkserver import environment
from lastcall.cli import run
from lastcall.launch.outcome import ExitVerdict, Result


def launched(*words: str) -> subprocess.CompletedProcess[str]:
    argv = [sys.executable, "-m", "lastcall", "run", "--cloud", "none", *words]
    return subprocess.run(argv, capture_output=True, text=True, env=environment(), timeout=90, check=False)


def test_json_is_one_line_behind_the_output_of_the_command() -> None:
    done = launched("--json", "--", "sh", "-c", "echo training; exit 3")
    first, last = done.stdout.splitlines()
    body = json.loads(last)
    assert (done.returncode, first) == (3, "training")
    assert (body["schema"], body["exit_code"], body["result"]) == (1, 3, "failed")
    assert set(body) == {"schema", *run._JSON} and body["because"]


def test_a_command_that_cannot_start_has_no_document() -> None:
    done = launched("--json", "--", "no-such-program")
    assert (done.returncode, done.stdout) == (127, "")
    assert "command not found. Is it installed" in done.stderr


def test_a_closed_stdout_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", None)
    run._tell(ExitVerdict(Result.SAVED, 75, "saved checkpoint-1"))
