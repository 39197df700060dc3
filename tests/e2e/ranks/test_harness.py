"""The harness itself: references agree however they are made, and what it is there to find is found."""

from __future__ import annotations

import dataclasses
import signal

import pytest

from helpers.ranks import jobs as ranks_jobs
from helpers.ranks import trials as ranks_trials
from helpers.ranks.jobs import Launcher
from helpers.ranks.plan import Fault, Plan
from helpers.ranks.trials import References, Strike

PLAN = Plan(steps=12, personal=True)


@pytest.mark.slow
def test_a_run_is_the_same_however_it_is_started_and_slowed_down(
    launcher: Launcher, references: References
) -> None:
    plan = dataclasses.replace(
        PLAN, seconds=0.002, slow={1: 0.01}, late={2: 0.1}, tail={0: 0.1}, pauses={5: 0.05}
    )
    expected = references.of("ddp.py", 4, PLAN)
    job = launcher.launch("ddp.py", 4, "agent", launcher.folder / "run", plan, LASTCALL_ENABLED="0")
    life = ranks_trials.live(job, launcher.folder / "run")
    assert life.outcome == "finished", life.log
    ranks_trials.check_data(life, expected)
    ranks_trials.check_end(life, expected, lambda: life.log)
    assert len({state["parameters"] for state in expected.final.values()}) == 1  # one model
    assert len({state["buffers"] for state in expected.final.values()}) == 4  # and everybody's own statistics
    assert len({state["progress"] for state in expected.final.values()}) == 4  # of everybody's own samples


@pytest.mark.slow
def test_torchrun_makes_the_same_run(launcher: Launcher, references: References) -> None:
    job = launcher.launch("ddp.py", 2, "torchrun", launcher.folder / "run", PLAN, LASTCALL_ENABLED="0")
    life = ranks_trials.live(job, launcher.folder / "run")
    assert life.codes == {-1: 0}, life.log
    expected = references.of("ddp.py", 2, PLAN)
    ranks_trials.check_data(life, expected)
    ranks_trials.check_end(life, expected, lambda: life.log)


@pytest.mark.parametrize(("script", "plan"), [("ddp.py", PLAN), ("manual.py", PLAN), ("fsdp.py", PLAN)])
def test_one_rank_is_interrupted_and_ends_the_same(
    launcher: Launcher, references: References, script: str, plan: Plan
) -> None:
    directory = launcher.folder / "run"
    strikes = [[Strike(0, "at", 3)], [Strike(0, "at", 8, hits=((0, 0.0), (0, 0.0)))]]
    trial = ranks_trials.until_finished(
        lambda: launcher.launch(script, 1, "alone", directory, plan), directory, strikes
    )
    ranks_trials.check(trial, references.of(script, 1, plan))
    ranks_trials.check_heard(trial, plan.steps)
    assert [life.outcome for life in trial.lives] == ["saved", "saved", "finished"]


def test_a_notice_that_is_lost_is_found(launcher: Launcher) -> None:
    directory = launcher.folder / "run"
    strikes = [[Strike(1, "at", 2, hits=((1, 0.0),))]]
    start = lambda: launcher.launch("ddp.py", 2, "agent", directory, PLAN, LASTCALL_ENABLED="0")  # noqa: E731
    trial = ranks_trials.until_finished(start, directory, strikes)
    assert trial.lives[0].outcome == "lost"
    with pytest.raises(AssertionError, match="a notice was lost"):
        ranks_trials.check_heard(trial, PLAN.steps)


def test_a_deadlock_is_found_with_its_stacks(launcher: Launcher) -> None:
    plan = dataclasses.replace(PLAN, fault=Fault("stop", 1, 4))
    job = launcher.launch("ddp.py", 2, "alone", launcher.folder / "run", plan, LASTCALL_ENABLED="0")
    assert job.until(1, "fault")
    with pytest.raises(ranks_jobs.Deadlock, match="not over after 1.0 s") as caught:
        job.wait(limit=1.0)
    assert "in backward" in str(caught.value)


@pytest.mark.parametrize(
    ("kind", "code"), [("kill", -signal.SIGKILL), ("segfault", -signal.SIGSEGV), ("exception", 1)]
)
def test_a_fault_strikes_once(launcher: Launcher, references: References, kind: str, code: int) -> None:
    directory = launcher.folder / "run"
    plan = dataclasses.replace(PLAN, fault=Fault(kind, 1, 4, "inside"))
    start = lambda: launcher.launch("ddp.py", 2, "agent", directory, plan, LASTCALL_ENABLED="0")  # noqa: E731
    trial = ranks_trials.until_finished(start, directory, [])
    assert trial.lives[0].codes[1] == code, trial.story()
    assert trial.lives[0].did(1) == 4
    assert len(trial.lives) == 2
    ranks_trials.check_end(trial.lives[-1], references.of("ddp.py", 2, PLAN), trial.story)
