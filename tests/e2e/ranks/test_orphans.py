"""A launcher is killed and leaves its ranks behind: they save one step and stop by themselves. What is left
of an incarnation whose directory has a new owner commits nothing there."""

from __future__ import annotations

import dataclasses
import os
import signal
import sys

import pytest

from helpers.processes import live_processes as running
from helpers.ranks import plan as ranks_plan
from helpers.ranks import trials as ranks_trials
from helpers.ranks.jobs import LASTCALL_RUN, SCRIPTS, Job, Launched, Launcher
from helpers.ranks.plan import Plan
from helpers.ranks.trials import Life, References, Trial
from lastcall.core.process import registry
from lastcall.launch import processes

# seconds in which an orphan finds that it is one: many times as many as it needs
PLAN = Plan(steps=60, seconds=0.08)
AGAIN = dataclasses.replace(PLAN, seconds=0.0)
ALL_RANKS = 2


def left_of(job: Job) -> list[int]:
    """Every process of a life that still runs, whoever its parent is now."""
    told = f"{ranks_plan.FOLDER}={job.folder}".encode()
    ours = [pid for pid, environ in running.files("environ") if told in environ.split(b"\0")]
    return [pid for pid in ours if registry.process_start(pid) is not None]


def started(launcher: Launcher, how: str, *options: str) -> Launched:
    """Two ranks below real launchers, in the middle of their training."""
    job = launcher.launch("ddp.py", ALL_RANKS, how, launcher.folder / "run", PLAN, *options)
    assert isinstance(job, Launched)
    for rank in range(ALL_RANKS):
        assert job.until(rank, "at", 5), job.log()
    return job


def agent_of(job: Launched) -> int:
    (top,) = job.launchers
    below = processes.below(top.pid)
    return next((process.pid for process in below.values() if process.is_agent), top.pid)


def orphaned(launcher: Launcher, job: Launched, victim: int) -> Life:
    """Kill one launcher; come back when nothing is left of the life."""
    (top,) = job.launchers
    os.kill(victim, signal.SIGKILL)
    job.until_true(
        lambda: top.poll() is not None and not left_of(job), f"the end of what {victim} left behind"
    )
    return Life(job.codes(), (), job.journals(), ranks_trials.records(launcher.folder / "run"), job.log())  # type: ignore[arg-type]


def check_saved_and_resumed(launcher: Launcher, references: References, first: Life, reason: str) -> None:
    (record,) = first.committed
    assert record["exact"], record["because"]
    assert record["reason"] == reason, first.log
    assert record["kind"] in ("jit", "rescue"), first.log
    directory = launcher.folder / "run"
    again = ranks_trials.live(launcher.launch("ddp.py", ALL_RANKS, "agent", directory, AGAIN), directory)
    assert again.outcome == "finished", again.log
    ranks_trials.check(Trial([first, again]), references.of("ddp.py", ALL_RANKS, PLAN))


@pytest.mark.timeout(200)
@pytest.mark.parametrize("how", ["torchrun", pytest.param("lastcall run", marks=pytest.mark.slow)])
def test_ranks_whose_torchrun_is_killed_save_and_stop(
    launcher: Launcher, references: References, how: str
) -> None:
    """The store of torchrun is lost with it: without `lastcall run`, they agree through the directory."""
    job = started(launcher, how)
    agent = agent_of(job)
    first = orphaned(launcher, job, agent)
    assert first.codes == {-1: -signal.SIGKILL if how == "torchrun" else ranks_trials.SAVED}, first.log
    check_saved_and_resumed(launcher, references, first, f"torchrun (process {agent}) is gone")


@pytest.mark.timeout(200)
@pytest.mark.parametrize("restarts", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_ranks_whose_lastcall_run_is_killed_save_and_stop(
    launcher: Launcher, references: References, restarts: int
) -> None:
    """And torchrun with them, which lives: whatever it starts again finds that nobody is there, too."""
    job = started(launcher, "lastcall run", "--max-restarts", str(restarts))
    (top,) = job.launchers
    first = orphaned(launcher, job, top.pid)
    assert f"The launcher (process {top.pid}) is gone: this process is an orphan" in first.log
    reason = f"the launcher (process {top.pid}) is gone"
    if not restarts:
        check_saved_and_resumed(launcher, references, first, reason)
        return
    assert {record["reason"] for record in first.committed} == {reason}
    directory = launcher.folder / "run"
    again = ranks_trials.live(launcher.launch("ddp.py", ALL_RANKS, "agent", directory, AGAIN), directory)
    ranks_trials.check_end(again, references.of("ddp.py", ALL_RANKS, PLAN), lambda: first.log + again.log)


@pytest.mark.timeout(200)
@pytest.mark.parametrize("above", ["lastcall run", "a shell"])
def test_a_process_alone_stops_without_its_launcher_and_goes_on_without_its_shell(
    launcher: Launcher, references: References, above: str
) -> None:
    directory = launcher.folder / "run"
    train = [sys.executable, str(SCRIPTS / "ddp.py"), str(directory)]
    command = (
        [*LASTCALL_RUN, *train] if above == "lastcall run" else ["sh", "-c", '"$@" & wait', "sh", *train]
    )
    job = launcher.launch_all([command], 1, PLAN)
    assert job.until(0, "at", 5), job.log()
    job.launchers[0].kill()
    job.until_true(lambda: not left_of(job), "the end of the training")
    (record,) = ranks_trials.records(directory)
    if above == "a shell":
        assert (record["kind"], record["step"]) == ("final", PLAN.steps), job.log()
        return
    assert record["reason"] == f"the launcher (process {job.launchers[0].pid}) is gone", job.log()
    again = ranks_trials.live(launcher.launch("ddp.py", 1, "alone", directory, AGAIN), directory)
    assert again.outcome == "finished", again.log
    assert again.began(0) == record["step"]
    ranks_trials.check_end(again, references.of("ddp.py", 1, PLAN), lambda: again.log)


@pytest.mark.parametrize("finished", [False, True], ids=["which still runs", "which has finished"])
@pytest.mark.parametrize("how", ["alone", pytest.param("agent", marks=pytest.mark.slow)])
def test_a_former_incarnation_that_wakes_up_commits_nothing_into_the_next_one(
    launcher: Launcher, references: References, how: str, finished: bool
) -> None:
    directory = launcher.folder / "run"
    plan = Plan(steps=40, seconds=0.02)
    former = launcher.launch("ddp.py", 3, how, directory, plan)
    assert former.until(1, "at", 5), former.log()
    for rank in range(3):
        assert former.send(rank, signal.SIGSTOP).arrived
    former.send(0, signal.SIGKILL)
    former.until_true(lambda: former.codes()[0] is not None, "the end of rank 0, and of its lock")
    following = launcher.launch("ddp.py", 3, how, directory, plan)
    assert following.until(0, "done" if finished else "at", -1 if finished else 2), following.log()
    for rank in (1, 2):
        assert former.send(rank, signal.SIGCONT).arrived
    old = ranks_trials.live(former, directory)
    new = ranks_trials.live(following, directory)
    assert 0 not in old.codes.values(), old.log
    assert "a later incarnation of this run owns the directory" in old.log
    assert [record["kind"] for record in ranks_trials.records(directory)] == ["final"], (
        f"{old.log}\n{new.log}"
    )
    assert new.outcome == "finished", new.log
    ranks_trials.check_end(new, references.of("ddp.py", 3, plan), lambda: new.log)
