"""TransformersTrainer on a real API server, and the pods of its TrainJob on a real node. No controller of
Kubeflow is here: what it makes of the job in the end, an indexed Job, is made here from the same template,
with the variables that its torch plugin adds."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from helpers.kube import images as kube_images
from helpers.kube import indexed as kube_indexed
from helpers.kube.api import Object, until
from helpers.kube.cluster import Cluster
from helpers.kubeflow import functions as kubeflow_functions
from helpers.kubeflow import objects as kubeflow_objects
from helpers.kubeflow import plain as kubeflow_plain
from helpers.servers import s3 as s3_server
from helpers.servers.ports import free_port

EPOCHS = 10  # 40 steps of half a second: no notice comes too late
# There is no DNS here: the pods share the node's network, where each finds the other.
PLUGIN = {"PET_NNODES": "2", "PET_NPROC_PER_NODE": "1", "PET_MASTER_ADDR": "127.0.0.1"}


@pytest.fixture(scope="session")
def kubeflow(kinds: Cluster) -> Iterator[Cluster]:
    """With the runtime that TrainJobs refer to, and with indexed Jobs."""
    kinds.api.create(kubeflow_objects.RUNTIME)
    with kube_indexed.served(kinds):
        yield kinds


def submitted(cluster: Cluster, trainer: Any) -> Object:
    """Through the SDK, and read back."""
    name = kubeflow_objects.submit(cluster.config, trainer)
    return cluster.api.get("TrainJob", name, version="trainer.kubeflow.org/v1alpha1")


def test_the_trainjob_is_that_of_the_seed(kubeflow: Cluster) -> None:
    job = submitted(kubeflow, kubeflow_objects.of_the_seed())
    wanted = kubeflow_objects.expected(job["metadata"]["name"], job["spec"]["trainer"]["command"])
    # the definition's own defaults
    wanted["spec"] |= {"suspend": False, "managedBy": "trainer.kubeflow.org/trainjob-controller"}
    wanted["spec"]["runtimeRef"]["apiGroup"] = "trainer.kubeflow.org"
    assert list(kubeflow_objects.differences(job, wanted)) == []


@pytest.mark.usefixtures("webhook")
def test_its_two_pods_are_paused_saved_by_sigterm_resumed_and_finish(
    kubeflow: Cluster, tmp_path: Path
) -> None:
    volume = tmp_path / "volume"
    volume.mkdir()
    claim(kubeflow, "shared", volume)
    job = submitted(kubeflow, small())
    nodes = Nodes(kubeflow, job, tools(tmp_path))
    nodes.pause_and_resume(volume / "checkpoints" / "jit-checkpointing")
    final = volume / "checkpoints" / "jit-checkpointing" / "final" / "model.safetensors"
    assert final.read_bytes() == kubeflow_plain.weights(tmp_path / "plain", EPOCHS, 2)


@pytest.mark.usefixtures("webhook")
def test_one_of_its_pods_is_evicted_and_both_come_back(kubeflow: Cluster, tmp_path: Path) -> None:
    """The Job counts the other as failed, since it left, and makes both anew, each with its own number."""
    volume = tmp_path / "volume"
    volume.mkdir()
    claim(kubeflow, "evicted", volume)
    nodes = Nodes(kubeflow, submitted(kubeflow, small(output_dir="pvc://evicted/exp3")), tools(tmp_path))
    nodes.evict(1, volume / "exp3")
    assert (volume / "exp3" / "final" / "model.safetensors").read_bytes() == kubeflow_plain.weights(
        tmp_path / "plain", EPOCHS, 2
    )


@pytest.mark.usefixtures("webhook")
def test_its_two_pods_share_nothing_but_a_bucket(kubeflow: Cluster, tmp_path: Path) -> None:
    """Each saves into its own file system, which goes with it."""
    with s3_server.served(tmp_path / "buckets", host=kubeflow.outside) as server:
        bucket = server.bucket("runs") / "exp2"
        secret(kubeflow, "my-data", server.environment)
        job = submitted(kubeflow, small(output_dir="s3://runs/exp2", data_connection_name="my-data"))
        nodes = Nodes(kubeflow, job, tools(tmp_path))
        nodes.pause_and_resume(bucket)
        assert (bucket / "final" / "model.safetensors").read_bytes() == kubeflow_plain.weights(
            tmp_path / "plain", EPOCHS, 2
        )


def small(**settings: Any) -> Any:
    """A training of two nodes that takes seconds."""
    return kubeflow_objects.of_the_seed(
        func=kubeflow_functions.train,
        func_args={"epochs": EPOCHS, "pause": 0.5},
        env=kubeflow_plain.TWO_NODES,
        package=None,
        resources_per_node=None,
        periodic_checkpoint_config=None,
        enable_progress_tracking=False,
        **settings,
    )


class Nodes:
    """The two pods of a TrainJob, kept by one indexed Job, with the variables that Kubeflow's torch plugin
    adds."""

    def __init__(self, cluster: Cluster, job: Object, tools: Path) -> None:
        self._cluster = cluster
        self._name = f"{job['metadata']['name']}-node-0"
        self._said: dict[str, str] = {}
        spec = kubeflow_objects.pod_template(job)["spec"]
        spec |= {"restartPolicy": "Never", "hostNetwork": True}
        (container,) = spec["containers"]
        container["image"] = kube_images.TRAINING
        said = {**PLUGIN, "PET_MASTER_PORT": str(free_port()), "PATH": f"{tools}:/usr/bin:/bin"}
        container["env"] += [{"name": key, "value": value} for key, value in said.items()]
        container["env"] += [
            {"name": "PET_NODE_RANK", "valueFrom": {"fieldRef": {"fieldPath": kube_indexed.FIELD}}}
        ]
        mounts = {**kube_images.MOUNTS, "tools": tools}
        spec["volumes"] += [{"name": key, "hostPath": {"path": str(path)}} for key, path in mounts.items()]
        container["volumeMounts"] += [
            {"name": key, "mountPath": str(path), "readOnly": True} for key, path in mounts.items()
        ]
        template = {"metadata": {"labels": {"trainjob": job["metadata"]["name"]}}, "spec": spec}
        metadata = {"name": self._name, "annotations": job["metadata"]["annotations"]}
        cluster.api.create(kube_indexed.job(metadata, template, completions=2))

    def pods(self) -> list[Object]:
        return self._cluster.api.pods(f"job-name={self._name}")

    def pause_and_resume(self, place: Path) -> None:
        """As a person does: both pods are told to stop, and gone; others go on from what they have left in
        this place."""
        self._train()
        self._lastcall("pause")
        assert self.pods() == []
        self._expect_saved(place)
        self._lastcall("resume")
        self._finish()

    def evict(self, index: int, place: Path) -> None:
        """Only this pod is told to stop."""
        self._train()
        (victim,) = (pod["metadata"]["name"] for pod in self.pods() if kube_indexed.index_of(pod) == index)
        done = self._cluster.kubectl("delete", "pod", victim)  # returns when it is gone
        assert done.returncode == 0, done.stderr
        self._expect_saved(place)
        self._finish()

    def _train(self) -> None:
        self.expect("step 3")
        assert sorted(map(kube_indexed.index_of, self.pods())) == [0, 1]

    def _expect_saved(self, place: Path) -> None:
        records = [json.loads(path.read_text()) for path in place.glob("checkpoint-*/lastcall.json")]
        found = [(record["kind"], record["world"], record["exact"]) for record in records]
        assert found == [("jit", 2, True)], f"{records}\n{self.story()}"

    def _finish(self) -> None:
        until(lambda: self._cluster.api.get("Job", self._name)["status"].get("succeeded") == 2, self.story)
        assert re.search(r"\[Kubeflow\] Auto-resuming from checkpoint-\d+", self.log()), self.story()
        done = [pod for pod in self.pods() if pod["status"]["phase"] == "Succeeded"]
        assert sorted(map(kube_indexed.index_of, done)) == [0, 1]

    def _lastcall(self, word: str) -> None:
        done = self._cluster.lastcall(word, f"job/{self._name}")
        assert done.returncode == 0, f"{done.stdout}{done.stderr}{self.story()}"

    def expect(self, words: str) -> None:
        until(lambda: words in self.log(), self.story)

    def log(self) -> str:
        """Of all lives: a pod that is gone has taken its own along."""
        for pod in self.pods():
            name = pod["metadata"]["name"]
            self._said[name] = self._cluster.api.log(name) or self._said.get(name, "")
        return "\n".join(self._said.values())

    def story(self) -> str:
        states = [f"{pod['metadata']['name']}: {pod['status']}" for pod in self.pods()]
        events = self._cluster.kubectl("get", "events", "--sort-by=.lastTimestamp").stdout.splitlines()[-25:]
        return "\n".join([*states, *events, self.log()[-8000:]])


def claim(cluster: Cluster, name: str, folder: Path) -> None:
    """A claim that is a folder of this machine."""
    common = {"accessModes": ["ReadWriteMany"], "storageClassName": ""}
    volume = {**common, "capacity": {"storage": "1Gi"}, "hostPath": {"path": str(folder)}}
    claimed = {**common, "volumeName": name, "resources": {"requests": {"storage": "1Gi"}}}
    metadata = {"metadata": {"name": name}}
    created = cluster.kubectl(
        "create",
        "-f",
        "-",
        given=json.dumps({"apiVersion": "v1", "kind": "PersistentVolume", **metadata, "spec": volume}),
    )
    assert created.returncode == 0, created.stderr
    cluster.api.create({"apiVersion": "v1", "kind": "PersistentVolumeClaim", **metadata, "spec": claimed})


def secret(cluster: Cluster, name: str, data: dict[str, str]) -> None:
    cluster.api.create({"apiVersion": "v1", "kind": "Secret", "metadata": {"name": name}, "stringData": data})


def tools(folder: Path) -> Path:
    """torchrun, which Kubeflow's images have on their path."""
    path = folder / "tools" / "torchrun"
    path.parent.mkdir()
    path.write_text(f'#!/bin/sh\nexec {kube_images.PYTHON} -m torch.distributed.run "$@"\n')
    path.chmod(0o755)
    return path.parent
