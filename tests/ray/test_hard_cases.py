"""A rank that dies between the notice and the save, storage of other kinds, two runs beside each other."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
import task

from helpers.ray import runs as ray_runs
from helpers.ray.cluster import Cluster
from helpers.ray.runs import Run, all_workers, one_worker

pytestmark = pytest.mark.timeout(600)


@pytest.mark.slow
def test_a_rank_that_dies_after_the_notice_does_not_keep_the_others_from_saving(
    cluster: Cluster, tmp_path: Path
) -> None:
    """The ranks of the seed's script train each for itself, so that the others can go on without it."""
    run = Run(tmp_path, "seed", RAY_TRAIN_JIT_CHECKPOINT_KILL_WAIT="3")
    run.start(cluster)
    run.until_step(6)
    all_workers(run)
    run.driver.until(lambda: "SIGTERM received" in run.driver.said(), "the notice in the log")
    os.kill(run.pids()[1], signal.SIGKILL)
    run.until_life(2)
    said = run.finish()
    first, second = run.lives()
    reference = task.reference_of_seed(40)
    assert {start["digest"] for start in second.starts} == {reference[second.began_at]}
    assert first.reached == second.began_at >= 6, "the one that lived did steps after its save, or had none"
    assert (
        "JIT checkpoint completed without rank 1" in said and "could not commit with the controller" in said
    )
    assert {end["digest"] for end in second.ends} == {reference[-1]}
    assert said.count("Source: preemption") == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    "options", [("--keep", 1), ("--upload", "async"), ("--bucket", "yes")], ids=["keep", "async", "bucket"]
)
def test_where_checkpoints_go_makes_no_difference(
    cluster: Cluster, tmp_path: Path, options: tuple[str, object]
) -> None:
    run = Run(tmp_path, "uploads", *options)
    run.start(cluster)
    run.until_step(6)
    one_worker(run)
    run.until_life(2)
    said = run.finish()
    ray_runs.assert_nothing_lost(run, said, task.reference(120, world=2))
    if "--keep" in options:
        assert len(run.folders()) == 1


@pytest.mark.slow
@pytest.mark.parametrize("notice", [one_worker, all_workers])
def test_batches_of_ray_data_make_no_difference(
    cluster: Cluster, tmp_path: Path, notice: Callable[[Run], None]
) -> None:
    run = Run(tmp_path, "ingest")
    run.start(cluster)
    run.until_step(8)
    notice(run)
    run.until_life(2)
    ray_runs.assert_nothing_lost(run, run.finish(), task.reference(120, world=2))
    assert run.lives()[-1].began_at % 6 == 0, "Ray Data begins an epoch at its beginning"


@pytest.mark.slow
def test_two_runs_on_one_cluster_do_not_hear_each_others_notices(cluster: Cluster, tmp_path: Path) -> None:
    told, other = (Run(tmp_path / name, "steps", "--save_every", 10_000) for name in ("told", "other"))
    for run in (told, other):
        run.folder.mkdir()
        run.start(cluster)
    for run in (told, other):
        run.until_step(6)
    all_workers(told)
    told.until_life(2)
    said = told.finish()
    ray_runs.assert_nothing_lost(told, said, task.reference(120, world=2))
    assert "JIT checkpoint" not in other.finish()
    assert len(other.lives()) == 1


@pytest.mark.slow
def test_e8_a_run_inside_a_trial_of_tune_is_protected_where_the_driver_alone_has_the_variables(
    cluster: Cluster, tmp_path: Path
) -> None:
    run = Run(tmp_path, "tuned")
    run.start(cluster)
    run.until_step(6)
    one_worker(run)
    run.until_life(2)
    ray_runs.assert_nothing_lost(run, run.finish(), task.reference_of_seed(30))
