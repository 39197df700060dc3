"""`lastcall run` that starts again here, and asks Slurm to start it again elsewhere. The scontrol is a script
of the tests."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path

import pytest

from e2e.scripts.launch_harness import MEMBER, SCRIPTS, Launched, children, in_session, script
from helpers.processes.forkserver import until
from lastcall import testing

QUICK = ("--backoff", "0.05")
# Fails the first two times, then says 0. The count is in a file: every incarnation is a new process.
FLAKY = ["bash", "-c", "echo x >> lives; echo life $(wc -l < lives); [ $(wc -l < lives) -ge 3 ]"]


def test_a_failure_is_started_again_until_it_succeeds(tmp_path: Path) -> None:
    with Launched(tmp_path, FLAKY, "--restart", "on-failure", *QUICK) as launched:
        assert launched.wait() == 0, launched.log()
        assert launched.lines() == ["life 1", "life 2", "life 3"]
    assert "Starting again: restart 2 of at most 10" in launched.log()


def test_restarts_are_counted(tmp_path: Path) -> None:
    with Launched(tmp_path, FLAKY, "--restart", "on-failure", "--max-restarts", 1, *QUICK) as launched:
        assert launched.wait() == 1
        assert launched.lines() == ["life 1", "life 2"]
    assert "No restart: --max-restarts 1 is used up" in launched.log()


@pytest.mark.parametrize("policy", ["never", "on-preempt"])
def test_a_failure_is_not_started_again_unless_asked_for(tmp_path: Path, policy: str) -> None:
    with Launched(tmp_path, FLAKY, "--restart", policy, *QUICK) as launched:
        assert launched.wait() == 1
        assert launched.lines() == ["life 1"]


def test_a_wrong_setting_is_not_started_again(tmp_path: Path) -> None:
    with Launched(
        tmp_path, ["bash", "-c", "echo life; exit 78"], "--restart", "on-failure", *QUICK
    ) as launched:
        assert launched.wait() == 78
        assert launched.lines() == ["life"]


def test_a_crash_at_the_same_step_again_and_again_stops_with_a_clear_word(tmp_path: Path) -> None:
    with Launched(
        tmp_path, [*MEMBER, "run", "--crash-at", "5"], "--restart", "on-failure", *QUICK
    ) as launched:
        assert launched.wait() == 9, launched.log()
        assert launched.lines().count("left failed") == 3
    assert "No restart: 3 incarnations have failed at step 4 without any progress" in launched.log()


def test_a_run_that_was_preempted_on_its_own_goes_on_here(tmp_path: Path) -> None:
    with Launched(tmp_path, [*MEMBER, "run", "--steps", "40"], "--restart", "on-preempt", *QUICK) as launched:
        trainer = int(launched.expect("started"))
        launched.expect("joined")
        os.kill(trainer, signal.SIGTERM)
        resumed = int(launched.expect("joined", 2))
        assert 0 < resumed < 40
        assert launched.wait() == 0, launched.log()
    assert launched.lines()[-1] == "left finished"


def test_after_sigterm_to_the_launcher_nothing_is_started_again(tmp_path: Path) -> None:
    with Launched(tmp_path, [*MEMBER, "run"], "--restart", "on-failure", *QUICK) as launched:
        launched.expect("joined")
        launched.send()
        assert launched.wait() == 75
        assert len([line for line in launched.lines() if line.startswith("started")]) == 1
    assert "No restart: SIGTERM was for this machine" in launched.log()


def test_a_pause_ends_with_the_resume(tmp_path: Path) -> None:
    pause = tmp_path / "run" / ".lastcall" / "pause.json"
    with Launched(
        tmp_path, [*MEMBER, "run", "--steps", "60"], "--restart", "on-preempt", "--max-restarts", 0
    ) as launched:
        launched.expect("joined")
        pause.write_text("{}")
        launched.expect_log("Waiting for `lastcall resume`")
        until(lambda: not children(launched.pid), "a machine that is free")
        pause.unlink()
        assert launched.wait() == 0, launched.log()
        assert int(launched.expect("joined", 2)) > 0


def test_sigterm_in_a_pause_leaves_with_the_code_of_a_saved_run(tmp_path: Path) -> None:
    pause = tmp_path / "run" / ".lastcall" / "pause.json"
    with Launched(tmp_path, [*MEMBER, "run"], "--restart", "on-preempt") as launched:
        launched.expect("joined")
        pause.write_text("{}")
        launched.expect_log("Waiting for `lastcall resume`")
        launched.send()
        assert launched.wait() == 75, launched.log()


def test_sigterm_in_the_back_off_of_a_failure_is_143(tmp_path: Path) -> None:
    with Launched(tmp_path, ["false"], "--restart", "on-failure", "--backoff", 50) as launched:
        launched.expect_log("Starting again")
        launched.send()
        assert launched.wait() == 143, launched.log()


def test_what_a_crash_leaves_behind_does_not_meet_the_next_incarnation(tmp_path: Path) -> None:
    shell = "echo x >> lives; [ $(wc -l < lives) -ge 2 ] && exit 0; sleep 1000 & echo left $!; exit 1"
    with Launched(tmp_path, ["bash", "-c", shell], "--restart", "on-failure", *QUICK) as launched:
        left = int(launched.expect("left"))
        assert launched.wait() == 0, launched.log()
        assert left not in in_session(launched.pid)


def test_with_the_guardian_a_killed_run_goes_on_from_its_last_steps(tmp_path: Path) -> None:
    command = [sys.executable, SCRIPTS / "launch_train.py", tmp_path / "run", tmp_path / "result", 100_000]
    with Launched(tmp_path, command, "--guard", "--guard-steps", 1, *QUICK) as launched:
        launched.expect("at 20")
        os.kill(int(launched.expect("pid")), signal.SIGKILL)
        assert int(launched.expect("resumed", 2)) >= 15
        launched.expect_log("Exit code 75: the guardian saved run/checkpoint-")
        launched.expect("pid", 2)
        launched.send()
        assert launched.wait() == 75, launched.log()
    testing.assert_resumable(tmp_path / "run", exact=True)


SCONTROL = """#!/bin/bash
echo "$@" >> {folder}/asked
{then}
"""


def slurm(folder: Path, then: str) -> dict[str, str]:
    """A Slurm job, as far as its environment goes."""
    tools = folder / "tools"
    tools.mkdir()
    script(tools, "scontrol", SCONTROL.format(folder=folder, then=then))
    far = "4102444800"  # 2100
    return {
        "PATH": f"{tools}:{os.environ['PATH']}",
        "SLURM_JOB_ID": "77",
        "SLURM_JOB_END_TIME": far,
        "SLURM_SUBMIT_DIR": str(folder / "submitted"),
    }


def requeued(folder: Path) -> list[str]:
    asked = (folder / "asked").read_text().splitlines() if (folder / "asked").exists() else []
    return [line for line in asked if line.startswith("requeue")]


def test_slurm_is_asked_to_requeue_and_its_kill_is_waited_for(tmp_path: Path) -> None:
    with Launched(tmp_path, [*MEMBER, "run"], **slurm(tmp_path, "exit 0")) as launched:
        launched.expect("joined")
        launched.send()
        launched.expect_log("Requeued job 77; waiting for the kill")
        assert requeued(tmp_path) == ["requeue 77"]
        launched.send()
        assert launched.wait() == 75, launched.log()


def test_of_an_array_only_the_task_is_requeued_and_the_wait_is_bounded(tmp_path: Path) -> None:
    env = slurm(tmp_path, "exit 0") | {"SLURM_ARRAY_JOB_ID": "70", "SLURM_ARRAY_TASK_ID": "7"}
    with Launched(tmp_path, [*MEMBER, "run"], "--linger", 0.1, **env) as launched:
        launched.expect("joined")
        launched.send()
        assert launched.wait() == 75, launched.log()
    assert requeued(tmp_path) == ["requeue 70_7"]
    assert "Slurm has not ended this job" in launched.log()


def test_where_slurm_refuses_a_request_is_left(tmp_path: Path) -> None:
    with Launched(
        tmp_path, [*MEMBER, "run"], **slurm(tmp_path, "echo 'Job is not requeueable' >&2; exit 1")
    ) as launched:
        launched.expect("joined")
        launched.send()
        assert launched.wait() == 75, launched.log()
    request = json.loads((tmp_path / "submitted" / "lastcall-requeue-77").read_text())
    assert request["command"] == "scontrol requeue 77"
    assert "Job is not requeueable" in request["because"]
    assert "The request is in" in launched.log()


def test_where_there_is_no_scontrol_the_request_goes_where_it_is_wanted(tmp_path: Path) -> None:
    wanted = tmp_path / "requests" / "mine.json"
    env = slurm(tmp_path, "exit 0") | {"PATH": str(tmp_path), "LASTCALL_REQUEUE_FILE": str(wanted)}
    with Launched(tmp_path, [sys.executable, *MEMBER[1:], "run"], **env) as launched:
        launched.expect("joined")
        launched.send()
        assert launched.wait() == 75, launched.log()
    assert json.loads(wanted.read_text())["job"] == "77"
    assert "scontrol is not in PATH" in launched.log()


def test_a_job_that_finished_or_failed_is_not_requeued(tmp_path: Path) -> None:
    env = slurm(tmp_path, "exit 0")
    with Launched(tmp_path, [*MEMBER, "run", "--steps", "3"], **env) as finished:
        assert finished.wait() == 0
    with Launched(tmp_path, [*MEMBER, "other", "--crash-at", "3"], **env) as failed:
        assert failed.wait() == 9
    assert requeued(tmp_path) == []


@pytest.mark.parametrize(
    ("env", "code"),
    [
        ({"KUBERNETES_SERVICE_HOST": "10.0.0.1"}, 75),
        ({"KUBERNETES_SERVICE_HOST": "10.0.0.1", "RUNAI_JOB_NAME": "exp"}, 1),
        ({"_CONDOR_SCRATCH_DIR": "/tmp"}, 85),
        ({"_CONDOR_SCRATCH_DIR": "/tmp", "LASTCALL_EXIT_CODE": "99"}, 99),
    ],
)
def test_the_platform_chooses_the_code_of_a_saved_run_unless_somebody_else_does(
    tmp_path: Path, env: dict[str, str], code: int
) -> None:
    with Launched(tmp_path, [*MEMBER, "run"], **env) as launched:
        launched.expect("joined")
        launched.send()
        assert launched.wait() == code, launched.log()
