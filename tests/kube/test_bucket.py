"""A training on a real cluster whose directory dies with its pod: the bucket is all that its successor
has."""

from __future__ import annotations

from pathlib import Path

import pytest

from helpers.kube import trainings as kube_trainings
from helpers.kube.cluster import Cluster
from helpers.kube.trainings import Training
from helpers.processes import interruption_chain as chain
from helpers.servers import s3 as s3_server

STEPS = 30
SETTINGS = {"STEPS": STEPS, "PACE": 0.5}
ENABLED = {
    "lastcall.dev/enabled": "true",
    "lastcall.dev/kill-wait-seconds": "0",
    "lastcall.dev/directory": "/tmp/run",
}


@pytest.mark.usefixtures("webhook")
def test_a_job_whose_directory_dies_with_its_pod_goes_on_from_the_bucket(
    cluster: Cluster, tmp_path: Path
) -> None:
    finished = kube_trainings.uninterrupted(tmp_path / "uninterrupted", SETTINGS)
    (tmp_path / "data").mkdir()
    with s3_server.served(tmp_path / "buckets", host=cluster.outside) as server:
        bucket = server.bucket("runs")
        settings = {**SETTINGS, **server.environment, "LASTCALL_MIRROR": "s3://runs/exp1"}
        job = kube_trainings.job("bucket", tmp_path / "data", settings, annotations=ENABLED, grace=30)
        training = Training(cluster, tmp_path / "data", cluster.api.create(job))
        training.expect("step 3")
        # The controller makes the next pod at once: it starts while this one saves and copies.
        assert (
            cluster.kubectl(
                "delete", "pod", training.running()["metadata"]["name"], "--wait=false"
            ).returncode
            == 0
        )
        training.expect("from", 2)
        (record,) = (record for record in chain.records(bucket / "exp1") if record["kind"] == "jit")
        training.wait()
    assert training.lines("from") == ["from 0", f"from {record['step']}"], training.story()
    assert training.lines("finished") == [finished], training.story()
    assert training.lines("step") == [f"step {number}" for number in range(1, STEPS + 1)], training.story()
