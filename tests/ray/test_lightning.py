"""Lightning under Ray is never worse with lastcall than without."""

from __future__ import annotations

from pathlib import Path

import pytest

from helpers.ray.cluster import Cluster
from helpers.ray.runs import Run, one_worker

LONG = {"LASTCALL_GRACE_SECONDS": "60"}
SHORTER = ("--epochs", 4)
SHORT = {"LASTCALL_GRACE_SECONDS": "4"}  # less than an epoch
pytestmark = pytest.mark.timeout(900)


@pytest.fixture(scope="module")
def undisturbed(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> set[str]:
    run = Run(tmp_path_factory.mktemp("undisturbed"), "lightning_epochs", *SHORTER, "--pause", 0)
    run.start(cluster, RAY_TRAIN_JIT_CHECKPOINT_ENABLED="0")
    run.finish()
    return {end["digest"] for end in run.lives()[-1].ends}


@pytest.mark.parametrize(
    "grace", [pytest.param(LONG, id="long"), pytest.param(SHORT, id="short", marks=pytest.mark.slow)]
)
def test_b5_a_run_of_lightning_goes_on_from_its_own_checkpoint_and_ends_as_ever(
    cluster: Cluster, tmp_path: Path, grace: dict[str, str], undisturbed: set[str]
) -> None:
    run = Run(
        tmp_path, "lightning_epochs", *SHORTER, "--pause", 1, RAY_TRAIN_JIT_CHECKPOINT_KILL_WAIT="0", **grace
    )
    run.start(cluster)
    run.until_step(8)  # of six in an epoch
    one_worker(run)
    run.until_life(2)
    said = run.finish()
    _, second = run.lives()
    assert (
        second.began_at == (12 if grace is LONG else 6)
        and {end["digest"] for end in second.ends} == undisturbed
    )
    assert "cannot make lightning's Trainer save" in said
    assert ("JIT checkpoint completed in" in said) is (grace is LONG)
    assert not list((run.experiment / ".lastcall").glob("state-*"))
