"""The kinds of objects that hold pod templates, where they hold them, and which container trains.

Objects are not trusted: one without the shape of its kind has no template here, and the API server will
refuse it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

from lastcall.kube.inject.draft import Object, Path, at, items

Update = Literal["never", "rolls", "free"]
VOLUME = "lastcall"  # of the package and the stop file
_DEFAULT_CONTAINER = "kubectl.kubernetes.io/default-container"
# the role of a job in a TrainJob's JobSet: trainer, or an initializer
_STEP = "trainer.kubeflow.org/trainjob-ancestor-step"


@dataclass(frozen=True)
class Template:
    """A pod template in which one container trains."""

    path: Path  # of the template, with its metadata and spec; () for a Pod
    container: int  # its index
    job: Path | None = None  # of the spec of the Job around it
    windows: bool = False  # its pods run there
    exit_codes: bool = False  # its controller only retries exit codes from 128 on
    final: bool = False  # its controller treats the first pod that exits as the end, saved or not

    @property
    def spec(self) -> Path:
        return (*self.path, "spec")

    @property
    def trainer(self) -> Path:
        return (*self.spec, "containers", self.container)


@dataclass(frozen=True)
class ObjectKind:
    group: str
    name: str
    plural: str
    find: Callable[[Object], Iterator[Template]]
    update: Update
    """The effect of a template change on an existing object: it is refused ("never"), it replaces the running
    pods ("rolls"), or it affects later pods only ("free")."""
    ray: bool = False


def _container(obj: Object, path: Path, name: str | None = None) -> int | None:
    """The container that trains: the one of this name, else kubectl's default, else the first.

    A container that mounts our volume trains: another webhook may since have inserted a sidecar before it.
    """
    containers = items(obj, (*path, "spec", "containers"))
    names = [at(item, ("name",)) for item in containers]
    if not names or not all(isinstance(known, str) for known in names):
        return None
    for index, item in enumerate(containers):
        if any(at(mount, ("name",)) == VOLUME for mount in items(item, ("volumeMounts",))):
            return index
    for wanted in (name, at(obj, (*path, "metadata", "annotations", _DEFAULT_CONTAINER))):
        if isinstance(wanted, str) and wanted in names:
            return names.index(wanted)
    return 0


def _windows(obj: Object, path: Path) -> bool:
    """Whether these pods run on Windows: the API server refuses Linux security settings in them, and lastcall
    does not run there."""
    selected = at(obj, (*path, "spec", "nodeSelector", "kubernetes.io/os"))
    return "windows" in (at(obj, (*path, "spec", "os", "name")), selected)


def _one(path: Path, job: Path | None = None) -> Callable[[Object], Iterator[Template]]:
    def find(obj: Object) -> Iterator[Template]:
        index = _container(obj, path)
        if index is not None:
            yield Template(path, index, job, _windows(obj, path))

    return find


def _ray(cluster: Path) -> Callable[[Object], Iterator[Template]]:
    """The head and all groups of workers; KubeRay runs Ray in the first container, whatever its name."""

    def find(obj: Object) -> Iterator[Template]:
        paths: list[Path] = [(*cluster, "headGroupSpec", "template")]
        groups = items(obj, (*cluster, "workerGroupSpecs"))
        paths += [(*cluster, "workerGroupSpecs", index, "template") for index in range(len(groups))]
        for path in paths:
            if _container(obj, path) is not None:
                yield Template(path, 0, windows=_windows(obj, path))

    return find


def _replicas(obj: Object) -> Iterator[Template]:
    replicas = at(obj, ("spec", "pytorchReplicaSpecs"))
    for role, replica in replicas.items() if isinstance(replicas, dict) else ():
        path: Path = ("spec", "pytorchReplicaSpecs", role, "template")
        index = _container(obj, path, "pytorch")
        if index is not None and isinstance(role, str):
            policy = replica.get("restartPolicy")
            yield Template(path, index, None, _windows(obj, path), policy == "ExitCode", policy == "Never")


def _replicated_jobs(obj: Object) -> Iterator[Template]:
    for number in range(len(items(obj, ("spec", "replicatedJobs")))):
        job: Path = ("spec", "replicatedJobs", number, "template")
        step = at(obj, (*job, "metadata", "labels", _STEP))
        path: Path = (*job, "spec", "template")
        index = _container(obj, path, "node" if step == "trainer" else None)
        if index is not None and step in (None, "trainer"):
            yield Template(path, index, (*job, "spec"), _windows(obj, path))


def _nothing(obj: Object) -> Iterator[Template]:
    """A TrainJob names a runtime and holds no template: see trainjobs.py."""
    return iter(())


KINDS = (
    ObjectKind("ray.io", "RayCluster", "rayclusters", _ray(("spec",)), "rolls", ray=True),
    ObjectKind("ray.io", "RayJob", "rayjobs", _ray(("spec", "rayClusterSpec")), "rolls", ray=True),
    ObjectKind("ray.io", "RayService", "rayservices", _ray(("spec", "rayClusterConfig")), "rolls", ray=True),
    ObjectKind("trainer.kubeflow.org", "TrainJob", "trainjobs", _nothing, "never"),
    ObjectKind("kubeflow.org", "PyTorchJob", "pytorchjobs", _replicas, "never"),
    ObjectKind("jobset.x-k8s.io", "JobSet", "jobsets", _replicated_jobs, "never"),
    ObjectKind("batch", "Job", "jobs", _one(("spec", "template"), ("spec",)), "never"),
    ObjectKind(
        "batch", "CronJob", "cronjobs",
        _one(("spec", "jobTemplate", "spec", "template"), ("spec", "jobTemplate", "spec")), "free",
    ),
    ObjectKind("apps", "StatefulSet", "statefulsets", _one(("spec", "template")), "rolls"),
    ObjectKind("apps", "Deployment", "deployments", _one(("spec", "template")), "rolls"),
    ObjectKind("", "Pod", "pods", _one(()), "never"),
)  # fmt: skip
_OWNERS = {(kind.group, kind.name) for kind in KINDS} | {("apps", "ReplicaSet")}


def of(obj: Any) -> ObjectKind | None:
    """The kind of an object; None if it is not supported."""
    group, name = _group(at(obj, ("apiVersion",))), at(obj, ("kind",))
    return next((kind for kind in KINDS if (kind.group, kind.name) == (group, name)), None)


def names() -> list[str]:
    return [kind.name for kind in KINDS]


def owned(obj: Object) -> bool:
    """Whether it was created by the controller of an object that is reviewed itself."""
    return any(owner in _OWNERS for owner in _owners(obj))


def made_by_controller(obj: Object) -> bool:
    """Whether a controller created it, so that no user sees an error message about it."""
    return bool(_owners(obj))


def runs_ray(obj: Object, kind: ObjectKind) -> bool:
    """Whether Ray runs in its pods: a pod that KubeRay made of a template is one of Ray's, whatever its
    kind."""
    return kind.ray or ("ray.io", "RayCluster") in _owners(obj)


def _owners(obj: Object) -> set[tuple[str | None, object]]:
    """Group and kind of the controller that made it."""
    found = [
        one
        for one in items(obj, ("metadata", "ownerReferences"))
        if isinstance(one, dict) and one.get("controller") is True
    ]
    return {
        (_group(one.get("apiVersion")), one.get("kind")) for one in found if isinstance(one.get("kind"), str)
    }


def _group(version: object) -> str | None:
    if not isinstance(version, str):
        return None
    group, slash, _ = version.partition("/")
    return group if slash else ""
