"""Jobs in a cluster that a stand-in for kubectl keeps. On a real one: tests/kube."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from helpers.kube.fake_kubectl import Cluster, message
from helpers.processes.forkserver import PATIENCE, environment
from lastcall import errors
from lastcall.kube.inject.annotations import PARALLELISM
from lastcall.kube.jobs import jobs, suspension
from lastcall.kube.jobs.kubectl import Forbidden, Kubectl, KubectlError, NotFound

COMPLETE = {"conditions": [{"type": "Complete", "status": "True"}]}


def paused(kubectl: Kubectl, name: str, **more: Any) -> tuple[suspension.Paused, list[str]]:
    said: list[str] = []
    return suspension.pause(kubectl, name, tell=said.append, interval=0.05, **more), said


# ---- which one is meant ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("resource", "name", "title"),
    [
        ("jobs.batch", "x", "Job"),
        ("jobs.batch", "job/x", "Job"),
        ("jobs.batch", "jobs.batch/x", "Job"),
        ("trainjobs.trainer.kubeflow.org", "x", "TrainJob"),
        ("trainjobs.trainer.kubeflow.org", "TrainJob/x", "TrainJob"),
        ("rayjobs.ray.io", "rayjob/x", "RayJob"),
    ],
)
def test_a_job_is_found_by_its_kind_and_name_or_by_its_name(
    cluster: Cluster, kubectl: Kubectl, resource: str, name: str, title: str
) -> None:
    cluster.add(resource, "x")
    assert jobs.find(kubectl, name).kind.title == title


def test_a_name_that_two_have_is_not_guessed_at(cluster: Cluster, kubectl: Kubectl) -> None:
    cluster.add("jobs.batch", "x")
    cluster.add("trainjobs.trainer.kubeflow.org", "x")
    with pytest.raises(errors.LastcallError, match="'x' is ambiguous: job/x or trainjob/x"):
        jobs.find(kubectl, "x")


def test_the_job_by_which_a_rayjob_submits_is_not_meant(cluster: Cluster, kubectl: Kubectl) -> None:
    owner = {"name": "x", "ownerReferences": [{"controller": True, "kind": "RayJob", "name": "x"}]}
    cluster.add("jobs.batch", "x", metadata=owner)
    cluster.add("rayjobs.ray.io", "x")
    assert str(jobs.find(kubectl, "x")) == "rayjob/x"
    with pytest.raises(errors.LastcallError, match="job/x belongs to RayJob x, which would restart it"):
        suspension.pause(kubectl, "job/x")


@pytest.mark.parametrize("name", ["x", "job/x", "rayjob/x"])
def test_one_that_is_not_there_is_said_not_to_be(kubectl: Kubectl, name: str) -> None:
    with pytest.raises(NotFound, match="there is no .*called x in namespace team"):
        jobs.find(kubectl, name)


@pytest.mark.parametrize("name", ["", "job/", "pod/x", "a/b/c", "--all", "job/-x"])
def test_what_is_no_name_is_refused_before_anybody_is_asked(
    cluster: Cluster, kubectl: Kubectl, name: str
) -> None:
    with pytest.raises(errors.LastcallError, match="is not the name of a job"):
        jobs.find(kubectl, name)
    assert not (cluster.home / "calls").exists()


def test_a_kind_that_one_may_not_see_is_no_reason_not_to_find_another(
    cluster: Cluster, kubectl: Kubectl
) -> None:
    (cluster.home / "forbidden-rayjobs.ray.io").touch()
    cluster.add("jobs.batch", "x")
    assert str(jobs.find(kubectl, "x")) == "job/x"
    with pytest.raises(Forbidden, match="kubectl auth can-i"):
        jobs.find(kubectl, "y")


# ---- pause and resume --------------------------------------------------------------------------------------


def test_a_paused_job_is_suspended_and_says_what_its_pods_have_saved(
    cluster: Cluster, kubectl: Kubectl
) -> None:
    cluster.add("jobs.batch", "x")
    cluster.pod("x-0", "job-name=x", says=message("saved", "checkpoint-12"))
    done, said = paused(kubectl, "x")
    assert cluster.get("jobs.batch", "x")["spec"] == {"parallelism": 2, "suspend": True}
    (ending,) = done.endings
    assert (ending.pod.name, ending.outcome, ending.words) == ("x-0", "saved", "saved checkpoint-12 (exact)")
    assert (done.new, done.gone, done.lost) == (True, True, False)
    assert said[0] == "Pausing job/x, which has 1 pod(s)" and "x-0: saved checkpoint-12 (exact)" in said
    watch = ["get", "--namespace=team", "pods", "x-0", "--watch", "--output-watch-events", "-o", "json"]
    assert watch in cluster.calls()


def test_pausing_twice_changes_nothing_more(cluster: Cluster, kubectl: Kubectl) -> None:
    cluster.add("jobs.batch", "x", spec={"suspend": True})
    done, _ = paused(kubectl, "x")
    assert (done.new, done.gone, done.endings, done.lost) == (False, True, [], False)
    assert not [call for call in cluster.calls() if call[0] == "patch"]


def test_where_the_server_does_not_know_suspend_the_parallelism_is_set_and_kept(
    cluster: Cluster, kubectl: Kubectl
) -> None:
    (cluster.home / "old").touch()
    cluster.add("jobs.batch", "x")
    done, _ = paused(kubectl, "x")
    assert done.new and jobs.find(kubectl, "x").paused
    body = cluster.get("jobs.batch", "x")
    assert body["spec"] == {"parallelism": 0} and body["metadata"]["annotations"] == {PARALLELISM: "2"}
    again, _ = paused(kubectl, "x")
    assert not again.new and cluster.get("jobs.batch", "x") == body
    target, was_paused = jobs.resume(kubectl, "x")
    assert was_paused and not target.paused
    assert cluster.get("jobs.batch", "x")["spec"] == {"parallelism": 2}
    assert cluster.get("jobs.batch", "x")["metadata"]["annotations"] == {}


def test_a_kind_that_cannot_be_suspended_is_refused(
    cluster: Cluster, kubectl: Kubectl, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster.add("trainjobs.trainer.kubeflow.org", "x")
    monkeypatch.setattr(Kubectl, "patch", lambda *_: cluster.get("trainjobs.trainer.kubeflow.org", "x"))
    with pytest.raises(
        KubectlError, match="trainjob/x cannot be paused: this cluster's TrainJob has no spec.suspend"
    ):
        suspension.pause(kubectl, "x")


@pytest.mark.parametrize(("suspended", "was_paused"), [(True, True), (False, False)])
def test_resuming_is_the_opposite_and_harmless_otherwise(
    cluster: Cluster, kubectl: Kubectl, suspended: bool, was_paused: bool
) -> None:
    cluster.add("trainjobs.trainer.kubeflow.org", "x", spec={"suspend": suspended})
    assert jobs.resume(kubectl, "trainjob/x")[1] is was_paused
    assert cluster.get("trainjobs.trainer.kubeflow.org", "x")["spec"] == {"suspend": False}


def test_a_job_that_is_over_cannot_be_paused(cluster: Cluster, kubectl: Kubectl) -> None:
    cluster.add("jobs.batch", "x", status=COMPLETE)
    with pytest.raises(errors.LastcallError, match="job/x has already finished: there is nothing to pause"):
        suspension.pause(kubectl, "x")


@pytest.mark.parametrize(
    ("says", "lost"),
    [
        ("", True),
        ("nothing of the kind", True),
        (message("not saved", because="no space"), True),
        (message("failed", "checkpoint-2"), True),
        (message("saved", "checkpoint-3", exact=False), False),
        (message("finished", "checkpoint-9"), False),
    ],
)
def test_pods_that_leave_without_a_save_are_a_loss(
    cluster: Cluster, kubectl: Kubectl, says: str, lost: bool
) -> None:
    cluster.add("jobs.batch", "x")
    cluster.pod("x-0", "job-name=x", says=says)
    done, _ = paused(kubectl, "x")
    assert done.gone and done.lost is lost


def test_the_pods_of_each_kind_are_those_that_its_controllers_label(
    cluster: Cluster, kubectl: Kubectl
) -> None:
    cluster.add("trainjobs.trainer.kubeflow.org", "t")
    cluster.add(
        "rayjobs.ray.io",
        "r",
        spec={"shutdownAfterJobFinishes": True},
        status={"rayClusterName": "r-raycluster-1"},
    )
    cluster.pod("t-node-0", "jobset.sigs.k8s.io/jobset-name=t", says=message("saved", "checkpoint-1"))
    cluster.pod("r-head", "ray.io/cluster=r-raycluster-1", says="")
    cluster.pod("r-submit", "job-name=r", says=message("saved"))
    assert [pod.name for pod in jobs.pods(kubectl, jobs.find(kubectl, "t"))] == ["t-node-0"]
    done, _ = paused(kubectl, "rayjob/r")
    assert [(ending.pod.name, ending.outcome) for ending in done.endings] == [
        ("r-head", None),
        ("r-submit", "saved"),
    ]
    assert not done.lost


def test_one_that_takes_too_long_is_left_paused(cluster: Cluster, kubectl: Kubectl) -> None:
    cluster.add("jobs.batch", "x")
    cluster.pod("x-0", "job-name=x", phase="Pending")
    done, _ = paused(kubectl, "x", timeout=0.1)
    assert not done.gone and not done.lost and cluster.get("jobs.batch", "x")["spec"]["suspend"] is True


def test_nobody_has_to_wait(cluster: Cluster, kubectl: Kubectl) -> None:
    cluster.add("jobs.batch", "x")
    cluster.pod("x-0", "job-name=x")
    done, _ = paused(kubectl, "x", wait=False)
    assert not done.waited and not done.gone and not [call for call in cluster.calls() if "--watch" in call]


# ---- status ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("spec", "status", "phases", "state"),
    [
        ({}, {}, [], "waiting"),
        ({}, {}, ["Pending"], "starting"),
        ({}, {}, ["Pending", "Running"], "running"),
        ({}, {}, ["Failed"], "waiting"),
        ({"suspend": True}, {}, ["Running"], "pausing"),
        ({"suspend": True}, {}, ["Failed"], "paused"),
        ({}, COMPLETE, ["Succeeded"], "finished"),
        ({}, {"conditions": [{"type": "Failed", "status": "True"}]}, [], "failed"),
        ({}, {"conditions": [{"type": "Failed", "status": "False"}]}, [], "waiting"),
    ],
)
def test_the_state_of_a_job_is_one_word(
    cluster: Cluster,
    kubectl: Kubectl,
    spec: dict[str, Any],
    status: dict[str, Any],
    phases: list[str],
    state: str,
) -> None:
    (cluster.home / "no-exec").touch()
    cluster.add("jobs.batch", "x", spec=spec, status=status)
    for number, phase in enumerate(phases):
        cluster.pod(f"x-{number}", "job-name=x", phase=phase)
    assert jobs.status(kubectl, "x").state == state


HELD = """
import os, signal
from pathlib import Path
from lastcall import clock
from lastcall.core.checkpoint.catalog import Catalog
from lastcall.storage import files
catalog = Catalog(Path({root!r}), files.Files())
catalog.open(clock.Clock())
print("held", flush=True)
signal.pause()
"""


def test_the_progress_of_a_run_is_found_through_the_lock_that_it_holds(
    cluster: Cluster, kubectl: Kubectl, tmp_path: Path
) -> None:
    root = tmp_path / "a run"
    (root / ".lastcall").mkdir(parents=True)
    (root / ".lastcall" / "progress.json").write_text(json.dumps({"step": 7, "total": 10}, indent=1))
    events = [
        {"kind": "start", "resumed": "checkpoint-5"},
        {"kind": "other"},
        {"kind": "committed", "path": "checkpoint-6"},
    ]
    (root / ".lastcall" / "events-0.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    cluster.add("jobs.batch", "x")
    cluster.pod("x-0", "job-name=x")
    with subprocess.Popen(
        [sys.executable, "-c", HELD.format(root=str(root))], env=environment(), stdout=subprocess.PIPE
    ) as child:
        try:
            assert child.stdout is not None and child.stdout.readline() == b"held\n"
            (item,) = jobs.status(kubectl, "x").pods
        finally:
            child.kill()
    (run,) = (run for run in item.runs if run.directory == str(root))  # this machine may have others
    assert run.progress == {"step": 7, "total": 10}
    assert run.start is not None and run.start["resumed"] == "checkpoint-5"
    assert run.committed is not None and run.committed["path"] == "checkpoint-6"


@pytest.mark.parametrize(("leaving", "state"), [(False, "paused"), (True, "pausing")])
def test_a_pod_that_has_ended_and_is_being_deleted_is_still_there(
    cluster: Cluster, kubectl: Kubectl, leaving: bool, state: str
) -> None:
    cluster.add("jobs.batch", "x", spec={"suspend": True})
    cluster.pod("x-0", "job-name=x", phase="Failed", leaving=leaving)
    assert jobs.status(kubectl, "x").state == state


def test_where_exec_is_forbidden_the_rest_is_said_all_the_same(cluster: Cluster, kubectl: Kubectl) -> None:
    (cluster.home / "no-exec").touch()
    cluster.add("jobs.batch", "x")
    cluster.pod("x-0", "job-name=x")
    (item,) = jobs.status(kubectl, "x").pods
    assert item.runs == () and "forbidden" in item.because
    assert (item.pod.phase, item.pod.node, item.pod.restarts, item.pod.container) == (
        "Running",
        "node-1",
        1,
        "train",
    )


# ---- the command -------------------------------------------------------------------------------------------


def lastcall(cluster: Cluster, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "lastcall", "kube", *words, "--kubectl", str(cluster.kubectl)]
    return subprocess.run(
        command, env=environment(), capture_output=True, text=True, timeout=PATIENCE, check=False
    )


def test_the_commands_say_what_was_done_and_what_to_do_next(cluster: Cluster) -> None:
    cluster.add("jobs.batch", "x")
    cluster.pod("x-0", "job-name=x", says=message("saved", "checkpoint-12"))
    done = lastcall(cluster, "pause", "job/x", "-n", "team")
    assert done.returncode == 0, done.stderr
    assert (
        done.stdout
        == "job/x is paused: saved checkpoint-12 (exact). To resume: lastcall kube resume job/x -n team\n"
    )
    assert "x-0: saved checkpoint-12 (exact)" in done.stderr
    done = lastcall(cluster, "status", "x", "--json")
    body = json.loads(done.stdout)
    assert (body["kind"], body["name"], body["state"], body["pods"]) == ("Job", "x", "paused", [])
    assert lastcall(cluster, "status", "x").stdout.splitlines()[0] == "job/x in team: paused"
    done = lastcall(cluster, "resume", "x", "--json")
    assert json.loads(done.stdout) == {
        "schema": 1, "kind": "Job", "name": "x", "namespace": "team", "paused": False, "was_paused": True,
    }  # fmt: skip
    assert lastcall(cluster, "resume", "x").stdout == "job/x was not paused\n"


def test_a_loss_and_an_error_are_told_by_the_exit_code(cluster: Cluster) -> None:
    cluster.add("jobs.batch", "x")
    cluster.pod("x-0", "job-name=x", says="bye")
    done = lastcall(cluster, "pause", "x", "--json")
    assert done.returncode == 1 and json.loads(done.stdout)["pods"] == [
        {"pod": "x-0", "outcome": None, "words": ""}
    ]
    jobs.resume(Kubectl(str(cluster.kubectl)), "x")
    cluster.pod("x-0", "job-name=x", says="bye")
    done = lastcall(cluster, "pause", "x")
    assert (
        done.returncode == 1
        and "It is unknown whether it saved" in done.stdout
        and "WITHOUT" not in done.stdout
    )
    done = lastcall(cluster, "status", "y")
    assert (done.returncode, done.stdout) == (1, "") and "called y" in done.stderr


def test_what_a_pod_prints_does_not_reach_the_terminal_as_a_command(cluster: Cluster) -> None:
    cluster.add("jobs.batch", "x")
    cluster.pod("x-0", "job-name=x", says=message("saved", "\x1b[2Jcheckpoint-12"))
    done = lastcall(cluster, "pause", "x")
    assert "\x1b" not in done.stdout + done.stderr and "checkpoint-12" in done.stdout
    assert os.listdir(cluster.home / "pods") == []
