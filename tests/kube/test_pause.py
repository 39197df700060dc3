"""`lastcall kube pause` and `resume`, as a person types them, of a Job on a real cluster."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from helpers.kube import trainings as kube_trainings
from helpers.kube.cluster import Cluster
from helpers.kube.trainings import Training

SETTINGS = {"STEPS": 30, "PACE": 0.5}


@pytest.mark.usefixtures("webhook")
def test_a_paused_job_has_saved_and_resumes_to_the_same_bits(cluster: Cluster, tmp_path: Path) -> None:
    finished = kube_trainings.uninterrupted(tmp_path / "uninterrupted", SETTINGS)
    folder = tmp_path / "volume"
    folder.mkdir()
    annotations = {"lastcall.dev/enabled": "true", "lastcall.dev/kill-wait-seconds": "0"}
    item = kube_trainings.job("paused", folder, SETTINGS, annotations=annotations, logged=True)
    training = Training(cluster, folder, cluster.api.create(item))
    training.expect("step 3")
    done = cluster.lastcall("pause", "job/paused")
    assert done.returncode == 0, done.stdout + done.stderr + training.story()
    assert training.pods() == []
    (record,) = (json.loads(path.read_text()) for path in folder.glob("run/*/lastcall.json"))
    assert record["kind"] == "jit" and training.lines("step")[-1] == f"step {record['step']}"
    assert cluster.lastcall("pause", "job/paused").returncode == 0  # again: it is so already
    done = cluster.lastcall("resume", "job/paused")
    assert done.returncode == 0, done.stdout + done.stderr
    training.wait()
    assert training.lines("from") == ["from 0", f"from {record['step']}"], training.story()
    assert training.lines("finished") == [finished]
