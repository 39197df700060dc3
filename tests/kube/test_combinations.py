"""What the API server takes without an annotation it takes with one: pods put together at random from what
pods have."""

from __future__ import annotations

import copy
import random
from typing import Any

import pytest

from helpers.kube.api import Refused
from helpers.kube.cluster import Cluster

pytestmark = pytest.mark.usefixtures("webhook")
MANY = 250
CHECKPOINTS = "/mnt/kubeflow-checkpoints"

ENVIRONMENT: tuple[dict[str, Any], ...] = (
    {"name": "EMPTY"},
    {"name": "IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}},
    {"name": "PYTHONPATH", "value": "/a:/b"},
    {"name": "PYTHONPATH", "valueFrom": {"configMapKeyRef": {"name": "it", "key": "path"}}},
    {"name": "LASTCALL_ENABLED", "value": "0"},
    {"name": "LASTCALL_EXIT_CODE", "value": "300"},
    {"name": "LASTCALL_DIRECTORY", "value": "/ckpt"},
)
MOUNTS: tuple[dict[str, Any], ...] = (
    {"name": "data", "mountPath": CHECKPOINTS},
    {"name": "data", "mountPath": f"{CHECKPOINTS}/"},
    {"name": "data", "mountPath": "/opt"},
    {"name": "data", "mountPath": "/opt/lastcall"},
    {"name": "lastcall", "mountPath": "/opt/lastcall/"},
    {"name": "lastcall", "mountPath": "/elsewhere"},
    {"name": "lastcall-storage", "mountPath": "/storage"},
)
VOLUMES: tuple[dict[str, Any], ...] = (
    {"emptyDir": {}},
    {"emptyDir": {"medium": "Memory"}},
    {"hostPath": {"path": "/x"}},
    {"persistentVolumeClaim": {"claimName": "x"}},
)
CONTAINER: dict[str, tuple[Any, ...]] = {
    "env": (None, []),
    "volumeMounts": (None, []),
    "envFrom": ([{"configMapRef": {"name": "it"}}],),
    "securityContext": (
        None,
        {},
        {"privileged": True},
        {"runAsUser": 0},
        {"runAsUser": 1000, "runAsNonRoot": True, "readOnlyRootFilesystem": True},
        {
            "capabilities": {"add": ["SYS_PTRACE"], "drop": ["ALL"]},
            "seLinuxOptions": {"level": "s0"},
            "runAsGroup": 5,
        },
    ),
    "resources": (
        None,
        {},
        {"limits": {"cpu": "1"}},
        {"requests": {"cpu": 0.5, "memory": "1e9"}},
        {"limits": {"ephemeral-storage": "1Gi"}},
        {"requests": {"cpu": "1", "hugepages-2Mi": "2Mi"}, "limits": {"hugepages-2Mi": "2Mi"}},
        {"requests": {"memory": "1Gi", "nvidia.com/gpu": 1}, "limits": {"nvidia.com/gpu": 1}},
    ),
    "lifecycle": (
        None,
        {},
        {"preStop": None},
        {"postStart": {"exec": {"command": ["true"]}}},
        {"preStop": {"exec": {"command": ["sleep", "5"]}}},
        {"preStop": {"httpGet": {"path": "/", "port": 80}}},
    ),
}
POD: dict[str, tuple[Any, ...]] = {
    "volumes": (None, []),
    "terminationGracePeriodSeconds": (None, 0, 1, 600),
    "securityContext": (None, {}, {"runAsNonRoot": True, "runAsUser": 7, "fsGroup": 5}),
    "hostNetwork": (True,),
    "shareProcessNamespace": (True,),
}
ANNOTATIONS: dict[str, tuple[str, ...]] = {
    "lastcall.dev/storage": ("shared", "shared/a//b/"),
    "lastcall.dev/directory": (
        "/ckpt",
        CHECKPOINTS,
        "/opt",
        "/opt/lastcall",
        "/opt/lastcall/x",
        "/dev/shm",
        "/mnt/ü b",
    ),
    "lastcall.dev/grace-seconds": ("0.5", "604800"),
    "lastcall.dev/kill-wait-seconds": ("0", "0.4"),
}


class Pieces:
    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)

    def chosen(self, table: dict[str, tuple[Any, ...]], share: float = 0.35) -> dict[str, Any]:
        found = {
            name: self.random.choice(values) for name, values in table.items() if self.random.random() < share
        }
        return copy.deepcopy(found)

    def some(self, table: tuple[dict[str, Any], ...]) -> list[Any]:
        return [copy.deepcopy(one) for one in table if self.random.random() < 0.2]

    def container(self, name: str) -> dict[str, Any]:
        lists = {"env": self.some(ENVIRONMENT), "volumeMounts": self.some(MOUNTS)}
        return {
            "name": name,
            "image": "it",
            **self.chosen(CONTAINER),
            **{part: found for part, found in lists.items() if found},
        }

    def pod(self) -> dict[str, Any]:
        names = self.random.choice((["main"], ["main", "side"], ["x" * 63], ["istio-proxy", "main"]))
        spec = {
            "restartPolicy": "Never",
            **self.chosen(POD),
            "containers": [self.container(name) for name in names],
        }
        if self.random.random() < 0.3:
            spec["initContainers"] = [self.container("init")]
        containers = [*spec["containers"], *spec.get("initContainers", [])]
        wanted = sorted({mount["name"] for one in containers for mount in one.get("volumeMounts") or []})
        if wanted:
            spec["volumes"] = [{"name": name, **self.random.choice(VOLUMES)} for name in wanted]
        return spec

    def item(self) -> dict[str, Any]:
        if self.random.random() < 0.5:
            return {
                "apiVersion": "v1",
                "kind": "Pod",
                "metadata": {"generateName": "it-"},
                "spec": self.pod(),
            }
        return {
            "apiVersion": "batch/v1",
            "kind": "Job",
            "metadata": {"name": "it"},
            "spec": {"template": {"spec": self.pod()}},
        }


def test_an_annotation_makes_no_object_one_that_is_refused(cluster: Cluster) -> None:
    pieces, taken = Pieces(seed=7), 0
    for _ in range(MANY):
        item = pieces.item()
        try:
            cluster.api.create(item, dry_run=True)
        except Refused:
            continue
        taken += 1
        item["metadata"]["annotations"] = {"lastcall.dev/enabled": "true", **pieces.chosen(ANNOTATIONS)}
        try:
            cluster.api.create(item, dry_run=True)
        except Refused as error:
            raise AssertionError(f"{error}\n{item}") from error
    assert taken > MANY / 3, (
        "the API server has something against almost all of them: the pieces do not fit together"
    )
