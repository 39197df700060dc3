from __future__ import annotations

from typing import Any

from lastcall.kube.patches import at
from unit.kube.objects import ON, protected, trainjob

POD = ("trainingRuntimeSpec", "template", "spec", "replicatedJobs", 0, "template", "spec", "template", "spec")


def patches(obj: dict[str, Any]) -> list[Any]:
    found: list[Any] = obj["spec"]["runtimePatches"]
    return found


def user_patch(**pod: Any) -> dict[str, Any]:
    job = {"name": "node", "template": {"spec": {"template": {"spec": pod}}}}
    return {"manager": "me", "trainingRuntimeSpec": {"template": {"spec": {"replicatedJobs": [job]}}}}


def env(obj: dict[str, Any]) -> dict[str, str]:
    return {one["name"]: one["value"] for one in obj["spec"]["trainer"]["env"]}


def test_the_annotations_are_passed_on_to_the_jobset() -> None:
    (patch,) = patches(protected(trainjob({}), namespace={"lastcall.dev/enabled": "yes", "lastcall.dev/kill-wait-seconds": "1"}))
    assert patch["manager"] == "lastcall.dev/webhook"
    assert at(patch, ("trainingRuntimeSpec", "template", "metadata", "annotations")) == {
        "lastcall.dev/enabled": "yes",
        "lastcall.dev/kill-wait-seconds": "1",
    }


def test_the_grace_is_set_where_it_was_asked_for_and_left_to_the_jobset_otherwise() -> None:
    after = protected(trainjob({**ON, "lastcall.dev/grace-seconds": "200"}))
    assert at(patches(after)[0], POD) == {"terminationGracePeriodSeconds": 200}
    assert env(after) == {"LASTCALL_ENABLED": "1", "LASTCALL_GRACE_SECONDS": "200", "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "200"}
    after = protected(trainjob())
    assert at(patches(after)[0], POD) is None and env(after) == {"LASTCALL_ENABLED": "1"}


def test_a_longer_grace_of_the_user_stays_and_is_said() -> None:
    after = protected(
        trainjob({**ON, "lastcall.dev/grace-seconds": "200"}, runtimePatches=[user_patch(terminationGracePeriodSeconds=600)])
    )
    assert at(patches(after)[1], POD) is None
    assert env(after)["LASTCALL_GRACE_SECONDS"] == "600"


def test_storage_is_mounted_into_the_node_unless_the_user_mounts_something_there() -> None:
    asked = {**ON, "lastcall.dev/storage": "shared/a", "lastcall.dev/directory": "/ckpt"}
    after = protected(trainjob(asked))
    mount = {"name": "lastcall-storage", "mountPath": "/ckpt", "subPath": "a"}
    assert at(patches(after)[0], (*POD, "containers")) == [{"name": "node", "volumeMounts": [mount]}]
    assert at(patches(after)[0], (*POD, "volumes")) == [{"name": "lastcall-storage", "persistentVolumeClaim": {"claimName": "shared"}}]
    own = user_patch(containers=[{"name": "node", "volumeMounts": [{"name": "mine", "mountPath": "/ckpt"}]}])
    assert at(patches(protected(trainjob(asked, runtimePatches=[own])))[1], POD) is None


def test_what_the_user_says_of_the_trainer_stays() -> None:
    given = {"image": "x", "env": [{"name": "LASTCALL_ENABLED", "value": "0"}]}
    after = protected(trainjob(trainer=given))
    assert after["spec"]["trainer"] == given
