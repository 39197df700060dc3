from __future__ import annotations

import copy
import json
from typing import Any

import pytest

from helpers.kube import objects
from helpers.kube.objects import ON, every, job, made, operations, protected, trainer
from lastcall.kube.inject import draft, inject
from lastcall.kube.inject.inject import InjectOptions
from lastcall.kube.webhook import review

OPTIONS = InjectOptions(image="lastcall:1")


def answered(body: bytes, **more: Any) -> review.AdmissionAnswer:
    return review.answer(review.parse(body), options=OPTIONS, **more)


def response(body: bytes, **more: Any) -> dict[str, Any]:
    found: dict[str, Any] = answered(body, **more).document["response"]
    return found


def test_an_annotated_object_is_admitted_with_a_patch() -> None:
    answer = answered(objects.review(job()))
    assert answer.result == "patched"
    assert (
        answer.document["apiVersion"] == "admission.k8s.io/v1"
        and answer.document["kind"] == "AdmissionReview"
    )
    said = answer.document["response"]
    assert (said["uid"], said["allowed"], said["patchType"]) == ("abc", True, "JSONPatch")
    assert draft.applied(job(), operations(answer.document)) == protected(job())


def test_an_object_without_annotations_is_admitted_without_a_patch() -> None:
    assert response(objects.review(job({}))) == {"uid": "abc", "allowed": True}


def test_a_wrong_value_is_refused_with_a_message_that_names_the_annotation() -> None:
    said = response(objects.review(job({"lastcall.dev/enabled": "sure"})))
    assert said["allowed"] is False and "patch" not in said
    assert said["status"]["message"].startswith("lastcall.dev/enabled: 'sure' is neither yes nor no")


def test_the_namespace_gives_the_default() -> None:
    assert answered(objects.review(job({})), namespace=ON).result == "patched"


def test_a_wrong_annotation_of_the_namespace_is_left_out_with_a_warning() -> None:
    said = response(objects.review(job({})), namespace={"lastcall.dev/enabled": "sure"})
    assert said["allowed"] is True and "patch" not in said
    assert said["warnings"][0].startswith(
        "ignoring the namespace's annotations: lastcall.dev/enabled: 'sure'"
    )


def test_a_namespace_is_refused_when_its_own_annotation_is_wrong() -> None:
    def namespace(value: str) -> bytes:
        obj = {
            "apiVersion": "v1",
            "kind": "Namespace",
            "metadata": {"name": "x", "annotations": {"ray.io/jit-checkpoint-kill-wait": value}},
        }
        return objects.review(obj)

    assert response(namespace("5"))["allowed"] is True
    assert response(namespace("x"))["allowed"] is False


@pytest.mark.parametrize(
    "more", [{"operation": "DELETE"}, {"operation": "CONNECT"}, {"subResource": "status"}]
)
def test_what_creates_nothing_is_admitted_as_it_is(more: dict[str, Any]) -> None:
    assert response(objects.review(job(), **more)) == {"uid": "abc", "allowed": True}


@pytest.mark.parametrize("obj", [None, 5, "text", [], {}, {"apiVersion": "batch/v1", "kind": "Job"}])
def test_an_object_that_is_none_is_admitted_as_it_is(obj: Any) -> None:
    assert response(objects.review(obj)) == {"uid": "abc", "allowed": True}


def test_an_annotated_object_without_a_template_is_admitted_with_a_warning() -> None:
    found = response(objects.review(made("batch/v1", "Job", {}, ON)))
    assert found["allowed"] and "patch" not in found
    assert "no pod template" in found["warnings"][0]


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"[]", b"null", b"\xff\xfe", b"[" * 100_000,
     json.dumps({"apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview"}).encode(),
     objects.review(job()).replace(b"k8s.io/v1", b"k8s.io/v1beta1", 1), objects.review(job(), uid=5)],
)  # fmt: skip
def test_what_is_not_a_review_is_told_to_be_unreadable(body: bytes) -> None:
    with pytest.raises(review.UnreadableReview):
        review.parse(body)


