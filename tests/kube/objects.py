"""An object of every kind that lastcall protects, as somebody writes it who has not heard of it.

Their pods are for a node that does not exist: what is looked at is what the API server has made of the
objects. `PODS` says where in each the pods' specs are in which a container `train` trains; the container
`sidecar` must stay as it is.
"""

from __future__ import annotations

import copy
from typing import Any

Object = dict[str, Any]
Path = tuple[str | int, ...]

SIDECAR: Object = {"name": "sidecar", "image": "sidecar:1", "env": [{"name": "MINE", "value": "1"}]}
_POD: Object = {
    "nodeSelector": {"kubernetes.io/hostname": "nowhere"},
    "containers": [
        {"name": "train", "image": "train:1", "env": [{"name": "LASTCALL_LOG_LEVEL", "value": "debug"}]},
        SIDECAR,
    ],
}
_TEMPLATE: Object = {"metadata": {"labels": {"app": "it"}}, "spec": _POD}
_ONCE: Object = {"metadata": {"labels": {"app": "it"}}, "spec": {**_POD, "restartPolicy": "Never"}}
_NAMED: Object = {"spec": {**_POD, "containers": [{**SIDECAR}, {"name": "pytorch", "image": "train:1"}]}}
_SELECTED: Object = {"selector": {"matchLabels": {"app": "it"}}, "template": _TEMPLATE}
_CLUSTER: Object = {
    "headGroupSpec": {"rayStartParams": {}, "template": _TEMPLATE},
    "workerGroupSpecs": [
        {"groupName": name, "minReplicas": 1, "maxReplicas": 2, "rayStartParams": {}, "template": _TEMPLATE}
        for name in ("a", "b")
    ],
}
_SET: Object = {"replicatedJobs": [{"name": "node", "template": {"spec": {"template": _ONCE}}}]}
_HEAD: Path = ("headGroupSpec", "template", "spec")
_GROUPS: tuple[Path, ...] = tuple(("workerGroupSpecs", index, "template", "spec") for index in (0, 1))

OBJECTS: dict[str, tuple[str, Object]] = {  # kind: version, spec
    "RayCluster": ("ray.io/v1", _CLUSTER),
    "RayJob": ("ray.io/v1", {"entrypoint": "python train.py", "rayClusterSpec": _CLUSTER}),
    "RayService": ("ray.io/v1", {"rayClusterConfig": _CLUSTER}),
    "TrainJob": (
        "trainer.kubeflow.org/v1alpha1",
        {"runtimeRef": {"name": "torch-distributed"}, "trainer": {"numNodes": 2}},
    ),
    "PyTorchJob": (
        "kubeflow.org/v1",
        {
            "pytorchReplicaSpecs": {
                "Master": {"template": _NAMED},
                "Worker": {"replicas": 2, "template": _NAMED},
            }
        },
    ),
    "JobSet": ("jobset.x-k8s.io/v1alpha2", _SET),
    "Job": ("batch/v1", {"template": _ONCE}),
    "StatefulSet": ("apps/v1", {"serviceName": "it", **_SELECTED}),
    "Deployment": ("apps/v1", _SELECTED),
    "Pod": ("v1", _POD),
}
RAY = {kind for kind, (version, _) in OBJECTS.items() if version.startswith("ray.io/")}
PODS: dict[str, tuple[Path, ...]] = {
    "RayCluster": (_HEAD, *_GROUPS),
    "RayJob": tuple(("rayClusterSpec", *path) for path in (_HEAD, *_GROUPS)),
    "RayService": tuple(("rayClusterConfig", *path) for path in (_HEAD, *_GROUPS)),
    "PyTorchJob": tuple(("pytorchReplicaSpecs", role, "template", "spec") for role in ("Master", "Worker")),
    "JobSet": (("replicatedJobs", 0, "template", "spec", "template", "spec"),),
    "Job": (("template", "spec"),),
    "StatefulSet": (("template", "spec"),),
    "Deployment": (("template", "spec"),),
    "Pod": ((),),
}
TRAINER = {"PyTorchJob": "pytorch"}  # the training container's name, where it is not "train"


def make(kind: str, name: str, **annotations: str) -> Object:
    """`lastcall_enabled="true"` stands for lastcall.dev/enabled, `ray_enabled` for
    ray.io/jit-checkpoint-enabled."""
    version, spec = OBJECTS[kind]
    written = {
        key.replace("lastcall_", "lastcall.dev/")
        .replace("ray_", "ray.io/jit-checkpoint-")
        .replace("_", "-"): value
        for key, value in annotations.items()
    }
    metadata: Object = {"name": name, **({"annotations": written} if written else {})}
    return {"apiVersion": version, "kind": kind, "metadata": metadata, "spec": copy.deepcopy(spec)}


def at(item: Any, path: Path) -> Any:
    for step in path:
        item = item[step]
    return item


def pods(item: Object) -> list[Object]:
    return [at(item["spec"], path) for path in PODS[item["kind"]]]


def container(pod: Object, name: str) -> Object:
    (found,) = (one for one in pod["containers"] if one["name"] == name)
    return dict(found)


def env(one: Object) -> dict[str, str]:
    return {variable["name"]: variable.get("value", "") for variable in one.get("env", [])}
