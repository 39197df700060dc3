"""Pods as people have them: what is refused, or loses work, only where other things are around."""

from __future__ import annotations

from typing import Any

import pytest

from helpers.kube.objects import ON, job, made, pod, protected, trainer, variables
from lastcall.kube.inject import annotations as keys
from lastcall.kube.inject import inject
from lastcall.kube.inject.inject import InjectOptions

SIZES = {"cpu": "8", "memory": "64Gi"}


def warnings(obj: dict[str, Any]) -> str:
    return " ".join(inject.inject(obj, options=InjectOptions(image="lastcall:1")).warnings)


def install(obj: dict[str, Any]) -> dict[str, Any]:
    (found,) = (
        item
        for item in obj["spec"]["template"]["spec"]["initContainers"]
        if item["name"] == "lastcall-install"
    )
    return dict(found)


def test_a_guaranteed_pod_stays_guaranteed() -> None:
    """Every container of one, init containers too, has limits that are its requests."""
    annotated = job()
    trainer(annotated)["resources"] = {
        "limits": {**SIZES, "nvidia.com/gpu": 8},
        "requests": SIZES,
        "claims": [{"name": "gpu"}],
    }
    assert install(protected(annotated))["resources"] == {"requests": SIZES, "limits": SIZES}


def test_a_pod_that_asks_for_nothing_still_asks_for_nothing() -> None:
    assert install(protected(job()))["resources"] == {}


@pytest.mark.parametrize(
    "spec", [{"os": {"name": "windows"}}, {"nodeSelector": {"kubernetes.io/os": "windows"}}]
)
def test_pods_on_windows_are_left_alone(spec: dict[str, Any]) -> None:
    """The API server refuses the init container's rights there, and with them the job."""
    annotated = job(**spec)
    assert protected(annotated) == annotated
    assert "Windows" in warnings(annotated)


def test_a_group_on_windows_does_not_keep_the_others_from_being_protected() -> None:
    linux, windows = {"template": {"spec": pod()}}, {"template": {"spec": pod(os={"name": "windows"})}}
    after = protected(
        made("ray.io/v1", "RayCluster", {"headGroupSpec": linux, "workerGroupSpecs": [windows, linux]}, ON)
    )
    (theirs, ours) = after["spec"]["workerGroupSpecs"]
    assert theirs == windows
    assert "initContainers" in ours["template"]["spec"]


@pytest.mark.parametrize(
    ("rules", "warned"),
    [
        ([{"action": "FailJob", "onExitCodes": {"operator": "NotIn", "values": [0, 42]}}], True),
        (
            [
                {
                    "action": "FailIndex",
                    "onExitCodes": {"containerName": "main", "operator": "In", "values": [75]},
                }
            ],
            True,
        ),
        (
            [
                {
                    "action": "FailJob",
                    "onExitCodes": {"containerName": "other", "operator": "NotIn", "values": [1]},
                }
            ],
            False,
        ),
        ([{"action": "FailJob", "onExitCodes": {"operator": "In", "values": [42]}}], False),
        ([{"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget"}]}], False),
        (
            [
                {"action": "Ignore", "onExitCodes": {"operator": "In", "values": [75]}},
                {"action": "FailJob", "onExitCodes": {"operator": "NotIn", "values": [1]}},
            ],
            False,
        ),
        ("nonsense", False),
    ],
)
def test_a_failure_policy_that_ends_the_job_of_a_saved_run_is_warned_of(rules: Any, warned: bool) -> None:
    annotated = job(restartPolicy="Never")
    annotated["spec"]["podFailurePolicy"] = {"rules": rules}
    assert protected(annotated)["spec"]["podFailurePolicy"] == {"rules": rules}
    assert ("exit code 75" in warnings(annotated)) == warned


