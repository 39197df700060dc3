"""Objects of every kind, small ones, and what an admission says of them."""

from __future__ import annotations

import base64
import json
from typing import Any

from lastcall.kube.inject import draft, inject
from lastcall.kube.inject.inject import InjectOptions

ON = {"lastcall.dev/enabled": "true"}
Object = dict[str, Any]


def pod(*names: str, **spec: Any) -> Object:
    return {"containers": [{"name": name, "image": "train"} for name in names or ("main",)], **spec}


def made(version: str, kind: str, spec: Object, annotations: Object | None = None, **metadata: Any) -> Object:
    about = {"name": "x", "annotations": dict(annotations or {}), **metadata}
    return {"apiVersion": version, "kind": kind, "metadata": about, "spec": spec}


def job(annotations: Object | None = None, *, metadata: Object | None = None, **spec: Any) -> Object:
    return made(
        "batch/v1",
        "Job",
        {"template": {"spec": pod(**spec)}},
        ON if annotations is None else annotations,
        **(metadata or {}),
    )


def cluster(*names: str) -> Object:
    group = {"template": {"spec": pod(*names)}}
    return {"headGroupSpec": group, "workerGroupSpecs": [dict(group), dict(group)]}


def every(annotations: Object) -> list[Object]:
    """One of each kind that holds pod templates."""
    template = {"template": {"spec": pod()}}
    return [
        made("ray.io/v1", "RayCluster", cluster(), annotations),
        made(
            "ray.io/v1",
            "RayJob",
            {"rayClusterSpec": cluster(), "submitterPodTemplate": {"spec": pod()}},
            annotations,
        ),
        made("ray.io/v1", "RayService", {"rayClusterConfig": cluster()}, annotations),
        made(
            "kubeflow.org/v1",
            "PyTorchJob",
            {"pytorchReplicaSpecs": {"Master": dict(template), "Worker": dict(template)}},
            annotations,
        ),
        made(
            "jobset.x-k8s.io/v1alpha2",
            "JobSet",
            {"replicatedJobs": [{"name": "w", "template": {"spec": template}}]},
            annotations,
        ),
        made("batch/v1", "Job", dict(template), annotations),
        made("batch/v1", "CronJob", {"jobTemplate": {"spec": template}}, annotations),
        made("apps/v1", "StatefulSet", dict(template), annotations),
        made("apps/v1", "Deployment", dict(template), annotations),
        made("v1", "Pod", pod(), annotations),
    ]


def trainjob(annotations: Object | None = None, **spec: Any) -> Object:
    return made(
        "trainer.kubeflow.org/v1alpha1",
        "TrainJob",
        {"runtimeRef": {"name": "torch"}, **spec},
        ON if annotations is None else annotations,
    )


def protected(obj: Object, *, image: str | None = "lastcall:1", namespace: Object | None = None) -> Object:
    """The object as the API server has it after the patch."""
    return draft.applied(obj, inject.patch(obj, options=InjectOptions(image=image), namespace=namespace))


def variables(container: Object) -> dict[str, Any]:
    return {variable["name"]: variable.get("value") for variable in container.get("env", [])}


def trainer(obj: Object) -> Object:
    """The first container of a Job."""
    found: Object = obj["spec"]["template"]["spec"]["containers"][0]
    return found


def review(obj: Any, operation: str = "CREATE", old: Any = None, **more: Any) -> bytes:
    request = {
        "uid": "abc",
        "operation": operation,
        "namespace": "team",
        "object": obj,
        "oldObject": old,
        **more,
    }
    return json.dumps(
        {"apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview", "request": request}
    ).encode()


def operations(document: Object) -> list[Object]:
    patch = document["response"].get("patch")
    return [] if patch is None else json.loads(base64.b64decode(patch))
