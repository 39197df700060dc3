"""What the API server makes of objects of every kind when lastcall's webhook is asked, and when it is not
there."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from helpers.kube import images as kube_images
from helpers.kube.api import Refused, until
from helpers.kube.cluster import Cluster
from helpers.kube.webhook import Webhook
from kube import objects

pytestmark = pytest.mark.usefixtures("webhook")
TEMPLATES = sorted(objects.PODS)
GRACE = 90


@pytest.fixture
def cleared(cluster: Cluster) -> Iterator[Cluster]:
    """Leaves none of the objects behind."""
    yield cluster
    for kind, (version, _) in objects.OBJECTS.items():
        plural, group = f"{kind.lower()}s", version.rpartition("/")[0]
        cluster.kubectl("delete", f"{plural}.{group}" if group else plural, "--all", "--now", "--wait=false")


def asked(kind: str, name: str) -> dict[str, Any]:
    """The object with the annotations that its users write."""
    own = {
        "lastcall_enabled": "true",
        "lastcall_grace_seconds": str(GRACE),
        "lastcall_kill_wait_seconds": "5.0",
    }
    rays = {"ray_enabled": "true", "ray_kill_wait": "5.0", "lastcall_grace_seconds": str(GRACE)}
    return objects.make(kind, name, **(rays if kind in objects.RAY else own))


@pytest.mark.parametrize("kind", TEMPLATES)
def test_every_training_container_of_an_annotated_object_is_protected_and_nothing_else(
    cleared: Cluster, kind: str
) -> None:
    made = cleared.api.create(asked(kind, "it"))
    for pod, before in zip(objects.pods(made), objects.pods(objects.make(kind, "it")), strict=True):
        assert pod["terminationGracePeriodSeconds"] == GRACE
        (install,) = pod["initContainers"]
        assert (install["name"], install["image"]) == ("lastcall-install", kube_images.LASTCALL)
        name = objects.TRAINER.get(kind, "train")
        trainer, user = objects.container(pod, name), objects.container(before, name)
        variables = objects.env(trainer)
        assert variables["LASTCALL_GRACE_SECONDS"] == str(GRACE)
        assert variables["PYTHONPATH"] == "/opt/lastcall/site"
        assert objects.env(user).items() <= variables.items()
        assert {"name": "lastcall", "mountPath": "/opt/lastcall"} in trainer["volumeMounts"]
        if kind in objects.RAY:
            assert (
                variables["RAY_TRAIN_JIT_CHECKPOINT_ENABLED"],
                variables["RAY_TRAIN_JIT_CHECKPOINT_KILL_WAIT"],
            ) == ("true", "5.0")
            assert int(variables["RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S"]) < GRACE
        else:
            assert (variables["LASTCALL_ENABLED"], variables["LASTCALL_KILL_WAIT_SECONDS"]) == ("1", "5.0")
        sidecar = objects.container(pod, "sidecar")
        assert objects.SIDECAR.items() <= sidecar.items()
        assert not any(mount["name"] == "lastcall" for mount in sidecar.get("volumeMounts", []))


def test_an_annotated_train_job_carries_its_annotations_to_the_job_set(cleared: Cluster) -> None:
    made = cleared.api.create(asked("TrainJob", "it"))
    variables = objects.env(made["spec"]["trainer"])
    assert (variables["LASTCALL_ENABLED"], variables["LASTCALL_GRACE_SECONDS"]) == ("1", str(GRACE))
    (patch,) = made["spec"]["runtimePatches"]
    template = patch["trainingRuntimeSpec"]["template"]
    assert template["metadata"]["annotations"]["lastcall.dev/enabled"] == "true"
    (job,) = template["spec"]["replicatedJobs"]
    assert objects.at(job, ("template", "spec", "template", "spec", "terminationGracePeriodSeconds")) == GRACE


def test_a_train_job_with_as_many_variables_as_it_may_have_is_admitted(cleared: Cluster) -> None:
    item = asked("TrainJob", "full")
    item["spec"]["trainer"]["env"] = [{"name": f"MINE_{number}", "value": "1"} for number in range(128)]
    made = cleared.api.create(item)
    assert made["spec"]["trainer"]["env"] == item["spec"]["trainer"]["env"]
    assert [patch["manager"] for patch in made["spec"]["runtimePatches"]] == ["lastcall.dev/webhook"]
    item["spec"]["trainer"]["env"].append({"name": "ONE_MORE", "value": "1"})
    with pytest.raises(Refused, match="422"):
        cleared.api.create({**item, "metadata": {"name": "fuller"}})


def test_the_jobs_of_a_job_set_get_a_policy_for_pods_that_saved(cleared: Cluster) -> None:
    """A field that is younger than this API server, and not younger than the JobSet's definition."""
    made = cleared.api.create(asked("JobSet", "it"))
    policy = objects.at(made["spec"], ("replicatedJobs", 0, "template", "spec", "podFailurePolicy"))
    assert [rule["action"] for rule in policy["rules"]] == ["Ignore", "Ignore"]
    assert policy["rules"][0]["onExitCodes"]["containerName"] == "train"