def test_an_error_of_our_own_admits_the_object(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object, **__: object) -> None:
        raise ZeroDivisionError("ours")

    monkeypatch.setattr(inject, "inject", broken)
    answer = answered(objects.review(job()))
    assert answer.result == "failed" and answer.because == "ZeroDivisionError: ours"
    assert answer.document["response"] == {"uid": "abc", "allowed": True}


def test_a_log_line_says_which_object_it_was_and_nothing_of_its_content() -> None:
    told = review.parse(objects.review(job())).told()
    assert told == {"uid": "abc", "operation": "CREATE", "kind": "Job", "namespace": "team", "name": "x"}


# Updates


@pytest.mark.parametrize("obj", every(ON), ids=lambda obj: obj["kind"])
def test_what_an_apply_has_removed_is_put_back(obj: dict[str, Any]) -> None:
    answer = answered(objects.review(obj, "UPDATE", protected(obj)))
    assert draft.applied(obj, operations(answer.document)) == protected(obj)


@pytest.mark.parametrize("obj", every(ON), ids=lambda obj: obj["kind"])
def test_an_object_that_runs_without_protection_is_left_alone(obj: dict[str, Any]) -> None:
    changed = {**obj, "metadata": {**obj["metadata"], "labels": {"a": "b"}}}
    answer = answered(objects.review(changed, "UPDATE", obj))
    assert answer.result == ("patched" if obj["kind"] == "CronJob" else "unchanged")


@pytest.mark.parametrize("obj", every(ON), ids=lambda obj: obj["kind"])
def test_a_change_that_replaces_the_pods_anyway_protects_them(obj: dict[str, Any]) -> None:
    changed = json.loads(json.dumps(obj).replace('"image": "train"', '"image": "newer"'))
    rolls = obj["kind"] in ("RayCluster", "RayJob", "RayService", "StatefulSet", "Deployment", "CronJob")
    assert answered(objects.review(changed, "UPDATE", obj)).result == ("patched" if rolls else "unchanged")


def test_an_annotation_that_comes_too_late_is_warned_of() -> None:
    said = response(objects.review(job(), "UPDATE", job({})))
    assert "patch" not in said and said["warnings"] == [
        "lastcall will apply these annotations only when this Job is recreated: it is already running"
    ]


def test_a_later_version_of_the_webhook_does_not_replace_running_pods() -> None:
    obj = every(ON)[0]
    old = protected(obj)
    for group in (old["spec"]["headGroupSpec"], *old["spec"]["workerGroupSpecs"]):
        del group["template"]["spec"]["containers"][0]["lifecycle"]  # what an earlier one did not add yet
    answer = answered(objects.review(obj, "UPDATE", old))
    assert draft.applied(obj, operations(answer.document)) == old


def test_a_field_that_the_api_server_drops_does_not_keep_the_rest_from_being_put_back() -> None:
    obj = job(restartPolicy="Never", terminationGracePeriodSeconds=30)
    old = protected(obj)
    del old["spec"]["podFailurePolicy"]  # Kubernetes 1.20
    answer = answered(objects.review(obj, "UPDATE", old))
    assert draft.applied(obj, operations(answer.document)) == old


def test_other_annotations_put_back_what_was_there_and_warn() -> None:
    cluster = every({**ON, "lastcall.dev/grace-seconds": "200"})[0]
    later = {
        **cluster,
        "metadata": {**cluster["metadata"], "annotations": {**ON, "lastcall.dev/grace-seconds": "500"}},
    }
    answer = answered(objects.review(later, "UPDATE", protected(cluster)))
    assert draft.applied(later, operations(answer.document))["spec"] == protected(cluster)["spec"]
    assert (
        "lastcall will apply these annotations only when this" in answer.document["response"]["warnings"][0]
    )
    stays = {**protected(cluster), "metadata": later["metadata"]}
    said = response(objects.review(stays, "UPDATE", protected(cluster)))
    assert (
        "patch" not in said and "lastcall will apply these annotations only when this" in said["warnings"][0]
    )


