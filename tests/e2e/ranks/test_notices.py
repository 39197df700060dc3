"""Any subset of ranks gets the notice, at any moment, once or more often: all save one step, nobody hangs,
and nothing is lost.

LASTCALL_TEST_TRIALS=200 tries so many; LASTCALL_TEST_SEED=N begins with another seed.
"""

from __future__ import annotations

import os
import random
from dataclasses import dataclass
from pathlib import Path

import pytest

from helpers.processes.forkserver import Nursery
from helpers.ranks import trials as ranks_trials
from helpers.ranks.jobs import Launcher
from helpers.ranks.plan import Plan
from helpers.ranks.trials import References, Strike, Tally, Trial

RANKS, STEPS, QUICKLY = 4, 24, 5
SEED = int(os.environ.get("LASTCALL_TEST_SEED", "1"))
COUNT = int(os.environ.get("LASTCALL_TEST_TRIALS", QUICKLY))
BATCH = 8  # trials in one test, so that no test takes longer than pytest-timeout allows


@dataclass(frozen=True)
class Scenario:
    """One trial: everything that chance decides."""

    script: str
    how: str
    plan: Plan
    strikes: tuple[tuple[Strike, ...], ...]
    kill_wait: float


def scenario(seed: int) -> Scenario:
    dice = random.Random(seed)

    def sometimes(chance: float, most: float) -> dict[int, float]:
        return {dice.randrange(RANKS): dice.uniform(0.0, most)} if dice.random() < chance else {}

    plan = Plan(
        steps=STEPS,
        seconds=dice.choice([0.0, 0.005, 0.02]),
        slow=sometimes(0.3, 0.03),
        late=sometimes(0.2, 0.4),
        tail=sometimes(0.2, 0.3),
        pauses={dice.randrange(STEPS): 0.3} if dice.random() < 0.3 else {},
        accumulate=dice.choice([1, 1, 2]),
        personal=True,
    )
    script, how = dice.choice(["ddp.py", "ddp.py", "manual.py"]), dice.choice(["alone", "agent"])
    # Before protect() a signal is nobody's business but the agent's: without one, the others would wait for a
    # rank that is gone.
    early = how == "agent"
    strikes = tuple(
        (ranks_trials.random_strike(dice, RANKS, plan, early),) for _ in range(dice.choice([1, 1, 2]))
    )
    return Scenario(script, how, plan, strikes, dice.choice([0.0, 0.0, 0.2]))


def attempt(launcher: Launcher, references: References, chosen: Scenario) -> Trial:
    directory = launcher.folder / "run"
    env = {"LASTCALL_KILL_WAIT_SECONDS": str(chosen.kill_wait)}
    trial = ranks_trials.until_finished(
        lambda: launcher.launch(chosen.script, RANKS, chosen.how, directory, chosen.plan, **env),
        directory,
        chosen.strikes,
    )
    ranks_trials.check(trial, references.of(chosen.script, RANKS, chosen.plan))
    if not chosen.kill_wait:
        ranks_trials.check_heard(trial, STEPS)
    return trial


@pytest.fixture(scope="module")
def tally() -> Tally:
    return Tally()


