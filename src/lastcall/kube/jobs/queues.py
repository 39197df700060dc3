"""Kueue: the Workload of a job in a queue decides whether the job may run.

Kueue starts what it has admitted: a job that is suspended manually runs again at once, and its pods lose a
minute for nothing. An inactive Workload is evicted, which suspends the job, and is not queued again until it
is active.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lastcall.kube.inject.draft import at, items
from lastcall.kube.jobs.kubectl import Kubectl, NotFound

RESOURCE = "workloads.kueue.x-k8s.io"
_QUEUE = "kueue.x-k8s.io/queue-name"
_JOB = "kueue.x-k8s.io/job-uid"


def workload(kubectl: Kubectl, body: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The Workload of a job; None if the job has no queue label or Kueue has created none. Forbidden is
    raised to the caller."""
    metadata = body.get("metadata")
    uid = at(metadata, ("uid",))
    if not at(metadata, ("labels", _QUEUE)) or not isinstance(uid, str):
        return None
    try:
        found = items(kubectl.read("get", RESOURCE, "-l", f"{_JOB}={uid}"), ("items",))
    except NotFound:  # there is no Kueue in this cluster: the label does nothing
        return None
    return next((one for one in found if isinstance(one, dict) and not _finished(one)), None)


def active(body: Mapping[str, Any]) -> bool:
    return at(body, ("spec", "active")) is not False


def activate(kubectl: Kubectl, body: Mapping[str, Any], value: bool) -> Mapping[str, Any]:
    """Returns the updated Workload."""
    return kubectl.patch(RESOURCE, str(at(body, ("metadata", "name"))), {"spec": {"active": value}})


def _finished(body: Mapping[str, Any]) -> bool:
    return any(
        (at(one, ("type",)), at(one, ("status",))) == ("Finished", "True")
        for one in items(body, ("status", "conditions"))
    )
