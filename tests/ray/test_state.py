"""Scripts without a save: what the optimizers hold is kept in a format of ours, and put back where it fits."""

from __future__ import annotations

from pathlib import Path

import pytest
import task

from helpers import ray_runs
from helpers.ray_cluster import Cluster
from helpers.ray_runs import Run, one_worker

pytestmark = [pytest.mark.timeout(600), pytest.mark.slow]


def told_once(cluster: Cluster, run: Run) -> str:
    run.start(cluster)
    run.until_step(6)
    one_worker(run)
    run.until_life(2)
    return run.finish()


def test_a_script_that_saves_nothing_finds_its_weights_again(cluster: Cluster, tmp_path: Path) -> None:
    run = Run(tmp_path, "nosave")
    said = told_once(cluster, run)
    first, second = run.lives()
    last = {step["digest"] for step in first.steps if step["updates"] == first.reached}
    assert {start["digest"] for start in second.starts} == last
    assert min(step["updates"] for step in second.steps) == first.reached + 1, "the optimizer began anew"
    assert "Not restored: the script's own counts" in said
    assert run.folders() == [], "the script would be given a checkpoint that it does not know"


def test_what_protect_names_goes_on_exactly(cluster: Cluster, tmp_path: Path) -> None:
    run = Run(tmp_path, "named")
    said = told_once(cluster, run)
    ray_runs.assert_nothing_lost(run, said, task.reference(120, world=2))