@pytest.mark.timeout(600)
@pytest.mark.parametrize("batch", range(-(-COUNT // BATCH)))
def test_random_notices_leave_no_trace(
    distributed: Nursery, references: References, tally: Tally, tmp_path: Path, batch: int
) -> None:
    for seed in range(SEED + batch * BATCH, SEED + min((batch + 1) * BATCH, COUNT)):
        (tmp_path / str(seed)).mkdir()
        chosen = scenario(seed)
        try:
            tally.add(attempt(Launcher(distributed, tmp_path / str(seed)), references, chosen), STEPS)
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {chosen}\n{error}") from error
        finally:
            distributed.clear()


def test_there_were_saves_and_runs_that_finished_first(tally: Tally) -> None:
    """After the trials above: they would mean little if the notices had come too late, or never too late."""
    print(f"lives that were hit: {dict(tally.outcomes)}")
    if sum(tally.outcomes.values()) < QUICKLY:
        pytest.skip("the trials were not run")
    assert tally.outcomes["saved, inside"] >= COUNT // 2, tally
    if COUNT >= 200:
        assert any(tally.outcomes[f"finished, {where}"] for where in ("inside", "outside")), tally


def saved_once(
    launcher: Launcher, references: References, script: str, plan: Plan, strike: Strike, **env: str
) -> Trial:
    """A single notice that must be heard: one save, and the rest of the run without a trace. Before its first
    step a rank may be ahead of others that have not said yet that they are there."""
    directory = launcher.folder / "run"
    trial = ranks_trials.until_finished(
        lambda: launcher.launch(script, RANKS, "agent", directory, plan, **env), directory, [[strike]]
    )
    assert [life.outcome for life in trial.lives] == ["saved", "finished"], trial.story()
    assert strike.step == 0 or trial.lives[0].inside(trial.lives[0].sent[0], plan.steps), trial.story()
    ranks_trials.check(trial, references.of(script, RANKS, plan))
    return trial


@pytest.mark.parametrize("target", [pytest.param(0, marks=pytest.mark.smoke), 3])
def test_a_notice_on_one_rank_stops_all(launcher: Launcher, references: References, target: int) -> None:
    plan = Plan(steps=STEPS, slow={1: 0.02})
    saved_once(launcher, references, "ddp.py", plan, Strike(target, "at", 6, hits=((target, 0.0),)))


def test_a_notice_before_the_first_step_is_obeyed(launcher: Launcher, references: References) -> None:
    trial = saved_once(
        launcher, references, "ddp.py", Plan(steps=STEPS, seconds=0.05), Strike(2, "at", 0, hits=((2, 0.0),))
    )
    assert trial.lives[0].committed[0]["step"] <= 3


def test_an_evaluation_longer_than_the_grace_does_not_keep_the_ranks_from_saving(
    launcher: Launcher, references: References
) -> None:
    plan = Plan(steps=STEPS, pauses={9: 300.0})
    strike = Strike(1, "evaluating", 9, hits=((1, 0.0),))
    trial = saved_once(launcher, references, "ddp.py", plan, strike, LASTCALL_GRACE_SECONDS="4")
    assert trial.lives[0].committed[0]["step"] == 9


def test_one_rank_that_evaluates_does_not_keep_the_others_from_saving(
    launcher: Launcher, references: References
) -> None:
    """The others wait for it in a collective of the same step."""
    plan = Plan(steps=STEPS, pauses={9: 300.0}, pausing=(2,))
    strike = Strike(2, "evaluating", 9, 0.1, ((0, 0.0),))
    trial = saved_once(launcher, references, "ddp.py", plan, strike, LASTCALL_GRACE_SECONDS="4")
    assert trial.lives[0].committed[0]["step"] == 9


def test_a_rank_that_has_finished_does_not_hold_up_those_that_have_not(
    launcher: Launcher, references: References
) -> None:
    plan = Plan(steps=12, extra={1: 12})
    directory = launcher.folder / "run"
    strikes = [[Strike(1, "at", 16, hits=((1, 0.0),))]]
    trial = ranks_trials.until_finished(
        lambda: launcher.launch("manual.py", RANKS, "agent", directory, plan), directory, strikes
    )
    assert trial.lives[0].outcome == "saved", trial.story()
    expected = references.of("manual.py", RANKS, plan)
    for life in trial.lives:
        ranks_trials.check_data(life, expected)
    ranks_trials.check_end(trial.lives[-1], expected, trial.story)
    assert trial.lives[1].began(1) == trial.lives[0].did(1) > 16


def test_a_rank_that_is_still_importing_is_waited_for(launcher: Launcher, references: References) -> None:
    """The notice comes to the others while one has not come to protect() yet."""
    plan = Plan(steps=STEPS, late={3: 2.0})
    directory = launcher.folder / "run"
    strikes = [[Strike(0, "joined", -1, 0.5, ((0, 0.0), (1, 0.0)))]]
    trial = ranks_trials.until_finished(
        lambda: launcher.launch("ddp.py", RANKS, "agent", directory, plan), directory, strikes
    )
    # lost: they had not come to protect() either
    assert trial.lives[0].outcome in ("saved", "lost"), trial.story()
    ranks_trials.check(trial, references.of("ddp.py", RANKS, plan))
