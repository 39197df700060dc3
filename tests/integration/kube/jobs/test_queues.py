"""Jobs whose controllers have rules of their own for being suspended."""

from __future__ import annotations

from typing import Any

import pytest

from helpers.kube.fake_kubectl import Cluster, message
from lastcall import errors
from lastcall.cli import main
from lastcall.kube.jobs import jobs, queues, suspension
from lastcall.kube.jobs.kubectl import Forbidden, Kubectl

SAVED = message("saved", "checkpoint-7")


def queue(
    cluster: Cluster, *, suspended: bool = False, active: bool | None = None, workload: bool = True
) -> None:
    metadata = {
        "name": "x",
        "namespace": "team",
        "uid": "u-1",
        "labels": {"kueue.x-k8s.io/queue-name": "gpus"},
    }
    cluster.add("jobs.batch", "x", metadata=metadata, spec={"suspend": suspended})
    of = {"labels": {"kueue.x-k8s.io/job-uid": "u-1"}}
    done = {"conditions": [{"type": "Finished", "status": "True"}]}
    cluster.add(queues.RESOURCE, "job-x-1", metadata={"name": "job-x-1", **of}, spec={}, status=done)
    if workload:
        spec = {} if active is None else {"active": active}
        cluster.add(queues.RESOURCE, "job-x-2", metadata={"name": "job-x-2", **of}, spec=spec)


def active(cluster: Cluster) -> Any:
    return cluster.get(queues.RESOURCE, "job-x-2")["spec"].get("active")


def test_a_job_in_a_queue_is_paused_by_its_workload(cluster: Cluster, kubectl: Kubectl) -> None:
    """Kueue would start one that is suspended by hand again at once."""
    queue(cluster)
    cluster.pod("x-0", "job-name=x", says=SAVED)
    done = suspension.pause(kubectl, "x", interval=0.01)
    assert (done.new, done.gone, done.lost) == (True, True, False)
    assert active(cluster) is False
    assert cluster.get("jobs.batch", "x")["spec"] == {"suspend": False}  # that is Kueue's to do
    assert cluster.get(queues.RESOURCE, "job-x-1")["spec"] == {}


def test_resuming_puts_it_back_into_the_queue(cluster: Cluster, kubectl: Kubectl) -> None:
    queue(cluster, suspended=True, active=False)
    assert jobs.status(kubectl, "x").state == "paused"
    assert jobs.resume(kubectl, "x")[1]
    assert active(cluster) is True
    assert cluster.get("jobs.batch", "x")["spec"] == {"suspend": True}
    assert jobs.status(kubectl, "x").state == "queued"
    assert not jobs.resume(kubectl, "x")[1]


def test_one_that_waits_for_its_turn_is_not_called_paused(
    cluster: Cluster, kubectl: Kubectl, capsys: pytest.CaptureFixture[str]
) -> None:
    queue(cluster, suspended=True)
    assert main.main(["kube", "status", "x", "--kubectl", str(cluster.kubectl)]) == 0
    assert capsys.readouterr().out == "job/x in team: queued\n"


@pytest.mark.parametrize("installed", [True, False])
def test_a_queue_that_nobody_serves_leaves_the_job_as_any_other(
    cluster: Cluster, kubectl: Kubectl, installed: bool
) -> None:
    queue(cluster, workload=False)
    if not installed:
        for file in (cluster.home / queues.RESOURCE).iterdir():
            file.unlink()
        (cluster.home / queues.RESOURCE).rmdir()
    assert suspension.pause(kubectl, "x", interval=0.01).new
    assert cluster.get("jobs.batch", "x")["spec"]["suspend"] is True


def test_one_whose_workload_may_not_be_seen_is_not_touched(cluster: Cluster, kubectl: Kubectl) -> None:
    queue(cluster)
    (cluster.home / f"forbidden-{queues.RESOURCE}").touch()
    with pytest.raises(errors.LastcallError, match="job/x cannot be paused: it is in a Kueue queue"):
        suspension.pause(kubectl, "x")
    with pytest.raises(Forbidden, match="job/x cannot be resumed: it is in a Kueue queue"):
        jobs.resume(kubectl, "x")
    assert cluster.get("jobs.batch", "x")["spec"] == {"suspend": False}
    assert jobs.status(kubectl, "x").state == "waiting"


@pytest.mark.parametrize(
    ("spec", "why"),
    [
        ({}, "only suspends a RayJob with shutdownAfterJobFinishes"),
        ({"shutdownAfterJobFinishes": False}, "only suspends a RayJob with shutdownAfterJobFinishes"),
        (
            {"shutdownAfterJobFinishes": True, "clusterSelector": {"ray.io/cluster": "shared"}},
            "an existing RayCluster",
        ),
    ],
)
def test_a_rayjob_that_kuberay_would_not_suspend_is_not_touched(
    cluster: Cluster, kubectl: Kubectl, spec: dict[str, Any], why: str
) -> None:
    """KubeRay takes it for wrong, and looks after it no longer; its pods are never told."""
    cluster.add("rayjobs.ray.io", "x", spec=spec)
    with pytest.raises(errors.LastcallError, match=why):
        suspension.pause(kubectl, "rayjob/x")
    assert cluster.get("rayjobs.ray.io", "x")["spec"] == spec


@pytest.mark.parametrize("value", ["-1", "nan", "soon"])
def test_a_time_that_is_none_is_refused_before_anybody_is_asked(
    cluster: Cluster, capsys: pytest.CaptureFixture[str], value: str
) -> None:
    assert main.main(["kube", "pause", "x", "--kubectl", str(cluster.kubectl), f"--timeout={value}"]) == 2
    assert "--timeout" in capsys.readouterr().err
    assert not (cluster.home / "calls").exists()