@pytest.mark.parametrize("kind", sorted(objects.OBJECTS))
def test_an_object_without_annotations_is_what_it_is_without_a_webhook(
    cluster: Cluster, unasked: str, kind: str
) -> None:
    """In a namespace that has opted out nobody is asked. What differs by nature is left out: names, times,
    tokens of accounts."""
    item = objects.make(kind, "plain")
    (with_it, without) = (
        cluster.api.create(item, namespace, dry_run=True) for namespace in ("default", unasked)
    )
    for found in (with_it, without):
        for name in ("namespace", "uid", "creationTimestamp", "managedFields", "selfLink"):
            found["metadata"].pop(name, None)
    texts = [json.dumps(found, sort_keys=True) for found in (with_it, without)]
    for number, found in enumerate((with_it, without)):
        texts[number] = texts[number].replace(
            str(found["metadata"].get("labels", {}).get("controller-uid")), "uid"
        )
        texts[number] = _without_account(texts[number])
    assert texts[0] == texts[1]


def _without_account(text: str) -> str:
    found = json.loads(text)
    if found["kind"] == "Pod":
        found["spec"]["volumes"] = [
            volume for volume in found["spec"]["volumes"] if "-token-" not in volume["name"]
        ]
        for container in found["spec"]["containers"]:
            container["volumeMounts"] = [
                mount for mount in container["volumeMounts"] if "-token-" not in mount["name"]
            ]
    return json.dumps(found, sort_keys=True)


@pytest.mark.parametrize("kind", sorted(objects.OBJECTS))
def test_a_wrong_value_is_refused_when_it_is_applied_and_the_annotation_is_named(
    cluster: Cluster, kind: str
) -> None:
    item = objects.make(kind, "wrong", lastcall_enabled="true", lastcall_grace_seconds="soon")
    done = cluster.kubectl("apply", "-f", "-", given=json.dumps(item))
    assert done.returncode != 0
    assert "lastcall.dev/grace-seconds: 'soon'" in done.stderr
    with pytest.raises(Refused, match="404"):
        cluster.api.get(kind, "wrong", version=item["apiVersion"])


@pytest.mark.parametrize("kind", sorted(objects.OBJECTS))
def test_applying_an_annotated_object_twice_changes_nothing(cleared: Cluster, kind: str) -> None:
    item = asked(kind, "twice")
    assert cleared.kubectl("apply", "-f", "-", given=json.dumps(item)).returncode == 0
    before = cleared.api.get(kind, "twice", version=item["apiVersion"])
    done = cleared.kubectl("apply", "-f", "-", given=json.dumps(item))
    assert done.returncode == 0, done.stderr
    after = cleared.api.get(kind, "twice", version=item["apiVersion"])
    assert after["spec"] == before["spec"]
    assert after["metadata"].get("generation") == before["metadata"].get("generation")


def test_a_namespace_asks_for_all_that_is_in_it(cleared: Cluster) -> None:
    namespace = {
        "apiVersion": "v1",
        "kind": "Namespace",
        "metadata": {"name": "team", "annotations": {"lastcall.dev/enabled": "true"}},
    }
    cleared.api.create(namespace)

    def protected() -> bool:
        """The webhook hears of a namespace a moment after it is there."""
        made = cleared.api.create(objects.make("Job", "it"), "team", dry_run=True)
        return "LASTCALL_ENABLED" in objects.env(objects.container(objects.pods(made)[0], "train"))

    until(protected, lambda: "a Job in an annotated namespace to be protected")
    refused = objects.make("Job", "it", lastcall_enabled="false")
    made = cleared.api.create(refused, "team", dry_run=True)
    assert "LASTCALL_ENABLED" not in objects.env(objects.container(objects.pods(made)[0], "train"))


def test_a_dry_run_shows_the_patch_and_leaves_nothing(cluster: Cluster) -> None:
    made = cluster.api.create(asked("Job", "dry"), dry_run=True)
    assert "initContainers" in objects.pods(made)[0]
    with pytest.raises(Refused, match="404"):
        cluster.api.get("Job", "dry")


def test_without_the_webhook_admission_goes_on(cleared: Cluster, webhook: Webhook) -> None:
    webhook.kill()
    try:
        made = cleared.api.create(asked("Job", "alone"))
        assert "initContainers" not in objects.pods(made)[0]
    finally:
        webhook.start()
    assert "initContainers" in objects.pods(cleared.api.create(asked("Job", "again")))[0]
