"""The termination message of a container: what a run leaves there, and what it leaves alone."""

from __future__ import annotations

import fcntl
import json
import os
from pathlib import Path
from typing import Any

import pytest

from helpers.core.session_report import Reported
from lastcall.core.progress import exit_message


@pytest.fixture(autouse=True)
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """There as in a pod, empty; a test may remove it."""
    path = tmp_path / "termination-log"
    path.touch()
    monkeypatch.setenv("LASTCALL_TERMINATION_LOG", str(path))
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    return path


@pytest.fixture
def run(tmp_path: Path) -> Reported:
    return Reported(tmp_path).event("start", incarnation=1, resumed=None)


def told(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(path.read_bytes())
    return found


def preempted(run: Reported) -> Reported:
    run.event("notice", source="signal", reason="SIGTERM")
    facts = {"step": 28, "exact": True, "because": "", "path": "checkpoint-28"}
    return run.event("committed", save="jit", **facts)


def test_the_message_is_the_last_report(run: Reported, path: Path) -> None:
    run.at(28)
    preempted(run).event("stop", outcome="saved", step=28)
    assert told(path) == run.report.document()
    assert (told(path)["state"], told(path)["notice"]) == ("saved", "SIGTERM")
    assert told(path)["checkpoint"]["path"] == "checkpoint-28"
    assert path.read_bytes().count(b"\n") == 0


def test_a_process_that_is_killed_after_its_commit_has_said_so(run: Reported, path: Path) -> None:
    preempted(run)
    assert told(path)["state"] == "saved"


def test_a_run_that_could_not_save_says_why(run: Reported, path: Path) -> None:
    run.event("notice", source="signal", reason="SIGTERM").event("not-saved", save="jit", because="no space")
    run.event("stop", outcome="not saved", step=28)
    assert (told(path)["state"], told(path)["because"]) == ("not saved", "no space")


def test_nothing_is_said_while_the_run_trains(run: Reported, path: Path) -> None:
    run.event("committed", save="periodic", step=9, exact=True, because="", path="checkpoint-9")
    assert path.read_bytes() == b""


@pytest.mark.parametrize(("outcome", "said"), [("failed", False), ("finished", True), ("left", True)])
def test_a_script_that_failed_leaves_the_message_to_the_log(
    run: Reported, path: Path, outcome: str, said: bool
) -> None:
    run.event("stop", outcome=outcome, step=28)
    assert bool(path.read_bytes()) is said


def test_the_next_incarnation_in_the_container_takes_the_message_back(run: Reported, path: Path) -> None:
    preempted(run)
    run.event("start", incarnation=2, resumed="checkpoint-28")
    assert path.read_bytes() == b""
    run.event("stop", outcome="finished", step=90)
    assert (told(path)["state"], told(path)["incarnation"]) == ("finished", 2)


@pytest.mark.parametrize("text", ["out of memory", '{"state": "saved"}', "[1]", "{"])
def test_what_another_program_has_said_stays(run: Reported, path: Path, text: str) -> None:
    path.write_text(text)
    preempted(run).event("stop", outcome="saved", step=28)
    run.event("start", incarnation=2, resumed=None)
    assert path.read_text() == text


def test_a_message_that_would_be_cut_off_goes_without_its_metrics(run: Reported, path: Path) -> None:
    run.at(28, None, {f"metric_{number}": number for number in range(1000)})
    preempted(run)
    assert (told(path)["currentStep"], told(path)["trainMetrics"]) == (28, {})


def test_what_is_too_long_without_them_is_not_said(path: Path) -> None:
    exit_message.write({"state": "saved", "notice": "x" * 5000})
    assert path.read_bytes() == b""


def test_without_a_message_file_none_is_made(run: Reported, path: Path) -> None:
    path.unlink()
    preempted(run)
    assert not path.exists()


def test_a_link_and_a_pipe_are_left_alone(run: Reported, path: Path, tmp_path: Path) -> None:
    path.unlink()
    (tmp_path / "mine").touch()
    path.symlink_to(tmp_path / "mine")
    preempted(run)
    assert (tmp_path / "mine").read_bytes() == b""
    path.unlink()
    os.mkfifo(path)
    preempted(run)  # returns


def test_while_another_process_writes_its_message_this_one_does_not(run: Reported, path: Path) -> None:
    with open(path, "rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        preempted(run)
        assert path.read_bytes() == b""
