"""A rank is killed, crashes, raises or freezes: the others save what they hold, and the run goes on with at
most one step lost.

LASTCALL_TEST_TRIALS=60 tries so many below the real `lastcall run -- torchrun`, and four times as many with
forked ranks.
"""

from __future__ import annotations

import dataclasses
import os
import random
import signal
from pathlib import Path

import pytest

from helpers.processes.forkserver import Nursery
from helpers.ranks import trials as ranks_trials
from helpers.ranks.jobs import Launcher
from helpers.ranks.plan import Fault, Plan
from helpers.ranks.trials import References, Strike

PLAN = Plan(steps=24, seconds=0.01)
SEED = int(os.environ.get("LASTCALL_TEST_SEED", "1"))
ASKED = os.environ.get("LASTCALL_TEST_TRIALS")
REAL, FORKED = (int(ASKED), 4 * int(ASKED)) if ASKED else (1, 4)
BATCH = 8
LEAVE = {"LASTCALL_HANG_SECONDS": "2", "LASTCALL_ON_HANG": "exit"}


# ---- forked ranks, and an agent that does what torchrun does -----------------------------------------------


def survive(
    launcher: Launcher,
    references: References,
    script: str,
    ranks: int,
    plan: Plan,
    *strikes: Strike,
    **env: str,
) -> None:
    """One death, one more life, and no trace."""
    directory = launcher.folder / "run"
    start = lambda: launcher.launch(script, ranks, "agent", directory, plan, **env)  # noqa: E731
    trial = ranks_trials.until_finished(start, directory, [strikes])
    first = trial.lives[0]
    assert first.committed, f"the survivors saved nothing\n{trial.story()}"
    assert len(trial.lives) == 2, trial.story()
    assert 0 not in first.codes.values(), f"a survivor claims to have finished\n{trial.story()}"
    ranks_trials.check(trial, references.of(script, ranks, plan), most_lost=1)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("batch", range(-(-FORKED // BATCH)))
def test_a_kill_at_any_moment_costs_at_most_one_step(
    distributed: Nursery, references: References, tmp_path: Path, batch: int
) -> None:
    for seed in range(SEED + batch * BATCH, SEED + min((batch + 1) * BATCH, FORKED)):
        dice = random.Random(seed)
        ranks, script = dice.choice([2, 4]), dice.choice(["ddp.py", "ddp.py", "manual.py"])
        victim = dice.randrange(ranks)
        strike = Strike(
            victim,
            "at",
            dice.randint(1, PLAN.steps - 4),
            dice.uniform(0.0, 0.05),
            ((victim, 0.0),),
            signal.SIGKILL,
        )
        plan = dataclasses.replace(PLAN, accumulate=dice.choice([1, 1, 3]))
        (tmp_path / str(seed)).mkdir()
        try:
            survive(Launcher(distributed, tmp_path / str(seed)), references, script, ranks, plan, strike)
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {ranks} ranks, {script}, {strike}\n{error}") from error
        finally:
            distributed.clear()


@pytest.mark.parametrize(
    ("kind", "where"),
    [
        ("kill", "forward"),
        ("exception", "inside"),
        ("exception", "end"),
        *(
            pytest.param(*each, marks=pytest.mark.slow)
            for each in [("kill", "inside"), ("kill", "end"), ("exception", "forward")]
        ),
        *(pytest.param("segfault", where, marks=pytest.mark.slow) for where in ("forward", "inside", "end")),
    ],
)
def test_a_rank_that_ends_itself_costs_at_most_one_step(
    launcher: Launcher, references: References, kind: str, where: str
) -> None:
    """Also inside optimizer.step(), where its own parameters are half of one step and half of the next."""
    survive(launcher, references, "ddp.py", 2, dataclasses.replace(PLAN, fault=Fault(kind, 1, 9, where)))


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_is_killed_in_the_last_step_costs_at_most_that(
    launcher: Launcher, references: References, rank: int
) -> None:
    """The others have finished, and wait for its part of the final checkpoint."""
    survive(
        launcher,
        references,
        "ddp.py",
        2,
        dataclasses.replace(PLAN, fault=Fault("kill", rank, PLAN.steps - 1, "end")),
    )


def test_what_only_the_dead_rank_knew_is_said_to_be_lost(launcher: Launcher, references: References) -> None:
    directory = launcher.folder / "run"
    plan = dataclasses.replace(PLAN, personal=True, fault=Fault("kill", 1, 9, "inside"))
    first, last = (
        ranks_trials.live(launcher.launch("ddp.py", 2, "agent", directory, plan), directory) for _ in range(2)
    )
    (record,) = first.committed
    assert not record["exact"]
    assert "'progress'" in record["because"]
    expected = references.of("ddp.py", 2, plan).final
    ends = {rank: lines[-1].state for rank, lines in last.journals.items()}
    assert {rank: state["parameters"] for rank, state in ends.items()} == {
        rank: state["parameters"] for rank, state in expected.items()
    }
    assert ends[0] == expected[0]
    assert ends[1]["progress"] != expected[1]["progress"]


def test_a_frozen_rank_is_noticed_and_costs_at_most_one_step(
    launcher: Launcher, references: References
) -> None:
    """Nothing ends it but the agent's SIGKILL, which comes here when the others have left."""
    directory = launcher.folder / "run"
    plan = dataclasses.replace(PLAN, fault=Fault("stop", 1, 9))
    job = launcher.launch("ddp.py", 4, "agent", directory, plan, **LEAVE)
    others = [0, 2, 3]
    job.until_true(lambda: None not in [job.codes()[rank] for rank in others], "the end of the others")
    job.send(1, signal.SIGKILL)
    first = ranks_trials.live(job, directory, fresh=True)
    assert first.committed, first.log
    assert "rank 1" in first.log
    again = ranks_trials.live(launcher.launch("ddp.py", 4, "agent", directory, plan, **LEAVE), directory)
    ranks_trials.check(ranks_trials.Trial([first, again]), references.of("ddp.py", 4, PLAN), most_lost=1)


def test_a_rank_that_was_frozen_for_a_while_goes_on_with_the_others(
    launcher: Launcher, references: References
) -> None:
    """on_hang="save": the others save, nobody leaves, and nothing shows in the end."""
    directory = launcher.folder / "run"
    plan = dataclasses.replace(PLAN, fault=Fault("stop", 1, 9))
    job = launcher.launch("ddp.py", 2, "agent", directory, plan, LASTCALL_HANG_SECONDS="2")
    job.until_true(lambda: bool(ranks_trials.records(directory)), "the checkpoint of the others")
    job.send(1, signal.SIGCONT)
    life = ranks_trials.live(job, directory, fresh=True)
    assert life.outcome == "finished", life.log
    assert [record["kind"] for record in life.committed] == ["survivors", "final"], life.log
    ranks_trials.check_end(life, references.of("ddp.py", 2, PLAN), lambda: life.log)


# ---- the real thing ----------------------------------------------------------------------------------------


def resumed_by_itself(
    launcher: Launcher, references: References, ranks: int, plan: Plan, *strikes: Strike, **env: str
) -> None:
    """Below the real `lastcall run -- torchrun`: one start, which ends well."""
    directory = launcher.folder / "run"
    job = launcher.launch("ddp.py", ranks, "lastcall run", directory, plan, "--max-restarts", "3", **env)
    life = ranks_trials.live(job, directory, strikes, limit=150.0)
    assert life.codes == {-1: 0}, life.log
    first, *others = ranks_trials.incarnations(life.journals)
    assert len(others) == 1, f"started again {len(others)} times\n{life.log}"
    expected = references.of("ddp.py", ranks, plan)
    ranks_trials.check_data(life, expected)
    ranks_trials.check_steps(first, others[0], most_lost=1)
    assert others[0].began(0), f"it began from nothing\n{life.log}"
    ranks_trials.check_end(life, expected, lambda: life.log)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("seed", range(SEED, SEED + REAL))
def test_torchrun_below_lastcall_run_goes_on_after_a_kill(
    launcher: Launcher, references: References, seed: int
) -> None:
    dice = random.Random(seed)
    ranks = [2, 4][seed % 2]
    victim = dice.randrange(ranks)
    strike = Strike(
        victim,
        "at",
        dice.randint(1, PLAN.steps - 4),
        dice.uniform(0.0, 0.05),
        ((victim, 0.0),),
        signal.SIGKILL,
    )
    resumed_by_itself(launcher, references, ranks, PLAN, strike)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("kind", ["exception", "segfault", "stop"] if ASKED else ["exception"])
def test_torchrun_below_lastcall_run_goes_on_after_a_fault(
    launcher: Launcher, references: References, kind: str
) -> None:
    plan = dataclasses.replace(PLAN, fault=Fault(kind, 1, 9))
    resumed_by_itself(launcher, references, 2, plan, **LEAVE)
