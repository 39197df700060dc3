from __future__ import annotations

from typing import Any

from lastcall.kube.jobs import jobs


def test_a_message_is_that_of_the_container_that_trains() -> None:
    ended = [
        {"name": "sidecar", "state": {"terminated": {"message": "bye"}}},
        {"name": "train", "state": {"terminated": {"message": "trained", "exitCode": 75}}},
    ]
    containers = [{"name": "sidecar"}, {"name": "train", "env": [{"name": "LASTCALL_ENABLED"}]}]
    body: dict[str, Any] = {"spec": {"containers": containers}, "status": {"containerStatuses": ended}}
    assert (jobs.pod_of(body).terminated, jobs.pod_of(body).message) == (True, "trained")
    body["status"] = {"containerStatuses": [ended[0], {"name": "train", "state": {"running": {}}}]}
    assert (jobs.pod_of(body).terminated, jobs.pod_of(body).message) == (False, "")
