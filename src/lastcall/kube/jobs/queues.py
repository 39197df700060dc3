"""Kueue: whether a job that stands in a queue may run is said by its Workload.

Kueue starts what it has admitted: a job that is suspended by hand runs again at once, and its pods have lost a minute for nothing. A
Workload that is not active is evicted, which suspends the job, and does not come back into the queue until it is active again.
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
    """Of a job as the API server has it; None where no queue is asked for, or Kueue has made nothing of it. Forbidden goes through."""
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
    """The Workload as it is then."""
    return kubectl.patch(RESOURCE, str(at(body, ("metadata", "name"))), {"spec": {"active": value}})


def _finished(body: Mapping[str, Any]) -> bool:
    return any((at(one, ("type",)), at(one, ("status",))) == ("Finished", "True") for one in items(body, ("status", "conditions")))
