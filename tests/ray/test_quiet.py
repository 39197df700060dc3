"""What is no notice: the end of a run, an error in it, `ray job stop`. And nothing of ours where nobody asked
for it."""

from __future__ import annotations

import json
import os
import shlex
import signal
import sys
from pathlib import Path

import pytest

from helpers.ray.cluster import Cluster, until
from helpers.ray.runs import QUICK, SCRIPTS, Run

pytestmark = pytest.mark.timeout(600)


def test_at_the_normal_end_nothing_is_saved_but_what_the_script_saves(
    cluster: Cluster, tmp_path: Path
) -> None:
    run = Run(tmp_path, "seed", "--epochs", 12)
    run.start(cluster)
    said = run.finish()
    assert len(run.checkpoints()) == len(run.folders()) == 2  # after epochs 0 and 10
    assert len(run.lives()) == 1 and "JIT checkpoint" not in said
    assert run.records() == []


@pytest.mark.slow
def test_an_error_in_the_script_ends_the_run_as_ever(cluster: Cluster, tmp_path: Path) -> None:
    run = Run(tmp_path, "failing")
    run.start(cluster)
    run.hurry()
    assert run.driver.wait() != 0
    said = run.driver.said()
    assert "the ninth step is too much" in said and "JIT checkpoint" not in said
    assert len(run.lives()) == 1 and run.folders() == [] and run.records() == []


@pytest.mark.slow
def test_after_ray_job_stop_there_is_no_checkpoint_that_nobody_asked_for(tmp_path: Path) -> None:
    run = Run(tmp_path, "seed", "--epochs", 1000)
    with Cluster(dashboard=True, cpus=4) as cluster:
        environment = {
            "env_vars": {
                **QUICK,
                "RAY_TRAIN_JIT_CHECKPOINT_ENABLED": "1",
                "RAY_TRAIN_JIT_CHECKPOINT_KILL_WAIT": "0",
            }
        }
        words = (
            sys.executable,
            SCRIPTS / "seed.py",
            "--storage",
            run.storage,
            "--name",
            "exp",
            "--diary",
            run.diary,
            "--epochs",
            1000,
        )
        submit = (
            "job",
            "submit",
            "--no-wait",
            "--submission-id=job-1",
            "--runtime-env-json",
            json.dumps(environment),
            "--",
        )
        until(lambda: cluster.command("job", "list").returncode == 0, lambda: "a dashboard that answers")
        done = cluster.command(*submit, *map(str, words))
        assert done.returncode == 0, done.stdout + done.stderr
        until(
            lambda: bool(run.lines()) and run.lives()[-1].reached >= 14,
            lambda: cluster.command("job", "logs", "job-1").stdout[-4000:],
        )
        pids = run.pids()
        stopped = cluster.command("job", "stop", "job-1")
        assert stopped.returncode == 0, stopped.stdout + stopped.stderr
        until(
            lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids.values()),
            lambda: "an end of the train workers",
        )
    saved = run.lives()[-1].reached // 10 + 1  # after epochs 0, 10, 20, ...
    assert saved - 1 <= len(run.checkpoints()) <= len(run.folders()) <= saved, shlex.join(run.folders())
    assert run.records() == []


def test_nothing_of_lastcall_is_imported_where_the_variables_are_not_set(
    cluster: Cluster, tmp_path: Path
) -> None:
    run = Run(tmp_path, "modules", workers=1)
    run.start(cluster, RAY_TRAIN_JIT_CHECKPOINT_ENABLED="", RAY_TRAIN_JIT_CHECKPOINT_KILL_WAIT="")
    run.finish()
    seen = json.loads((tmp_path / "storage" / "modules.json").read_text())
    assert seen == {"driver": [], "worker": [], "controller": []}


@pytest.mark.slow
def test_a_process_that_is_told_to_stop_without_protection_is_not_saved(
    cluster: Cluster, tmp_path: Path
) -> None:
    """Else all the other tests could pass without us."""
    run = Run(tmp_path, "steps", "--save_every", 10_000)
    run.start(cluster, RAY_TRAIN_JIT_CHECKPOINT_ENABLED="0")
    run.until_step(4)
    os.kill(run.pids()[1], signal.SIGTERM)
    assert run.driver.wait() != 0
    assert run.folders() == []
