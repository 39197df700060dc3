"""The examples of the announcement of JIT checkpointing for Ray Train, as they are written there, on a real
cluster."""

from __future__ import annotations

import json
import os
import re
import signal
from pathlib import Path

import pytest
import task

from helpers.ray import runs as ray_runs
from helpers.ray.cluster import Cluster
from helpers.ray.runs import QUICK, SCRIPTS, Run, one_worker

pytestmark = pytest.mark.timeout(600)


def test_e1_the_complete_example_runs_as_written_and_survives_a_signal_to_one_of_its_workers(
    cluster: Cluster, tmp_path: Path
) -> None:
    """Not one variable is set: it asks in its code."""
    driver = cluster.run(SCRIPTS / "announced.py", **QUICK, HOME=str(tmp_path))
    snapshots = tmp_path / "ray_results"
    driver.until(lambda: bool(list(snapshots.glob("*/checkpoint_manager_snapshot.json"))), "a checkpoint")
    pids = re.findall(r"pid=(\d+)\) world_rank=", driver.said())
    assert len(pids) == 4
    os.kill(int(pids[2]), signal.SIGTERM)
    assert driver.wait() == 0, driver.said()[-8000:]
    said = driver.said()
    assert (
        "SIGTERM received, initiating JIT checkpoint in 3.0s" in said
        and "JIT checkpoint completed in" in said
    )
    assert "DeprecationWarning: RunConfig(jit_checkpoint_config=...) is deprecated" in said
    assert said.count("Source: preemption") == 1
    (snapshot,) = snapshots.glob("*/checkpoint_manager_snapshot.json")
    epochs = [result["metrics"]["epoch"] for result in json.loads(snapshot.read_text())["checkpoint_results"]]
    assert set(range(0, 100, 10)) <= set(epochs) and len(epochs) == len(set(epochs)), (
        "an epoch was left out, or trained twice"
    )
    (record,) = snapshot.parent.glob(".lastcall/checkpoint_*.json")
    assert json.loads(record.read_text())["reason"] == "SIGTERM"


def test_e1_the_configuration_in_code_yields_to_the_variables(cluster: Cluster, tmp_path: Path) -> None:
    run = Run(tmp_path, "announced_before")
    run.start(cluster)  # with a kill wait of 0.5 s
    run.until_step(6)
    one_worker(run)
    run.until_life(2)
    said = run.finish()
    ray_runs.assert_nothing_lost(run, said, task.reference_of_seed(40))
    assert "SIGTERM received, initiating JIT checkpoint in 0.5s" in said and "is deprecated" in said
