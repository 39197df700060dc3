"""What the real SDK makes of a TransformersTrainer, as the API server gets it; and the command in it, run by
a real bash."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from kubeflow.trainer import CustomTrainer
from kubeflow.trainer.options import Annotations, Name

from helpers.kubeflow import functions as kubeflow_functions
from helpers.kubeflow import objects as kubeflow_objects
from helpers.kubeflow.api import FakeApi


@pytest.fixture
def api(tmp_path: Path) -> Iterator[FakeApi]:
    with FakeApi(tmp_path) as api:
        yield api


def submitted(api: FakeApi, trainer: Any, options: list[Any] | None = None) -> dict[str, Any]:
    name = kubeflow_objects.submit(api.kubeconfig, trainer, options=options)
    (job,) = api.created
    assert job["metadata"]["name"] == name
    return job


def run_as_a_pod(job: dict[str, Any], folder: Path) -> subprocess.CompletedProcess[str]:
    """The container's command as the kubelet starts it, with a torchrun that is Python itself."""
    (folder / "torchrun").write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    (folder / "torchrun").chmod(0o755)
    (container,) = kubeflow_objects.pod_template(job)["spec"]["containers"]
    said = {variable["name"]: variable["value"] for variable in container["env"]}
    environ = {
        "PATH": f"{folder}:{os.environ['PATH']}",
        "HOME": "/home/nobody",
        "HOSTNAME": "pod-0",
        "x": "harm",
        **said,
    }
    command = kubeflow_objects.expanded(container["command"], environ)
    return subprocess.run(command, cwd=folder, env=environ, capture_output=True, text=True, timeout=120)


def test_the_trainjob_is_that_of_the_seed(api: FakeApi) -> None:
    job = submitted(api, kubeflow_objects.of_the_seed())
    command = job["spec"]["trainer"]["command"]
    assert (
        command[:2] == ["bash", "-c"]
        and "PACKAGES=(lastcall==" in command[2]
        and 'torchrun "lastcall_kubeflow.py"' in command[2]
    )
    assert (
        list(kubeflow_objects.differences(job, kubeflow_objects.expected(job["metadata"]["name"], command)))
        == []
    )


def test_a_function_that_a_shell_would_change_arrives_as_it_was_written(api: FakeApi, tmp_path: Path) -> None:
    trainer = kubeflow_objects.of_the_seed(package=None, env=None)
    done = run_as_a_pod(submitted(api, trainer), tmp_path)
    assert done.returncode == 0, done.stderr
    here = tmp_path / "here.json"
    kubeflow_functions.peculiar(**{**(trainer.func_args or {}), "path": str(here)})
    assert json.loads((tmp_path / "said.json").read_text()) == json.loads(here.read_text())


@pytest.mark.parametrize("ours", [True, False])
def test_the_sdk_alone_lets_the_shell_change_it(api: FakeApi, tmp_path: Path, ours: bool) -> None:
    """The test above can fail: this is what it would see."""
    said = {"func": kubeflow_functions.shelled, "func_args": {"path": "said"}}
    trainer = kubeflow_objects.of_the_seed(**said, package=None) if ours else CustomTrainer(**said)
    done = run_as_a_pod(submitted(api, trainer), tmp_path)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "said").read_text() == (
        "${x} `echo pwned` $(HOSTNAME)" if ours else "harm pwned pod-0"
    )


def test_a_pod_without_lastcall_says_what_to_do_and_does_not_train(api: FakeApi, tmp_path: Path) -> None:
    job = submitted(api, kubeflow_objects.of_the_seed(package=None))
    job["spec"]["trainer"]["env"].append({"name": "PYTHONPATH", "value": str(tmp_path / "none")})
    (tmp_path / "none" / "lastcall").mkdir(parents=True)
    (tmp_path / "none" / "lastcall" / "__init__.py").write_text("raise ImportError('none here')")
    done = run_as_a_pod(job, tmp_path)
    assert done.returncode == 78 and "Pass TransformersTrainer(package=...)" in done.stderr
    assert not (tmp_path / "said.json").exists()


def test_what_the_users_own_options_say_stays(api: FakeApi) -> None:
    options = [Name("mine"), Annotations({"a": "b", "trainer.opendatahub.io/metrics-port": "9000"})]
    job = submitted(api, kubeflow_objects.of_the_seed(env={"LASTCALL_SAVE_STEPS": "7"}), options)
    assert job["metadata"]["name"] == "mine"
    said = job["metadata"]["annotations"]
    assert (said["a"], said["trainer.opendatahub.io/metrics-port"]) == ("b", "9000")
    assert {"name": "LASTCALL_SAVE_STEPS", "value": "7"} in job["spec"]["trainer"]["env"]


def test_a_plain_custom_trainer_is_as_before(api: FakeApi) -> None:
    job = submitted(api, CustomTrainer(func=kubeflow_functions.train, func_args={"epochs": 1}, num_nodes=1))
    assert set(job["spec"]["trainer"]) == {"command", "numNodes"} and "runtimePatches" not in job["spec"]
    assert "annotations" not in job["metadata"] and "def train(epochs" in job["spec"]["trainer"]["command"][2]


def test_without_the_package_the_webhook_is_asked_to_bring_it(api: FakeApi) -> None:
    job = submitted(
        api, kubeflow_objects.of_the_seed(package=None, enable_progress_tracking=False, grace_seconds=300)
    )
    assert job["metadata"]["annotations"] == {
        "lastcall.dev/enabled": "true",
        "lastcall.dev/grace-seconds": "300",
    }
    assert "pip install" not in job["spec"]["trainer"]["command"][2]
    spec = kubeflow_objects.pod_template(job)["spec"]
    assert spec["terminationGracePeriodSeconds"] == 300
    said = {variable["name"]: variable["value"] for variable in spec["containers"][0]["env"]}
    assert (
        said["LASTCALL_GRACE_SECONDS"] == said["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"] == "300"
        and said["LASTCALL_PROGRESS_PUSH"] == "0"
    )


def test_a_bucket_becomes_a_folder_of_the_pod_a_mirror_and_the_keys_of_the_data_connection(
    api: FakeApi,
) -> None:
    said = {"output_dir": "s3://runs/exp1", "num_nodes": 1, "data_connection_name": "my-data"}
    job = submitted(api, kubeflow_objects.of_the_seed(**said))
    assert "lastcall[s3]==" in job["spec"]["trainer"]["command"][2]
    spec = kubeflow_objects.pod_template(job)["spec"]
    assert spec["volumes"] == [
        {"name": "checkpoint-storage", "emptyDir": {}},
        {"name": "checkpoint-connection", "secret": {"secretName": "my-data"}},
    ]
    (container,) = spec["containers"]
    assert container["volumeMounts"] == [
        {"name": "checkpoint-storage", "mountPath": "/mnt/kubeflow-checkpoints"},
        {"name": "checkpoint-connection", "mountPath": "/mnt/kubeflow-connection", "readOnly": True},
    ]
    variables = {variable["name"]: variable["value"] for variable in container["env"]}
    assert variables["LASTCALL_DIRECTORY"] == "/mnt/kubeflow-checkpoints"
    assert variables["LASTCALL_MIRROR"] == "s3://runs/exp1"
    assert variables["LASTCALL_MIRROR_KEYS"] == "/mnt/kubeflow-connection"
