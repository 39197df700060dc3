"""The kinds of KubeRay, Kubeflow and JobSet, as CustomResourceDefinitions for a test cluster.

    python tests/helpers/kube/definitions/kinds.py FOLDER          writes them there as YAML
    python tests/helpers/kube/definitions/kinds.py check WHEEL     compares the PyTorchJob with the models in
    kubeflow_training's wheel

The projects' own are files of their releases, which no registry that we reach has.
`LASTCALL_KUBE_CRDS=FOLDER` names a folder with them: what is in it is installed, instead of what is here by
the same name. Without it:

- TrainJob, TrainingRuntime, ClusterTrainingRuntime (trainer.kubeflow.org/v1alpha1) and JobSet (v1alpha2) are
  made from the models that
  Kubeflow itself publishes as kubeflow_trainer_api, 2.3.0 by constraints.txt. The pods in all kinds are those
  of this package, too: younger than this server, as in the real definitions.
- RayCluster, RayJob, RayService and PyTorchJob are written by hand from the projects' Go types. So are, for
  all, the rules that models
  have lost (rules.py).
- Not here: rules in CEL, which this server does not know; second versions (KubeRay's v1alpha1); the columns
  that `kubectl get` prints.
"""

from __future__ import annotations

import functools
import os
import sys
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

sys.path.append(str(Path(__file__).resolve().parents[3]))  # as pytest does
from helpers.kube.definitions import kuberay as kube_ray
from helpers.kube.definitions.rules import QUANTITY, Schema
from helpers.kube.definitions.schemas import (
    COUNT,
    FLAG,
    LONG,
    TEXT,
    TIME,
    as_old_servers_take_it,
    generated,
    named,
    published,
    several,
    struct,
    walk,
)

FOLDER = "LASTCALL_KUBE_CRDS"
_KIND = "CustomResourceDefinition"
_KEPT = ("name", "labels", "annotations")  # of the metadata of a definition that comes from another cluster
_APPLIED = "kubectl.kubernetes.io/last-applied-configuration"


@dataclass(frozen=True)
class Kind:
    """`name` is its kind; `spec` what a user may say, `status` what its controller does."""

    name: str
    group: str
    version: str
    spec: Schema
    status: Schema | None = None
    cluster_wide: bool = False
    names: Schema = field(default_factory=dict)
    scale: Schema = field(default_factory=dict)

    def definition(self) -> Schema:
        plural = f"{self.name.lower()}s"
        fields = {"apiVersion": TEXT, "kind": TEXT, "metadata": {"type": "object"}, "spec": self.spec}
        subresources: Schema = {}
        if self.status is not None:
            fields["status"] = self.status
            subresources = {"status": {}, **({"scale": self.scale} if self.scale else {})}
        version = {"name": self.version, "served": True, "storage": True, "subresources": subresources}
        version["schema"] = {"openAPIV3Schema": struct(**fields)}
        names = {
            "kind": self.name,
            "listKind": f"{self.name}List",
            "plural": plural,
            "singular": self.name.lower(),
            **self.names,
        }
        spec = {
            "group": self.group,
            "names": names,
            "scope": "Cluster" if self.cluster_wide else "Namespaced",
            "versions": [version],
        }
        return {
            "apiVersion": "apiextensions.k8s.io/v1",
            "kind": _KIND,
            "metadata": {"name": f"{plural}.{self.group}"},
            "spec": spec,
        }


def all_kinds() -> list[Kind]:
    trainer, jobset = "trainer.kubeflow.org", "JobsetV1alpha2JobSet"
    runtime = published("TrainerV1alpha1TrainingRuntimeSpec")
    everywhere = {"categories": ["all"]}
    return [
        Kind("RayCluster", "ray.io", "v1", kube_ray.cluster(), kube_ray.cluster_status(), names=everywhere),
        Kind("RayJob", "ray.io", "v1", kube_ray.job(), kube_ray.job_status(), names=everywhere),
        Kind("RayService", "ray.io", "v1", kube_ray.service(), kube_ray.service_status(), names=everywhere),
        Kind(
            "JobSet", "jobset.x-k8s.io", "v1alpha2", published(f"{jobset}Spec"), published(f"{jobset}Status")
        ),
        Kind(
            "TrainJob",
            trainer,
            "v1alpha1",
            published("TrainerV1alpha1TrainJobSpec"),
            published("TrainerV1alpha1TrainJobStatus"),
        ),
        Kind("TrainingRuntime", trainer, "v1alpha1", runtime),
        Kind("ClusterTrainingRuntime", trainer, "v1alpha1", runtime, cluster_wide=True),
        Kind("PyTorchJob", "kubeflow.org", "v1", _pytorch_job(), _pytorch_status(), scale=_SCALE),
    ]


_SCALE = {
    "specReplicasPath": ".spec.pytorchReplicaSpecs.Worker.replicas",
    "statusReplicasPath": ".status.replicaStatuses.Worker.active",
    "labelSelectorPath": ".status.replicaStatuses.Worker.selector",
}


