"""Definitions of the same kinds that serve where the projects' own are missing.

TrainJob, the runtimes, JobSet and all pods are made from the models that Kubeflow publishes as a Python
package (kubeflow_trainer_api). Of the kinds without a published model only the places of their pods are said:
anything else is taken as it is. Rules, which models have lost, are those that tests are about. None of these
kinds has a status here.
"""

from __future__ import annotations

import functools
from typing import Any

from kubeflow_trainer_api import models

from helpers.kube.definitions.checks import Schema

_TEXT: Schema = {"type": "string"}
_EITHER: Schema = {"x-kubernetes-int-or-string": True}
_DIGITS = r"([0-9]+(\.[0-9]*)?|\.[0-9]+)"
_QUANTITY: Schema = {**_EITHER, "pattern": rf"^[+-]?{_DIGITS}([KMGTPE]i|[numkMGTPE]|[eE][+-]?{_DIGITS})?$"}
_TEXTS: Schema = {"type": "object", "additionalProperties": _TEXT}
_METADATA: Schema = {  # of a template: all that controller-gen lets in there
    "type": "object",
    "properties": {
        **dict.fromkeys(("name", "namespace"), _TEXT),
        **dict.fromkeys(("labels", "annotations"), _TEXTS),
        "finalizers": {"type": "array", "items": _TEXT},
    },
}
# by the end of a model's name
_SPECIAL = {"ObjectMeta": _METADATA, "Quantity": _QUANTITY, "IntOrString": _EITHER}


def _by(key: str, **rules: Any) -> Schema:
    return {"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": [key], **rules}


_CONTAINER = {"env": _by("name"), "volumeMounts": _by("mountPath")}
_RULES: dict[str, dict[str, Schema]] = {  # by the end of a model's name, and by field
    "V1PodSpec": {name: _by("name") for name in ("containers", "initContainers", "volumes")},
    "V1Container": _CONTAINER,
    "TrainJobSpec": {
        "runtimePatches": _by("manager", maxItems=16),
        "suspend": {"default": False},
        "managedBy": {"default": "trainer.kubeflow.org/trainjob-controller"},
    },
    "RuntimeRef": {
        "apiGroup": {"default": "trainer.kubeflow.org"},
        "kind": {"default": "ClusterTrainingRuntime"},
    },
    "V1alpha1Trainer": {"env": _by("name", maxItems=128)},
    "JobSetSpec": {"replicatedJobs": _by("name")},
}


@functools.cache
def _published(name: str) -> Schema:
    whole = getattr(models, name).model_json_schema(by_alias=True)
    return _expanded(name, whole, whole.get("$defs", {}))


def _expanded(name: str, given: Schema, known: Schema) -> Schema:
    """`name`: of the model that `given` is, if it is one."""
    special = next((schema for end, schema in _SPECIAL.items() if name.endswith(end)), None)
    if special is not None:
        return special
    if "$ref" in given:
        inner = given["$ref"].rpartition("/")[2]
        return _expanded(inner, known[inner], known)
    if "anyOf" in given:
        (only,) = (one for one in given["anyOf"] if one != {"type": "null"})
        return _expanded("", only, known)
    if "properties" in given:
        rules = next((rules for end, rules in _RULES.items() if name.endswith(end)), {})
        fields = {
            field: {**_expanded("", value, known), **rules.get(field, {})}
            for field, value in given["properties"].items()
        }
        return {"type": "object", "properties": fields, "required": given.get("required", [])}
    made = {key: value for key, value in given.items() if key in ("type", "format")}
    for key in ("items", "additionalProperties"):
        if isinstance(given.get(key), dict):
            made[key] = _expanded("", given[key], known)
    return made


def _open(*required: str, **fields: Schema) -> Schema:
    """Other fields are taken as they are."""
    kept = {"x-kubernetes-preserve-unknown-fields": True}
    return {"type": "object", "properties": fields, "required": list(required), **kept}


def definitions() -> list[Schema]:
    pods = _published("IoK8sApiCoreV1PodTemplateSpec")
    group = _open("template", template=pods)
    cluster = _open("headGroupSpec", headGroupSpec=group, workerGroupSpecs={"type": "array", "items": group})
    replicas = {"type": "object", "additionalProperties": _open(template=pods)}
    sets = {"type": "array", "items": _open("name", "template", name=_TEXT, template=pods), **_by("name")}
    runtime = _published("TrainerV1alpha1TrainingRuntimeSpec")
    trainer = "trainer.kubeflow.org/v1alpha1"
    return [
        _definition("RayCluster", "ray.io/v1", cluster),
        _definition("RayJob", "ray.io/v1", _open(rayClusterSpec=cluster, submitterPodTemplate=pods)),
        _definition("RayService", "ray.io/v1", _open("rayClusterConfig", rayClusterConfig=cluster)),
        _definition("JobSet", "jobset.x-k8s.io/v1alpha2", _published("JobsetV1alpha2JobSetSpec")),
        _definition("TrainJob", trainer, _published("TrainerV1alpha1TrainJobSpec")),
        _definition("TrainingRuntime", trainer, runtime),
        _definition("ClusterTrainingRuntime", trainer, runtime, scope="Cluster"),
        _definition(
            "PyTorchJob", "kubeflow.org/v1", _open("pytorchReplicaSpecs", pytorchReplicaSpecs=replicas)
        ),
        _definition("Workload", "kueue.x-k8s.io/v1beta2", _open("podSets", podSets=sets)),
    ]


def _definition(kind: str, api: str, spec: Schema, scope: str = "Namespaced") -> Schema:
    group, _, version = api.partition("/")
    plural = f"{kind.lower()}s"
    fields = {"apiVersion": _TEXT, "kind": _TEXT, "metadata": {"type": "object"}, "spec": spec}
    schema = {"openAPIV3Schema": {"type": "object", "properties": fields}}
    served = {"name": version, "served": True, "storage": True, "schema": schema}
    names = {"kind": kind, "listKind": f"{kind}List", "plural": plural, "singular": kind.lower()}
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"{plural}.{group}"},
        "spec": {"group": group, "names": names, "scope": scope, "versions": [served]},
    }