@pytest.mark.parametrize(
    "hook",
    [
        {"sleep": {"seconds": 20}},
        {"exec": {"command": ["sleep", "20"]}},
        {"exec": {"command": ["/bin/sh", "-c", "sleep 20"]}},
    ],
)
def test_what_a_hook_sleeps_comes_on_top_of_the_grace(hook: dict[str, Any]) -> None:
    """The grace begins with the hook, and SIGTERM comes after it: a run that counts on all of it would save
    too late."""
    annotated = job({**ON, "lastcall.dev/grace-seconds": "60"})
    trainer(annotated)["lifecycle"] = {"preStop": hook}
    after = protected(annotated)
    assert after["spec"]["template"]["spec"]["terminationGracePeriodSeconds"] == 80
    assert variables(trainer(after))["LASTCALL_GRACE_SECONDS"] == "60"
    assert protected(after) == after


@pytest.mark.parametrize(
    "hook",
    [{"sleep": {"seconds": 86400}}, {"sleep": {"seconds": -5}}, {"exec": {"command": ["sleep", "infinity"]}}],
)
def test_a_hook_that_sleeps_for_ever_does_not_make_the_grace_as_long(hook: dict[str, Any]) -> None:
    annotated = job()
    trainer(annotated)["lifecycle"] = {"preStop": hook}
    assert protected(annotated)["spec"]["template"]["spec"]["terminationGracePeriodSeconds"] == 120


def test_a_longer_grace_of_the_user_is_told_without_what_the_hook_sleeps() -> None:
    annotated = job(terminationGracePeriodSeconds=300)
    trainer(annotated)["lifecycle"] = {"preStop": {"sleep": {"seconds": 20}}}
    after = protected(annotated)
    assert after["spec"]["template"]["spec"]["terminationGracePeriodSeconds"] == 300
    assert variables(trainer(after))["LASTCALL_GRACE_SECONDS"] == "280"


def test_a_hook_that_stops_ray_is_told_to_lose_work() -> None:
    group: dict[str, Any] = {"template": {"spec": pod()}}
    group["template"]["spec"]["containers"][0]["lifecycle"] = {
        "preStop": {"exec": {"command": ["/bin/sh", "-c", "ray stop"]}}
    }
    assert "Remove it" in warnings(made("ray.io/v1", "RayCluster", {"headGroupSpec": group}, ON))


@pytest.mark.parametrize("name", ["lastcall.dev/kill-wait-seconds", "ray.io/jit-checkpoint-kill-wait"])
def test_a_kill_wait_does_not_make_the_grace_longer_than_a_week(name: str) -> None:
    with pytest.raises(keys.AnnotationError, match="more than a week"):
        keys.wishes({**ON, name: "1e9"}, ray=True)


def test_a_contradiction_is_told_by_the_names_that_were_written() -> None:
    with pytest.raises(keys.AnnotationError, match=r"^ray.io/jit-checkpoint-kill-wait: 90 is longer"):
        keys.wishes(
            {**ON, "ray.io/jit-checkpoint-kill-wait": "90", "lastcall.dev/grace-seconds": "60"}, ray=True
        )
    with pytest.raises(
        keys.AnnotationError,
        match=r"^lastcall.dev/kill-wait-seconds of the "
        r"namespace: 90 is longer",
    ):
        keys.wishes({**ON, "lastcall.dev/grace-seconds": "60"}, {"lastcall.dev/kill-wait-seconds": "90"})


def test_a_rayjob_that_runs_on_a_cluster_of_others_is_told_to_be_unprotected() -> None:
    rayjob = made(
        "ray.io/v1",
        "RayJob",
        {"clusterSelector": {"ray.io/cluster": "shared"}},
        {"ray.io/jit-checkpoint-enabled": "true"},
    )
    assert "no pod template" in warnings(rayjob)


def test_a_kind_that_is_none_of_ours_is_told_so_where_it_is_annotated() -> None:
    assert "ReplicaSet is not a kind that lastcall protects" in warnings(
        made("apps/v1", "ReplicaSet", {"template": {"spec": pod()}}, ON)
    )
    assert warnings(made("v1", "ConfigMap", {})) == ""


@pytest.mark.parametrize("name", ["lastcall.dev/enabled", "ray.io/jit-checkpoint-enabled"])
def test_a_pod_of_a_ray_cluster_is_one_of_rays_kinds(name: str) -> None:
    """An annotation in a group's template is the pod's own."""
    owner = {"apiVersion": "ray.io/v1", "kind": "RayCluster", "name": "x", "uid": "1", "controller": True}
    after = protected(made("v1", "Pod", pod("ray-worker"), {name: "true"}, ownerReferences=[owner]))
    found = variables(after["spec"]["containers"][0])
    assert found["RAY_TRAIN_JIT_CHECKPOINT_ENABLED"] == "true"
    assert "LASTCALL_ENABLED" not in found