def test_an_update_with_a_new_wrong_value_is_refused() -> None:
    assert (
        response(objects.review(job({"lastcall.dev/enabled": "sure"}), "UPDATE", job({})))["allowed"] is False
    )


def test_a_wrong_value_that_was_there_before_does_not_stand_in_the_way() -> None:
    wrong = job({"lastcall.dev/enabled": "sure"})
    said = response(objects.review(wrong, "UPDATE", copy.deepcopy(wrong)))
    assert said["allowed"] is True and "neither yes nor no" in said["warnings"][0]


def test_an_object_that_is_being_deleted_is_never_refused() -> None:
    wrong = job({"lastcall.dev/enabled": "sure"}, metadata={"deletionTimestamp": "2026-01-01T00:00:00Z"})
    assert response(objects.review(wrong, "UPDATE", job({})))["allowed"] is True


@pytest.mark.parametrize("metadata", [True, 5, "text", [], None])
@pytest.mark.parametrize("old", [{}, {"metadata": True}, job()])
def test_an_update_without_proper_metadata_is_admitted_as_it_is(metadata: Any, old: Any) -> None:
    new = {**job(), "metadata": metadata}
    answer = answered(objects.review(new, "UPDATE", old), namespace=ON)
    assert answer.failure is None and answer.document["response"]["allowed"] is True


def test_what_a_controller_makes_is_never_refused() -> None:
    """It would try for ever, and the job would never start."""
    owner = {"apiVersion": "apps/v1", "kind": "DaemonSet", "name": "x", "uid": "1", "controller": True}
    wrong = made("v1", "Pod", objects.pod(), {"lastcall.dev/enabled": "sure"}, ownerReferences=[owner])
    said = response(objects.review(wrong))
    assert said["allowed"] is True and "patch" not in said
    assert "neither yes nor no" in said["warnings"][0]


def test_protection_that_is_not_asked_for_any_more_is_told_to_stay() -> None:
    before = protected(every(ON)[8])
    after = {**before, "metadata": {**before["metadata"], "annotations": {"lastcall.dev/enabled": "false"}}}
    said = response(objects.review(after, "UPDATE", before))
    assert "patch" not in said and "stays" in said["warnings"][0]
    assert "warnings" not in response(objects.review(after, "UPDATE", after))


@pytest.mark.parametrize("kind", ["Deployment", "RayCluster", "CronJob"])
def test_an_update_that_renames_the_container_protects_it(kind: str) -> None:
    """Annotated, and not protected so far: what the two versions need differs in the middle of the patch
    only."""
    (before,) = (obj for obj in every(ON) if obj["kind"] == kind)
    after = json.loads(json.dumps(before).replace('"main"', '"renamed"'))
    answer = answered(objects.review(after, "UPDATE", before))
    assert answer.result == "patched"
    assert draft.applied(after, operations(answer.document)) == protected(after)


def test_a_part_of_a_patch_makes_what_the_rest_would_have_made() -> None:
    before = job()
    whole = inject.patch(before, options=InjectOptions(image="lastcall:1"))
    for number in range(len(whole)):
        left = [operation for place, operation in enumerate(whole) if place != number]
        made_anew = draft.applied(before, draft.replayed(before, left))
        assert draft.applied(before, whole) != made_anew or whole[number]["value"] == {}
    assert draft.replayed(before, whole) == whole


def test_f19_an_exit_code_that_gets_lost_is_an_admission_warning() -> None:
    obj = job()
    trainer(obj)["command"] = ["bash", "-c", "python train.py | tee log"]
    answer = answered(objects.review(obj))
    (warning,) = answer.document["response"]["warnings"]
    assert answer.result == "patched" and "`tee log`" in warning and "looks finished" in warning
