"""Scripts as people write them, each told to stop once: their own save is run, their own code resumes, and no
step is lost."""

from __future__ import annotations

from pathlib import Path

import pytest
import task

from helpers.ray import runs as ray_runs
from helpers.ray.cluster import Cluster
from helpers.ray.runs import NODES, NOTICES, Run

STEPS = 120
SHAPES = {  # those with a notice are tried with it in CI; all with all of them by make e2e-ray
    "seed": "one worker",
    "helper": "node",
    "prebuilt": "",
    "steps": "autoscaler",
    "trainer_class": "",
    "rank_zero": "all workers",
    "json_beside": "",
    "should_checkpoint": "",  # test_head has it
    "inverted": "",
    "timed": "",
}
POOL = "pool"
pytestmark = pytest.mark.timeout(600)


def pairs() -> list[object]:
    return [
        pytest.param(
            shape, notice, marks=[] if notice == usual else [pytest.mark.slow], id=f"{shape}-{notice}"
        )
        for shape, usual in SHAPES.items()
        for notice in NOTICES
    ]


@pytest.fixture(scope="session")
def reference() -> list[str]:
    return task.reference(STEPS, world=2)


@pytest.fixture(scope="session")
def reference_of_seed() -> list[str]:
    return task.reference_of_seed(40)


@pytest.mark.parametrize(("shape", "notice"), pairs())
def test_a_script_that_was_told_to_stop_goes_on_with_its_own_code_and_loses_nothing(
    cluster: Cluster,
    tmp_path: Path,
    shape: str,
    notice: str,
    reference: list[str],
    reference_of_seed: list[str],
) -> None:
    if notice in NODES:
        # one for each rank, and one that takes the place of the one that goes
        while len(cluster.free(POOL)) < 3:
            cluster.add(1, pool=1)
    options = ("--resource", POOL) if notice in NODES else ()
    run = Run(tmp_path, shape, *options)
    run.start(cluster)
    run.until_step(6)
    NOTICES[notice](run)
    run.until_life(2)
    said = run.finish()
    ray_runs.assert_nothing_lost(run, said, reference_of_seed if shape == "seed" else reference)
    if notice in ("one worker", "all workers"):
        assert "SIGTERM received, initiating JIT checkpoint in 0.5s" in said
