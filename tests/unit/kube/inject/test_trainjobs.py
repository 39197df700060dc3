from __future__ import annotations

from typing import Any

from helpers.kube.objects import ON, protected, trainjob
from lastcall.kube.inject import inject
from lastcall.kube.inject.draft import applied, at
from lastcall.kube.inject.inject import InjectOptions

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
    (patch,) = patches(
        protected(
            trainjob({}), namespace={"lastcall.dev/enabled": "yes", "lastcall.dev/kill-wait-seconds": "1"}
        )
    )
    assert patch["manager"] == "lastcall.dev/webhook"
    assert at(patch, ("trainingRuntimeSpec", "template", "metadata", "annotations")) == {
        "lastcall.dev/enabled": "yes",
        "lastcall.dev/kill-wait-seconds": "1",
    }


def test_the_grace_is_set_where_it_was_asked_for_and_left_to_the_jobset_otherwise() -> None:
    after = protected(trainjob({**ON, "lastcall.dev/grace-seconds": "200"}))
    assert at(patches(after)[0], POD) == {"terminationGracePeriodSeconds": 200}
    assert env(after) == {
        "LASTCALL_ENABLED": "1",
        "LASTCALL_GRACE_SECONDS": "200",
        "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "200",
    }
    after = protected(trainjob())
    assert at(patches(after)[0], POD) is None and env(after) == {"LASTCALL_ENABLED": "1"}


def test_a_longer_grace_of_the_user_stays_and_is_said() -> None:
    after = protected(
        trainjob(
            {**ON, "lastcall.dev/grace-seconds": "200"},
            runtimePatches=[user_patch(terminationGracePeriodSeconds=600)],
        )
    )
    assert at(patches(after)[1], POD) is None
    assert env(after)["LASTCALL_GRACE_SECONDS"] == "600"


def test_storage_is_mounted_into_the_node_unless_the_user_mounts_something_there() -> None:
    asked = {**ON, "lastcall.dev/storage": "shared/a", "lastcall.dev/directory": "/ckpt"}
    after = protected(trainjob(asked))
    mount = {"name": "lastcall-storage", "mountPath": "/ckpt", "subPath": "a"}
    assert at(patches(after)[0], (*POD, "containers")) == [{"name": "node", "volumeMounts": [mount]}]
    assert at(patches(after)[0], (*POD, "volumes")) == [
        {"name": "lastcall-storage", "persistentVolumeClaim": {"claimName": "shared"}}
    ]
    own = user_patch(containers=[{"name": "node", "volumeMounts": [{"name": "mine", "mountPath": "/ckpt"}]}])
    assert at(patches(protected(trainjob(asked, runtimePatches=[own])))[1], POD) is None


def test_what_the_user_says_of_the_trainer_stays() -> None:
    given = {"image": "x", "env": [{"name": "LASTCALL_ENABLED", "value": "0"}]}
    after = protected(trainjob(trainer=given))
    assert after["spec"]["trainer"] == given


def test_a_trainjob_that_is_full_is_not_made_one_that_the_api_server_refuses() -> None:
    """Trainer takes 128 variables and 16 patches, and nothing of a job that has more."""
    full = [{"name": f"V{number}", "value": ""} for number in range(125)]
    asked = {**ON, "lastcall.dev/grace-seconds": "200"}
    room = inject.inject(trainjob(asked, trainer={"env": full}), options=InjectOptions())
    assert room.warnings == ()
    assert (
        len(applied(trainjob(asked, trainer={"env": full}), room.operations)["spec"]["trainer"]["env"]) == 128
    )
    item = trainjob(asked, trainer={"env": [*full, {"name": "W", "value": ""}]})
    made = inject.inject(item, options=InjectOptions())
    after = applied(item, made.operations)
    assert after["spec"]["trainer"] == item["spec"]["trainer"]
    assert at(patches(after)[0], POD) == {"terminationGracePeriodSeconds": 200}
    assert [warning for warning in made.warnings if "spec.trainer.env has 126" in warning]

    item = trainjob(runtimePatches=[{"manager": f"example.com/{number}"} for number in range(16)])
    made = inject.inject(item, options=InjectOptions())
    assert patches(applied(item, made.operations)) == patches(item)
    assert [warning for warning in made.warnings if "spec.runtimePatches is full (16 entries)" in warning]


def test_what_a_patch_of_the_users_mounts_there_stays_however_its_path_is_written() -> None:
    mount = {"name": "mine", "mountPath": "/data/"}
    item = trainjob(
        {**ON, "lastcall.dev/storage": "claim", "lastcall.dev/directory": "/data"},
        runtimePatches=[user_patch(containers=[{"name": "node", "volumeMounts": [mount]}])],
    )
    assert at(patches(protected(item))[1], POD) is None
