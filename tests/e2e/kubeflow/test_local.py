"""TransformersTrainer on the SDK's own local process backend: a virtual environment, pip, torchrun, a
function that knows nothing."""

from __future__ import annotations

import json
import os
import shutil
import signal
import tempfile
import time
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from helpers.kubeflow import functions as kubeflow_functions
from helpers.kubeflow import plain as kubeflow_plain
from helpers.kubeflow.local import Jobs
from helpers.kubeflow.status import Controller, metrics
from helpers.processes import interruption_chain as chain
from helpers.servers import s3 as s3_server
from helpers.servers.ports import free_port

STEPS = 24  # of three epochs
pytestmark = pytest.mark.timeout(400)
SAID = (
    "[Kubeflow] JIT checkpoint signal handler registered for SIGTERM",
    "[Kubeflow] JIT checkpointing enabled",
)


def processes(words: str) -> list[int]:
    """Of the job, by what its command line says."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and words in (entry / "cmdline").read_text().replace("\0", " "):
                found.append(int(entry.name))
        except OSError:
            continue
    return sorted(found)


def until_said(jobs: Jobs, name: str, words: str) -> None:
    deadline = time.monotonic() + 150
    while words not in jobs.log(name):
        assert time.monotonic() < deadline and jobs.client.get_job(name).status != "Failed", jobs.log(name)
        time.sleep(0.2)


def test_a_job_trains_is_told_to_stop_saves_and_the_next_one_goes_on_to_the_same_bits(
    jobs: Jobs, tmp_path: Path
) -> None:
    (tmp_path / "token").write_text("secret")
    with Controller() as controller:
        asked = {
            "KUBEFLOW_TRAINER_SERVER_URL": controller.url,
            "KUBEFLOW_TRAINER_SERVER_TOKEN": str(tmp_path / "token"),
        }
        said = {
            "grace_seconds": 60,
            "enable_progress_tracking": True,
            "metrics_port": free_port(),
            "env": asked,
        }
        first = jobs.submit(tmp_path / "run", kubeflow_functions.train, {"epochs": 3, "pause": 0.2}, **said)
        until_said(jobs, first, "step 5")
        assert all(line in jobs.log(first) for line in (*SAID, f"[Kubeflow] output_dir: {tmp_path / 'run'}"))
        polled = poll(said["metrics_port"])
        assert polled["state"] == "running" and 0 < polled["currentStep"] < polled["totalSteps"] == STEPS
        (torchrun,) = processes(f"bin/torchrun {Path(tempfile.gettempdir())}/{first}")
        os.kill(torchrun, signal.SIGTERM)
        assert jobs.wait(first) == "Failed", jobs.log(first)  # not finished: Kubeflow would call it complete
        (record,) = chain.records(tmp_path / "run")
        assert (
            metrics(controller.told[-1])["state"] == "saved"
            and controller.told[-1]["progressPercentage"] < 100
        )

        second = jobs.submit(tmp_path / "run", kubeflow_functions.train, {"epochs": 3}, **said)
        assert jobs.wait(second) == "Complete", jobs.log(second)
        assert f"[Kubeflow] Auto-resuming from checkpoint-{record['step']}" in jobs.log(second)
        last = controller.told[-1]
        assert (last["progressPercentage"], metrics(last)["resumed_from"]) == (
            100,
            f"checkpoint-{record['step']}",
        )
    assert (tmp_path / "run" / "final" / "model.safetensors").read_bytes() == kubeflow_plain.weights(
        tmp_path / "plain", 3
    )


def test_a_bucket_is_all_that_is_needed_from_one_job_to_the_next(
    jobs: Jobs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    with s3_server.served(tmp_path / "buckets") as server:
        bucket = server.bucket("runs")
        said = {"grace_seconds": 60, "env": server.environment}
        first = jobs.submit("s3://runs/exp1", kubeflow_functions.train, {"epochs": 3, "pause": 0.2}, **said)
        until_said(jobs, first, "step 5")
        (torchrun,) = processes(f"bin/torchrun {Path(tempfile.gettempdir())}/{first}")
        os.kill(torchrun, signal.SIGTERM)
        assert jobs.wait(first) == "Failed", jobs.log(first)
        (record,) = chain.records(bucket / "exp1")
        shutil.rmtree(tmp_path / "home")  # as an emptyDir goes with its pod

        second = jobs.submit("s3://runs/exp1", kubeflow_functions.train, {"epochs": 3}, **said)
        assert jobs.wait(second) == "Complete", jobs.log(second)
        assert f"[Kubeflow] Auto-resuming from checkpoint-{record['step']}" in jobs.log(second)
        assert (bucket / "exp1/final/model.safetensors").read_bytes() == kubeflow_plain.weights(
            tmp_path / "plain", 3
        )


def poll(port: int) -> dict[str, Any]:
    """As OpenShift AI's controller does."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30) as answer:
        said: dict[str, Any] = json.load(answer)
    return said