def test_of_two_python_paths_the_one_that_counts_is_changed() -> None:
    annotated = job()
    trainer(annotated)["env"] = [{"name": "PYTHONPATH", "value": "/a"}, {"name": "PYTHONPATH", "value": "/b"}]
    assert variables(trainer(protected(annotated)))["PYTHONPATH"] == "/opt/lastcall/site:/b"


def test_storage_that_the_run_does_not_save_to_is_warned_of() -> None:
    stored = {**ON, "lastcall.dev/storage": "shared"}
    assert "LASTCALL_DIRECTORY" not in warnings(job(stored))
    elsewhere = job(stored)
    trainer(elsewhere)["env"] = [{"name": "LASTCALL_DIRECTORY", "value": "/scratch/exp1"}]
    assert "it will not save to" in warnings(elsewhere)
    below = job(stored)
    trainer(below)["env"] = [{"name": "LASTCALL_DIRECTORY", "value": "/mnt/kubeflow-checkpoints/exp1"}]
    assert warnings(below) == ""


def test_a_directory_on_rays_kinds_is_told_to_have_no_effect() -> None:
    spec = {"headGroupSpec": {"template": {"spec": pod()}}}
    directory = {**ON, "lastcall.dev/directory": "/mnt/exp1"}
    assert "lastcall.dev/directory has no effect" in warnings(
        made("ray.io/v1", "RayCluster", spec, directory)
    )
    assert (
        warnings(made("ray.io/v1", "RayCluster", spec, {**directory, "lastcall.dev/storage": "shared"})) == ""
    )


def test_two_annotations_that_contradict_each_other_are_told() -> None:
    spec = {"headGroupSpec": {"template": {"spec": pod()}}}
    both = {
        "ray.io/jit-checkpoint-enabled": "true",
        "ray.io/jit-checkpoint-kill-wait": "5.0",
        "lastcall.dev/enabled": "false",
    }
    assert warnings(made("ray.io/v1", "RayCluster", spec, both)).startswith(
        "ray.io/jit-checkpoint-enabled has no effect"
    )
    agreed = {**both, "lastcall.dev/enabled": "1", "lastcall.dev/kill-wait-seconds": "5"}
    assert warnings(made("ray.io/v1", "RayCluster", spec, agreed)) == ""


@pytest.mark.parametrize(
    "obj",
    [
        made(
            "batch/v1",
            "CronJob",
            {
                "jobTemplate": {
                    "metadata": {"annotations": {"lastcall.dev/enabled": "sure"}},
                    "spec": job()["spec"],
                }
            },
        ),
        made(
            "jobset.x-k8s.io/v1alpha2",
            "JobSet",
            {
                "replicatedJobs": [
                    {
                        "template": {
                            "metadata": {"annotations": {"lastcall.dev/enabled": "sure"}},
                            "spec": job()["spec"],
                        }
                    }
                ]
            },
        ),
    ],
)
def test_a_wrong_annotation_of_the_jobs_that_it_makes_is_refused_with_the_object(obj: dict[str, Any]) -> None:
    """Their controller would be refused each of them, at night, and tell nobody."""
    with pytest.raises(keys.AnnotationError, match="neither yes nor no"):
        warnings(obj)


@pytest.mark.parametrize(
    ("policy", "warned"), [("Never", True), ("OnFailure", False), ("ExitCode", False), (None, False)]
)
def test_a_pytorchjob_that_ends_with_its_first_pod_is_warned_of(policy: str | None, warned: bool) -> None:
    replica = {"restartPolicy": policy, "template": {"spec": pod("pytorch")}}
    said = warnings(made("kubeflow.org/v1", "PyTorchJob", {"pytorchReplicaSpecs": {"Worker": replica}}, ON))
    assert ("restartPolicy Never" in said) == warned
