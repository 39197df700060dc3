"""examples/ray_vanilla.py, as it is."""

from __future__ import annotations

import json
import os
import re
import signal
from pathlib import Path

import pytest

from helpers.processes.forkserver import ROOT
from helpers.ray.cluster import Cluster
from helpers.ray.runs import PROTECTED, QUICK

# test_shapes has the same loop, with two workers instead of four
pytestmark = [pytest.mark.timeout(600), pytest.mark.slow]


def test_the_vanilla_example_survives_a_signal_to_one_of_its_workers(
    cluster: Cluster, tmp_path: Path
) -> None:
    env = {**QUICK, **PROTECTED, "LASTCALL_RUN_ID": "vanilla", "HOME": str(tmp_path)}
    driver = cluster.run(ROOT / "examples" / "ray_vanilla.py", **env)
    snapshot = tmp_path / "ray_results" / "vanilla" / "checkpoint_manager_snapshot.json"
    driver.until(snapshot.exists, "a checkpoint")
    pids = re.findall(r"pid=(\d+)\) world_rank=", driver.said())
    assert len(pids) == 4
    os.kill(int(pids[2]), signal.SIGTERM)
    assert driver.wait() == 0, driver.said()[-8000:]
    said = driver.said()
    assert "JIT checkpoint completed in" in said
    assert said.count("Source: preemption") == 1
    epochs = [result["metrics"]["epoch"] for result in json.loads(snapshot.read_text())["checkpoint_results"]]
    assert sorted(set(epochs) - set(range(0, 100, 10))), "nothing was saved between the periodic checkpoints"
