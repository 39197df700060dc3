"""The kinds of KubeRay, Kubeflow, JobSet and Kueue by their projects' own CustomResourceDefinitions.

Their files cannot be committed here. They are read from the folder that LASTCALL_KUBE_CRDS names, else from
shared/kube/crds beside the checkout. For a kind that is missing there, a generated definition serves, and the
tests say so in one line.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator
from pathlib import Path

from helpers.kube.definitions import checks
from helpers.kube.definitions.checks import Schema

FOLDER = "LASTCALL_KUBE_CRDS"
BESIDE = Path(__file__).resolve().parents[5] / "shared" / "kube" / "crds"
_KIND = "CustomResourceDefinition"
_GROUPS = {
    **dict.fromkeys(("RayCluster", "RayJob", "RayService"), "ray.io"),
    **dict.fromkeys(("TrainJob", "TrainingRuntime", "ClusterTrainingRuntime"), "trainer.kubeflow.org"),
    "PyTorchJob": "kubeflow.org",
    "JobSet": "jobset.x-k8s.io",
    "Workload": "kueue.x-k8s.io",
}
NAMES = {kind: f"{kind.lower()}s.{group}" for kind, group in _GROUPS.items()}  # of the definitions


def folder() -> Path | None:
    """Where the projects' own are; None where they are missing."""
    if named := os.environ.get(FOLDER):
        return Path(named)
    return BESIDE if BESIDE.is_dir() else None


def missing() -> str | None:
    """The line for people."""
    if folder() is not None:
        return None
    return f"The projects' {_KIND}s are not here ({FOLDER} names no folder): generated ones serve."


def definitions() -> dict[str, Schema]:
    """By name: those of the folder, and of NAMES what it has not."""
    return _found(folder())


@functools.cache  # a release has megabytes of it
def _found(place: Path | None) -> dict[str, Schema]:
    theirs = read(place) if place is not None else {}
    if theirs.keys() >= set(NAMES.values()):
        return theirs
    from helpers.kube.definitions import generated  # needs Kubeflow's package

    return {one["metadata"]["name"]: one for one in generated.definitions()} | theirs


def schemas(kind: str) -> dict[str, Schema]:
    """Of each served version, by the `apiVersion` of an object."""
    spec = definitions()[NAMES[kind]]["spec"]
    return {
        f"{spec['group']}/{version['name']}": version["schema"]["openAPIV3Schema"]
        for version in spec["versions"]
        if version["served"]
    }


def faults(item: Schema) -> list[str]:
    """What the API server would refuse or drop of an object. Its metadata is the same for all kinds."""
    schema = schemas(item["kind"])[item["apiVersion"]]
    return list(checks.faults({key: item[key] for key in item if key != "metadata"}, schema))


def read(place: Path) -> dict[str, Schema]:
    """The definitions in the YAML files of a folder, as releases have them or `kubectl get crd -o yaml`
    prints them."""
    if not place.is_dir():
        raise ValueError(
            f"{FOLDER}={place} is not a folder. Put the projects' {_KIND}s there as YAML files, or unset it"
        )
    files = sorted(path for path in place.iterdir() if path.suffix in (".yaml", ".yml", ".json"))
    found = {one["metadata"]["name"]: one for path in files for one in _in_file(path)}
    if not found:
        raise ValueError(
            f"{FOLDER}={place} has no {_KIND} in its {len(files)} YAML files. Put the projects' own there, "
            "or unset it"
        )
    return found


def _in_file(path: Path) -> Iterator[Schema]:
    import yaml

    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    for document in yaml.load_all(path.read_text(encoding="utf-8"), loader):
        kind = document.get("kind", "") if isinstance(document, dict) else ""
        items = document["items"] if kind.endswith("List") else [document]
        # in a list, it may be left out
        for one in ({"kind": kind.removesuffix("List"), **item} for item in items if item):
            if one["kind"] == _KIND:
                yield one
