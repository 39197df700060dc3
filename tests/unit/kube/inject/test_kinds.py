from __future__ import annotations

import pytest

from helpers.kube.objects import cluster, every, job, made, pod
from lastcall.kube.inject import kinds


@pytest.mark.parametrize("obj", every({}), ids=lambda obj: obj["kind"])
def test_templates_are_found_in_every_kind(obj: dict[str, object]) -> None:
    kind = kinds.of(obj)
    assert kind is not None
    assert len(list(kind.find(obj))) == {"PyTorchJob": 2}.get(kind.name, 3 if kind.ray else 1)


def test_other_groups_with_the_same_kind_are_not_ours() -> None:
    assert kinds.of(made("batch.volcano.sh/v1alpha1", "Job", {})) is None
    assert kinds.of(made("v1", "Job", {})) is None
    assert kinds.of([]) is None


def trains(obj: dict[str, object]) -> list[int]:
    kind = kinds.of(obj)
    assert kind is not None
    return [template.container for template in kind.find(obj)]


def test_ray_trains_in_the_first_container_whatever_else_is_said() -> None:
    spec = cluster("ray", "autoscaler")
    spec["headGroupSpec"]["template"]["metadata"] = {
        "annotations": {"kubectl.kubernetes.io/default-container": "autoscaler"}
    }
    assert trains(made("ray.io/v1", "RayCluster", spec)) == [0, 0, 0]


def test_a_pytorchjob_trains_in_its_container_pytorch() -> None:
    spec = {"pytorchReplicaSpecs": {"Worker": {"template": {"spec": pod("proxy", "pytorch")}}}}
    assert trains(made("kubeflow.org/v1", "PyTorchJob", spec)) == [1]


def test_otherwise_the_default_container_trains_and_else_the_first() -> None:
    obj = job()
    obj["spec"]["template"]["spec"] = pod("proxy", "train")
    assert trains(obj) == [0]
    obj["spec"]["template"]["metadata"] = {
        "annotations": {"kubectl.kubernetes.io/default-container": "train"}
    }
    assert trains(obj) == [1]


def test_the_initializers_of_a_trainjob_do_not_train() -> None:
    def one(step: str, *names: str) -> dict[str, object]:
        labels = {"trainer.kubeflow.org/trainjob-ancestor-step": step}
        return {
            "name": step,
            "template": {"metadata": {"labels": labels}, "spec": {"template": {"spec": pod(*names)}}},
        }

    obj = made(
        "jobset.x-k8s.io/v1alpha2",
        "JobSet",
        {"replicatedJobs": [one("dataset-initializer"), one("trainer", "proxy", "node")]},
    )
    kind = kinds.of(obj)
    assert kind is not None
    assert [(template.path[2], template.container) for template in kind.find(obj)] == [(1, 1)]


def test_a_job_that_only_names_a_running_cluster_has_no_template() -> None:
    assert trains(made("ray.io/v1", "RayJob", {"clusterSelector": {"ray.io/cluster": "x"}})) == []


@pytest.mark.parametrize("containers", [None, [], "x", [5], [{}], [{"name": 5}]])
def test_what_has_another_shape_has_no_template(containers: object) -> None:
    assert trains(made("v1", "Pod", {"containers": containers})) == []


def test_an_object_is_owned_when_a_controller_of_our_kinds_made_it() -> None:
    def owner(version: str, kind: str, controller: object = True) -> dict[str, object]:
        return job(
            metadata={"ownerReferences": [{"apiVersion": version, "kind": kind, "controller": controller}]}
        )

    assert kinds.owned(owner("batch/v1", "CronJob"))
    assert kinds.owned(owner("apps/v1", "ReplicaSet"))
    assert not kinds.owned(owner("kubeflow.org/v2beta1", "MPIJob"))
    assert not kinds.owned(owner("batch/v1", "CronJob", False))
    assert not kinds.owned(job(metadata={"ownerReferences": "x"}))
