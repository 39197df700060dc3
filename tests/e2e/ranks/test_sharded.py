"""FSDP2 and HSDP: what one world saves, others of one, two and four ranks go on from, with the very same
parameters and moments."""

from __future__ import annotations

import dataclasses
import shutil
import signal
from collections.abc import Mapping

import pytest

from helpers.ranks import trials as ranks_trials
from helpers.ranks.jobs import Launcher
from helpers.ranks.plan import Plan
from helpers.ranks.trials import Reference, References, Strike

PLAN = Plan(steps=12, seconds=0.01, digests=True)
HYBRID = dataclasses.replace(PLAN, mesh="hybrid")


def quiet(plan: Plan) -> Plan:
    return dataclasses.replace(plan, digests=False)


def state_of(expected: Reference, step: int) -> Mapping[str, str]:
    """All that FSDP shares between the ranks: the same on each."""
    return expected.states[0, step]


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("ranks", "plan"), [(2, PLAN), (4, HYBRID)], ids=["fsdp on 2", "hsdp on 2x2"])
def test_a_sharded_run_is_resumed_on_one_two_and_four_ranks(
    launcher: Launcher, references: References, ranks: int, plan: Plan
) -> None:
    directory = launcher.folder / "run"
    expected = references.of("fsdp.py", ranks, plan)
    strike = Strike(1, "at", 4, hits=((1, 0.0),))
    first = ranks_trials.live(
        launcher.launch("fsdp.py", ranks, "agent", directory, quiet(plan)), directory, [strike]
    )
    assert first.outcome == "saved", first.log
    step = first.committed[0]["step"]
    for world, shape in ((1, PLAN), (2, PLAN), (4, PLAN), (4, HYBRID)):
        copy = launcher.folder / f"on-{world}-{shape.mesh}"
        shutil.copytree(directory, copy)
        life = ranks_trials.live(launcher.launch("fsdp.py", world, "agent", copy, quiet(shape)), copy)
        assert life.outcome == "finished", life.log
        for rank, lines in life.journals.items():
            (restored,) = (event for event in lines if event.what == "protected")
            assert restored.step == step
            assert restored.state == state_of(expected, step), (
                f"rank {rank} of {world} has another state\n{life.log}"
            )
        if (world, shape) == (ranks, plan):
            ranks_trials.check_data(life, expected)
            ranks_trials.check_end(life, expected, lambda life=life: life.log)  # type: ignore[misc]


@pytest.mark.parametrize("accumulate", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_a_sharded_run_that_is_interrupted_twice_ends_the_same(
    launcher: Launcher, references: References, accumulate: int
) -> None:
    plan = dataclasses.replace(quiet(PLAN), accumulate=accumulate)
    directory = launcher.folder / "run"
    strikes = [[Strike(0, "at", 3, hits=((1, 0.0),))], [Strike(1, "at", 7, 0.01, ((0, 0.0), (1, 0.0)))]]
    trial = ranks_trials.until_finished(
        lambda: launcher.launch("fsdp.py", 2, "agent", directory, plan), directory, strikes
    )
    assert [life.outcome for life in trial.lives] == ["saved", "saved", "finished"], trial.story()
    ranks_trials.check(trial, references.of("fsdp.py", 2, plan))


@pytest.mark.parametrize(
    "replica",
    [(0, 1), pytest.param((2, 3), marks=pytest.mark.slow), pytest.param((3,), marks=pytest.mark.slow)],
)
def test_one_replica_of_hsdp_is_killed_and_the_other_saves(
    launcher: Launcher, references: References, replica: tuple[int, ...]
) -> None:
    plan = quiet(HYBRID)
    directory = launcher.folder / "run"
    strike = Strike(replica[0], "at", 5, 0.005, tuple((rank, 0.0) for rank in replica), signal.SIGKILL)
    trial = ranks_trials.until_finished(
        lambda: launcher.launch("fsdp.py", 4, "agent", directory, plan), directory, [[strike]]
    )
    assert trial.lives[0].committed, trial.story()
    assert len(trial.lives) == 2, trial.story()
    ranks_trials.check(trial, references.of("fsdp.py", 4, plan), most_lost=1)


def test_plain_fsdp_says_that_survivors_cannot_save_it(launcher: Launcher, references: References) -> None:
    """And begins again from what was committed before: here, from the beginning."""
    plan = quiet(PLAN)
    directory = launcher.folder / "run"
    strike = Strike(1, "at", 5, 0.0, ((1, 0.0),), signal.SIGKILL)
    trial = ranks_trials.until_finished(
        lambda: launcher.launch("fsdp.py", 2, "agent", directory, plan), directory, [[strike]]
    )
    assert not trial.lives[0].committed, trial.story()
    assert "rank 1" in trial.lives[0].log
    ranks_trials.check(trial, references.of("fsdp.py", 2, plan))
