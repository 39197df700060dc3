"""The whole cluster is taken away, the head with it. A new job on a new cluster goes on: all that lasts is
the storage."""

from __future__ import annotations

from pathlib import Path

import pytest
import task

from helpers.ray import runs as ray_runs
from helpers.ray.cluster import Cluster
from helpers.ray.runs import Run

pytestmark = pytest.mark.timeout(600)


@pytest.mark.slow
@pytest.mark.parametrize("shape", ["should_checkpoint", "trainer_class"])
def test_when_the_head_goes_too_a_new_job_on_a_new_cluster_goes_on(tmp_path: Path, shape: str) -> None:
    run = Run(tmp_path, shape)
    with Cluster(cpus=4) as first:
        run.start(first)
        run.until_step(6)
        for node in first.nodes:
            node.terminate()
        for node in first.nodes:
            node.wait()
        said = run.driver.said()
    with Cluster(cpus=4) as second:
        run.start(second)
        said += run.finish()
    ray_runs.assert_nothing_lost(run, said, task.reference(120, world=2))
