"""Trainings on a real cluster that are taken away by it: what a user gets with one annotation, and
without."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from helpers.kube import trainings as kube_trainings
from helpers.kube.api import Object, until
from helpers.kube.cluster import Cluster
from helpers.kube.images import PAUSE
from helpers.kube.trainings import Training

STEPS = 30
SETTINGS = {"STEPS": STEPS, "PACE": 0.5}
GRACE = 5  # seconds, the user's own: a training that is PID 1 and hears no SIGTERM goes on for so long
MOST = {"requests": {"cpu": "1200m"}}  # of the two cores: there is room for one such pod
ENABLED = {"lastcall.dev/enabled": "true", "lastcall.dev/kill-wait-seconds": "0"}


@pytest.fixture(scope="session")
def finished(tmp_path_factory: pytest.TempPathFactory) -> str:
    """What a run that nobody stopped says at its end."""
    return kube_trainings.uninterrupted(tmp_path_factory.mktemp("uninterrupted"), SETTINGS)


def submit(
    cluster: Cluster,
    folder: Path,
    name: str,
    annotations: dict[str, str],
    resources: Object | None = None,
    shell: bool = False,
) -> Training:
    item = kube_trainings.job(
        name, folder, SETTINGS, annotations=annotations, resources=resources, shell=shell, grace=GRACE
    )
    return Training(cluster, folder, cluster.api.create(item))


def saved_step(folder: Path) -> int:
    """Of the one checkpoint that was saved because of the notice."""
    found = [
        record
        for path in folder.glob("run/*/lastcall.json")
        if (record := json.loads(path.read_text()))["kind"] == "jit"
    ]
    (record,) = found
    assert "SIGTERM" in record["reason"] or "preStop" in record["reason"], record
    return int(record["step"])


def came_back(training: Training, finished: str) -> None:
    """Two lives: the second began where the first ended, and came to what one life comes to."""
    training.wait()
    step = saved_step(training.folder)
    assert training.lines("from") == ["from 0", f"from {step}"], training.story()
    assert step >= 3
    assert training.lines("finished") == [finished], training.story()
    assert training.lines("step") == [f"step {number}" for number in range(1, STEPS + 1)], training.story()


@pytest.mark.usefixtures("webhook")
def test_a_job_whose_pod_is_deleted_saves_and_its_successor_goes_on_to_the_same_bits(
    cluster: Cluster, tmp_path: Path, finished: str
) -> None:
    training = submit(cluster, tmp_path, "deleted", ENABLED)
    training.expect("step 3")
    pod = training.running()
    assert cluster.kubectl("delete", "pod", pod["metadata"]["name"], "--wait=false").returncode == 0
    came_back(training, finished)


@pytest.mark.usefixtures("webhook")
def test_a_training_below_a_shell_that_swallows_the_signal_saves_all_the_same(
    cluster: Cluster, tmp_path: Path, finished: str
) -> None:
    training = submit(cluster, tmp_path, "shell", ENABLED, shell=True)
    training.expect("step 3")
    cluster.kubectl("delete", "pod", training.running()["metadata"]["name"], "--wait=false")
    came_back(training, finished)


def test_without_the_annotation_the_same_job_loses_its_work(
    cluster: Cluster, tmp_path: Path, finished: str
) -> None:
    training = submit(cluster, tmp_path, "lost", {})
    training.expect("step 3")
    cluster.kubectl("delete", "pod", training.running()["metadata"]["name"], "--wait=false")
    training.wait()
    assert training.lines("from") == ["from 0", "from 0"], training.story()
    assert training.lines("finished") == [finished]
    assert training.lines("step").count("step 3") == 2


@pytest.mark.usefixtures("webhook")
def test_a_job_that_a_pod_of_higher_priority_pushes_aside_comes_back_when_that_is_gone(
    cluster: Cluster, tmp_path: Path, finished: str
) -> None:
    training = submit(cluster, tmp_path, "preempted", ENABLED, resources=MOST)
    training.expect("step 3")
    pod = training.running()
    urgent = {
        "apiVersion": "scheduling.k8s.io/v1",
        "kind": "PriorityClass",
        "metadata": {"name": "urgent"},
        "value": 1000,
    }
    cluster.api.create(urgent)
    spec = {"priorityClassName": "urgent", "containers": [{"name": "it", "image": PAUSE, "resources": MOST}]}
    cluster.api.create({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "urgent"}, "spec": spec})
    training.gone(pod)
    until(
        lambda: cluster.api.get("Pod", "urgent")["status"]["phase"] == "Running",
        lambda: f"the urgent pod\n{training.story()}",
    )
    assert training.running()["status"]["phase"] == "Pending"
    assert cluster.kubectl("delete", "pod", "urgent", "--now").returncode == 0
    came_back(training, finished)
