"""Many preemptions in one run, with the default FailureConfig, which allows no failure at all."""

from __future__ import annotations

from pathlib import Path

import pytest
import task

from helpers.ray.cluster import Cluster
from helpers.ray.runs import Run, all_workers, one_worker

pytestmark = pytest.mark.timeout(3000)


@pytest.mark.slow
@pytest.mark.parametrize("times", [3, 20])
def test_every_restart_is_booked_on_the_budget_for_preemptions(
    cluster: Cluster, tmp_path: Path, times: int
) -> None:
    run = Run(
        tmp_path,
        "steps",
        "--steps",
        12 * times + 40,
        "--save_every",
        10_000,
        RAY_TRAIN_JIT_CHECKPOINT_KILL_WAIT="0",
    )
    run.start(cluster)
    for number in range(1, times + 1):
        run.until_life(number)
        run.until_step(run.lives()[-1].began_at + 2, life=number)
        (one_worker if number % 2 else all_workers)(run)
    run.until_life(times + 1)
    said = run.finish()
    lives = run.lives()
    assert [life.reached for life in lives[:-1]] == [life.began_at for life in lives[1:]]
    assert {end["digest"] for end in lives[-1].ends} == {task.reference(12 * times + 40, world=2)[-1]}
    assert said.count("Source: preemption") == times
    assert said.count("Source: worker group") == said.count("Source: controller") == 0
