"""`lastcall kube status|pause|resume`: the jobs that a user has in a cluster.

A Job, a TrainJob and a RayJob all have `spec.suspend`: their controllers then delete the pods, the kubelet
sends SIGTERM, and the run saves. Where Kueue decides what runs, its Workload is deactivated instead: see
queues.py. Kubernetes before 1.21 does not know the field of a Job and drops it silently; there `parallelism:
0` does the same, and the former number is kept in an annotation.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from lastcall import errors
from lastcall.kube.inject.annotations import PARALLELISM
from lastcall.kube.jobs import progress, queues
from lastcall.kube.jobs.kubectl import Forbidden, Kubectl, KubectlError, NotFound

_SWITCHES = ("LASTCALL_ENABLED", "RAY_TRAIN_JIT_CHECKPOINT_ENABLED")
_EXEC_SECONDS = 20.0


@dataclass(frozen=True)
class JobKind:
    name: str  # as a user writes it
    title: str  # as Kubernetes does
    resource: str
    words: tuple[str, ...]


KINDS = (
    JobKind("job", "Job", "jobs.batch", ("job", "jobs", "job.batch", "jobs.batch")),
    JobKind(
        "trainjob",
        "TrainJob",
        "trainjobs.trainer.kubeflow.org",
        ("trainjob", "trainjobs", "trainjobs.trainer.kubeflow.org"),
    ),
    JobKind("rayjob", "RayJob", "rayjobs.ray.io", ("rayjob", "rayjobs", "rayjobs.ray.io")),
)


@dataclass(frozen=True)
class ClusterJob:
    """A job as the API server has it."""

    kind: JobKind
    name: str
    body: Mapping[str, Any]
    workload: Mapping[str, Any] | None = None  # Kueue's, which decides whether it runs
    unseen: str | None = None  # why that is unknown although the job is in a queue

    def __str__(self) -> str:
        return f"{self.kind.name}/{self.name}"

    @property
    def namespace(self) -> str:
        return str(_map(self.body, "metadata").get("namespace", ""))

    @property
    def parallelism(self) -> str | None:
        """What it was before it was paused by that."""
        value = _map(_map(self.body, "metadata"), "annotations").get(PARALLELISM)
        return value if isinstance(value, str) else None

    @property
    def suspended(self) -> bool:
        return _map(self.body, "spec").get("suspend") is True

    @property
    def paused(self) -> bool:
        if self.workload is not None:
            return not queues.active(self.workload)
        return self.suspended or self.parallelism is not None

    @property
    def unpausable(self) -> str | None:
        """Why its controller would not suspend it, or would treat it as invalid and ignore it."""
        spec = _map(self.body, "spec")
        if self.unseen is not None:
            return f"it is in a Kueue queue, whose Workload decides whether it runs: {self.unseen}"
        if self.kind.title == "RayJob" and spec.get("clusterSelector"):
            return (
                "it runs on an existing RayCluster, and KubeRay suspends only clusters that it creates itself"
            )
        if self.kind.title == "RayJob" and spec.get("shutdownAfterJobFinishes") is not True:
            change = '{"spec": {"shutdownAfterJobFinishes": true}}'
            return (
                "KubeRay only suspends a RayJob with shutdownAfterJobFinishes. Set it, and pause again: "
                f"kubectl patch {self.kind.resource} {self.name} --type=merge -p '{change}'"
            )
        return None

    @property
    def ended(self) -> str | None:
        """How it ended, if it ended for good: its controller starts nothing more."""
        status = _map(self.body, "status")
        for condition in status.get("conditions") or []:
            if (
                isinstance(condition, dict)
                and condition.get("status") == "True"
                and condition.get("type") in ("Complete", "Failed")
            ):
                return {"Complete": "finished", "Failed": "failed"}[condition["type"]]
        return {"Complete": "finished", "Failed": "failed"}.get(str(status.get("jobDeploymentStatus")))

    @property
    def owner(self) -> str | None:
        """The owner that would undo a change to it: "RayJob x"."""
        for reference in _map(self.body, "metadata").get("ownerReferences") or []:
            if (
                isinstance(reference, dict)
                and reference.get("controller")
                and reference.get("kind") in ("RayJob", "JobSet", "TrainJob")
            ):
                return f"{reference['kind']} {reference.get('name')}"
        return None

    @property
    def selectors(self) -> list[str]:
        """Of its pods."""
        if self.kind.title == "TrainJob":
            return [f"jobset.sigs.k8s.io/jobset-name={self.name}"]
        if self.kind.title == "RayJob":
            cluster = _map(self.body, "status").get("rayClusterName")
            return [
                f"job-name={self.name}",
                *([f"ray.io/cluster={cluster}"] if isinstance(cluster, str) and cluster else []),
            ]
        return [f"job-name={self.name}"]


@dataclass(frozen=True)
class Pod:
    name: str
    phase: str
    container: str  # the one that trains
    leaving: bool = False
    node: str = ""
    restarts: int = 0
    terminated: bool = False  # its container
    message: str = ""  # ... and what that has left in its termination message

    @property
    def gone(self) -> bool:
        """Nothing of it runs any more, and it is not being removed: an object in deletion exists until it is
        no longer listed."""
        return self.phase in ("Succeeded", "Failed") and not self.leaving


@dataclass(frozen=True)
class PodStatus:
    pod: Pod
    runs: Sequence[progress.PodRun] = ()
    because: str = ""  # why its runs are unknown


@dataclass(frozen=True)
class JobStatus:
    target: ClusterJob
    pods: Sequence[PodStatus] = field(default=())

    @property
    def state(self) -> str:
        """ "finished" and "failed" for good, "paused", "pausing" (pods are still there), "queued" (by Kueue),
        "running", "starting", "waiting" (no pods)."""
        there = [item.pod for item in self.pods if not item.pod.gone]
        if self.target.ended is not None:
            return self.target.ended
        if self.target.paused:
            return "pausing" if there else "paused"
        if self.target.workload is not None and self.target.suspended and not there:
            return "queued"
        if any(pod.phase == "Running" for pod in there):
            return "running"
        return "starting" if there else "waiting"


def find(kubectl: Kubectl, name: str) -> ClusterJob:
    """The job that a user means by `job/x`, `trainjob/x`, `rayjob/x`, or by `x` alone."""
    word, _, rest = name.rpartition("/")
    kinds = [kind for kind in KINDS if not word or word.lower() in kind.words]
    if not kinds or not rest or rest.startswith("-"):
        raise errors.LastcallError(
            f"{name!r} is not the name of a job. Write NAME, job/NAME, trainjob/NAME or rayjob/NAME."
        )
    found, refused = [], None
    for kind in kinds:
        try:
            found.append(ClusterJob(kind, rest, kubectl.read("get", kind.resource, rest)))
        except NotFound:
            continue
        except Forbidden as error:  # another kind may be meant; the user may not be aware of this one
            refused = error
    owned = {f"{target.kind.title} {target.name}" for target in found}
    # the Job by which a RayJob submits has its name
    found = [target for target in found if target.owner not in owned]
    if len(found) > 1:
        raise errors.LastcallError(f"{name!r} is ambiguous: {' or '.join(map(str, found))}.")
    if found:
        return _queued(kubectl, found[0])
    if refused is not None:
        raise refused
    where = (
        f"namespace {kubectl.namespace}"
        if kubectl.namespace
        else "the namespace of this context (another one: --namespace NAME)"
    )
    raise NotFound(f"there is no {', '.join(kind.title for kind in kinds)} called {rest} in {where}")


def pods(kubectl: Kubectl, target: ClusterJob) -> list[Pod]:
    """Those that the job has, in order of their names."""
    found = {pod.name: pod for selector in target.selectors for pod in map(pod_of, kubectl.pods(selector))}
    return [found[name] for name in sorted(found)]


def status(kubectl: Kubectl, name: str) -> JobStatus:
    target = find(kubectl, name)
    return JobStatus(target, [_look(kubectl, pod) for pod in pods(kubectl, target)])


def suspend(kubectl: Kubectl, target: ClusterJob) -> ClusterJob:
    """Have its pods deleted, and none created, until resume(). Returns the updated job."""
    if target.workload is not None:
        return replace(target, workload=queues.activate(kubectl, target.workload, False))
    body = kubectl.patch(target.kind.resource, target.name, {"spec": {"suspend": True}})
    if _map(body, "spec").get("suspend") is True:
        return ClusterJob(target.kind, target.name, body)
    if target.kind.title != "Job":
        raise KubectlError(
            f"{target} cannot be paused: this cluster's {target.kind.title} has no spec.suspend"
        )
    former = _map(body, "spec").get("parallelism", 1)
    change = {"metadata": {"annotations": {PARALLELISM: str(former)}}, "spec": {"parallelism": 0}}
    return ClusterJob(target.kind, target.name, kubectl.patch(target.kind.resource, target.name, change))


def resume(kubectl: Kubectl, name: str) -> tuple[ClusterJob, bool]:
    """Resume it. Returns the job, and whether it was paused."""
    target = find(kubectl, name)
    change: dict[str, Any] = {}
    if target.unseen is not None:
        raise Forbidden(f"{target} cannot be resumed: {target.unpausable}")
    if target.workload is not None:  # Kueue starts it when its turn comes
        was_paused = target.paused
        return (
            replace(target, workload=queues.activate(kubectl, target.workload, True))
            if was_paused
            else target
        ), was_paused
    if target.suspended:
        change = {"spec": {"suspend": False}}
    elif target.parallelism is not None:
        former = int(target.parallelism) if target.parallelism.isdecimal() else 1
        change = {"metadata": {"annotations": {PARALLELISM: None}}, "spec": {"parallelism": max(1, former)}}
    if change:
        target = ClusterJob(
            target.kind, target.name, kubectl.patch(target.kind.resource, target.name, change)
        )
    return target, bool(change)


def _queued(kubectl: Kubectl, target: ClusterJob) -> ClusterJob:
    """With its Kueue Workload."""
    try:
        return replace(target, workload=queues.workload(kubectl, target.body))
    except Forbidden as error:
        return replace(target, unseen=str(error))


def _look(kubectl: Kubectl, pod: Pod) -> PodStatus:
    if pod.phase != "Running":
        return PodStatus(pod, because=pod.phase.lower())
    try:
        words = ("exec", pod.name, "-c", pod.container, "--", "sh", "-c", progress.SCRIPT)
        runs = progress.parse(kubectl.run(*words, seconds=_EXEC_SECONDS))
    except KubectlError as error:
        return PodStatus(pod, because=str(error))
    return PodStatus(pod, runs, "" if runs else "no lastcall run holds a directory in this pod (yet)")


def pod_of(body: Mapping[str, Any]) -> Pod:
    metadata, spec, state = _map(body, "metadata"), _map(body, "spec"), _map(body, "status")
    containers = [item for item in spec.get("containers") or [] if isinstance(item, dict)]
    trains = next((item for item in containers if _switched_on(item)), containers[0] if containers else {})
    statuses = [item for item in state.get("containerStatuses") or [] if isinstance(item, dict)]
    counts = [item.get("restartCount", 0) for item in statuses]
    states = [_map(item, "state") for item in statuses if item.get("name") == trains.get("name")]
    ended = [_map(item, "terminated") for item in states if "terminated" in item]
    return Pod(
        name=str(metadata.get("name", "")),
        phase=str(state.get("phase", "Unknown")),
        container=str(trains.get("name", "")),
        leaving="deletionTimestamp" in metadata,
        node=str(spec.get("nodeName") or ""),
        restarts=sum(count for count in counts if isinstance(count, int)),
        terminated=bool(ended),
        message=str(ended[0].get("message") or "") if ended else "",
    )


def _switched_on(container: Mapping[str, Any]) -> bool:
    return any(
        isinstance(item, dict) and item.get("name") in _SWITCHES for item in container.get("env") or []
    )


def _map(body: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    value = body.get(name)
    return value if isinstance(value, Mapping) else {}