def _pytorch_job() -> Schema:
    replica = struct(replicas=COUNT, template=kube_ray.core("PodTemplateSpec"), restartPolicy=TEXT)
    scheduling = struct(
        minAvailable=COUNT,
        queue=TEXT,
        minResources=named(QUANTITY),
        priorityClass=TEXT,
        scheduleTimeoutSeconds=COUNT,
    )
    policy = struct(
        cleanPodPolicy=TEXT, ttlSecondsAfterFinished=COUNT, activeDeadlineSeconds=LONG, backoffLimit=COUNT,
        schedulingPolicy=scheduling, suspend={**FLAG, "default": False}, managedBy=TEXT,
    )  # fmt: skip
    elastic = struct(
        minReplicas=COUNT,
        maxReplicas=COUNT,
        rdzvBackend=TEXT,
        rdzvPort=COUNT,
        rdzvHost=TEXT,
        rdzvId=TEXT,
        rdzvConf=several(struct(key=TEXT, value=TEXT)),
        standalone=FLAG,
        nProcPerNode=COUNT,
        maxRestarts=COUNT,
        metrics=several(generated("V2MetricSpec")),
    )
    return struct(
        "pytorchReplicaSpecs",
        runPolicy=policy,
        elasticPolicy=elastic,
        pytorchReplicaSpecs=named(replica),
        nprocPerNode=TEXT,
    )


def _pytorch_status() -> Schema:
    condition = struct(
        "status",
        "type",
        type=TEXT,
        status=TEXT,
        reason=TEXT,
        message=TEXT,
        lastUpdateTime=TIME,
        lastTransitionTime=TIME,
    )
    selector = published("IoK8sApimachineryPkgApisMetaV1LabelSelector")
    replica = struct(active=COUNT, succeeded=COUNT, failed=COUNT, labelSelector=selector, selector=TEXT)
    times = dict.fromkeys(("startTime", "completionTime", "lastReconcileTime"), TIME)
    return struct(conditions=several(condition), replicaStatuses=named(replica), **times)


def definitions() -> list[Schema]:
    """Those to install: the ones in the folder that LASTCALL_KUBE_CRDS names, and ours of which it has
    none."""
    folder = os.environ.get(FOLDER)
    given = read(Path(folder)) if folder else []
    names = {one["metadata"]["name"] for one in given}
    ours = (kind.definition() for kind in all_kinds())
    return [_fitted(one) for one in (*given, *(one for one in ours if one["metadata"]["name"] not in names))]


def _fitted(definition: Schema) -> Schema:
    versions = [_fitted_version(version) for version in definition["spec"].get("versions", ())]
    return {**definition, "spec": {**definition["spec"], "versions": versions}}


def _fitted_version(version: Schema) -> Schema:
    if "schema" not in version:
        return version
    return {
        **version,
        "schema": {"openAPIV3Schema": as_old_servers_take_it(version["schema"]["openAPIV3Schema"])},
    }


def read(folder: Path) -> list[Schema]:
    """The definitions in the YAML files of a folder, as releases have them or `kubectl get crd -o yaml`
    prints them."""
    if not folder.is_dir():
        raise ValueError(
            f"{FOLDER}={folder} is not a folder. Put the projects' {_KIND}s there as YAML files, or unset it"
        )
    files = sorted(path for path in folder.iterdir() if path.suffix in (".yaml", ".yml", ".json"))
    found = {one["metadata"]["name"]: one for path in files for one in _in_file(path)}
    if not found:
        raise ValueError(
            f"{FOLDER}={folder} has no {_KIND} in its {len(files)} YAML files. Put the "
            "projects' own there, or unset it"
        )
    return list(found.values())


def _in_file(path: Path) -> Iterator[Schema]:
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # a release has megabytes of it
    for document in yaml.load_all(path.read_text(), loader):
        kind = document.get("kind", "") if isinstance(document, dict) else ""
        items = document["items"] if kind.endswith("List") else [document]
        # in a list, it may be left out
        for one in ({"kind": kind.removesuffix("List"), **item} for item in items if item):
            if one["kind"] == _KIND:
                yield _as_new(one)


def _as_new(given: Schema) -> Schema:
    """Without what another cluster has added, and without a conversion, which needs the project's
    controller."""
    metadata = {key: value for key, value in given["metadata"].items() if key in _KEPT}
    metadata["annotations"] = {
        key: value for key, value in metadata.get("annotations", {}).items() if key != _APPLIED
    }
    spec = {key: value for key, value in given["spec"].items() if key != "conversion"}
    return {
        "apiVersion": given.get("apiVersion", "apiextensions.k8s.io/v1"),
        "kind": _KIND,
        "metadata": metadata,
        "spec": spec,
    }


def write(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for kind in all_kinds():
        made = kind.definition()
        text = yaml.dump(made, Dumper=_Dumper, sort_keys=False)
        (folder / f"{made['metadata']['name']}.yaml").write_text(text)


class _Dumper(yaml.SafeDumper):
    """A file without anchors, as people write them."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def differences(wheel: Path) -> list[str]:
    """Between our PyTorchJob's fields and those in a wheel of kubeflow_training. Run by hand: it has no place
    beside Kubeflow's SDK."""
    theirs, ours = (
        {(path, one.get("type")) for path, one in walk(spec) if not path.startswith(_OTHERS)}
        for spec in (
            generated("KubeflowOrgV1PyTorchJobSpec", functools.partial(_model_text, zipfile.ZipFile(wheel))),
            _pytorch_job(),
        )
    )
    return [f"only theirs: {it}" for it in sorted(theirs - ours)] + [
        f"only ours: {it}" for it in sorted(ours - theirs)
    ]


# Kubernetes' own, which the wheel has not
_OTHERS = (".pytorchReplicaSpecs{}.template", ".elasticPolicy.metrics[]")
_NOTHING = "openapi_types = {} attribute_map = {}"


def _model_text(wheel: zipfile.ZipFile, name: str) -> str:
    texts = (
        wheel.read(file).decode() for file in wheel.namelist() if file.startswith("kubeflow/training/models/")
    )
    return next((text for text in texts if f"class {name}(" in text), _NOTHING)


if __name__ == "__main__":
    if sys.argv[1] == "check":
        print("\n".join(differences(Path(sys.argv[2]))) or "no difference")
    else:
        write(Path(sys.argv[1]))
