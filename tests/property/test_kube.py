"""Whatever is sent to the webhook: it answers, and what it patches stays what it was but for what is ours."""

from __future__ import annotations

import base64
import copy
import json
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from helpers.kube.objects import every, trainjob
from lastcall.kube.inject import annotations as noted
from lastcall.kube.inject import draft, inject, kinds
from lastcall.kube.inject.inject import InjectOptions
from lastcall.kube.webhook import review

OPTIONS = InjectOptions(image="lastcall:1")
TEXT = st.text(max_size=12)
LEAF = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | TEXT
JUNK = st.recursive(
    LEAF, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXT, inner, max_size=4), max_leaves=20
)
NAMES = st.sampled_from([*noted.NAMES, "lastcall.dev/unknown", "app"])
VALUES = (
    st.sampled_from(["true", "false", "5", "60", "1e3", "/ckpt", "shared/x", "", "nan", "-1"])
    | st.text(max_size=20)
    | LEAF
)
ANNOTATIONS = st.dictionaries(NAMES, VALUES, max_size=4).map(
    lambda made: {"lastcall.dev/enabled": "true"} | made
)
MANY = settings(max_examples=300, deadline=None, suppress_health_check=list(HealthCheck))


def places(obj: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The paths of all values in an object."""
    children = obj.items() if isinstance(obj, dict) else enumerate(obj) if isinstance(obj, list) else ()
    return [path] * bool(path) + [found for key, child in children for found in places(child, (*path, key))]


@st.composite
def damaged(draw: st.DrawFn) -> dict[str, Any]:
    """An object of one of our kinds, with junk in some places."""
    obj = copy.deepcopy(draw(st.sampled_from([*every({}), trainjob({})])))
    obj["metadata"]["annotations"] = draw(ANNOTATIONS)
    for _ in range(draw(st.integers(0, 3))):
        *above, last = draw(st.sampled_from(places(obj)))
        node = draft.at(obj, tuple(above))
        if draw(st.booleans()) and isinstance(node, dict):
            node[
                draw(
                    st.sampled_from(
                        ["env", "volumes", "lifecycle", "initContainers", "volumeMounts", "restartPolicy"]
                    )
                )
            ] = draw(JUNK)
        elif last in node if isinstance(node, dict) else last < len(node):
            node[last] = draw(JUNK)
    return obj


def answered(request: Any) -> review.AdmissionAnswer | None:
    body = json.dumps(
        {"apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview", "request": request}
    ).encode()
    try:
        parsed = review.parse(body)
    except review.UnreadableReview:
        return None
    answer = review.answer(parsed, options=OPTIONS, namespace={"lastcall.dev/enabled": "true"})
    json.dumps(answer.document, allow_nan=False)
    return answer


@MANY
@given(st.binary(max_size=200))
def test_any_bytes_are_answered_or_told_to_be_unreadable(body: bytes) -> None:
    try:
        review.parse(body)
    except review.UnreadableReview:
        pass


@MANY
@given(
    JUNK
    | st.fixed_dictionaries(
        {
            "uid": TEXT,
            "operation": st.sampled_from(["CREATE", "UPDATE", "DELETE"]) | JUNK,
            "object": JUNK,
            "oldObject": JUNK,
        }
    )
)
def test_any_request_is_admitted_as_it_is(request: Any) -> None:
    answer = answered(request)
    assert answer is None or (answer.document["response"]["allowed"] is True and answer.operations == 0)


@MANY
@given(damaged(), st.sampled_from(["CREATE", "UPDATE"]), st.none() | JUNK | damaged())
def test_an_object_with_junk_in_it_never_fails(obj: dict[str, Any], operation: str, old: Any) -> None:
    answer = answered({"uid": "u", "operation": operation, "namespace": "n", "object": obj, "oldObject": old})
    assert answer is not None and answer.result != "failed", answer
    if answer.operations:
        draft.applied(obj, json.loads(base64.b64decode(answer.document["response"]["patch"])))


@st.composite
def version(draw: st.DrawFn, kind: str) -> dict[str, Any]:
    """An object as somebody may have it at one time or another."""
    (made,) = (obj for obj in [*every({}), trainjob({})] if obj["kind"] == kind)
    made["metadata"]["annotations"] = {
        "lastcall.dev/enabled": "true",
        **draw(st.sampled_from([{}, {"lastcall.dev/grace-seconds": "60"}])),
    }
    for path in [path for path in places(made) if path[-2:] == ("containers", 0)]:
        container, pod = draft.at(made, path), draft.at(made, path[:-2])
        container["name"] = draw(st.sampled_from(["main", "other"]))
        container |= draw(
            st.sampled_from(
                [{}, {"env": [{"name": "A"}]}, {"lifecycle": {"preStop": {"sleep": {"seconds": 5}}}}]
            )
        )
        pod |= draw(st.sampled_from([{}, {"terminationGracePeriodSeconds": 200}, {"restartPolicy": "Never"}]))
    if draw(st.booleans()):
        made = draft.applied(made, inject.patch(made, options=OPTIONS))
    return made


@MANY
@given(
    st.sampled_from([kind.name for kind in kinds.KINDS]).flatmap(
        lambda kind: st.tuples(version(kind), version(kind))
    )
)
def test_an_update_from_one_version_to_another_never_fails(
    versions: tuple[dict[str, Any], dict[str, Any]],
) -> None:
    old, new = versions
    answer = answered({"uid": "u", "operation": "UPDATE", "namespace": "n", "object": new, "oldObject": old})
    assert answer is not None and answer.result in ("patched", "unchanged"), answer
    if answer.operations:
        draft.applied(new, json.loads(base64.b64decode(answer.document["response"]["patch"])))


def kept(before: Any, after: Any, path: tuple[Any, ...] = ()) -> None:
    """All that was there is there still; lists have grown at their ends only."""
    if path and path[-1] == "terminationGracePeriodSeconds" and isinstance(before, int):
        assert after >= before
    elif isinstance(before, dict) and isinstance(after, dict):
        for key, value in before.items():
            kept(value, after[key], (*path, key))
    elif isinstance(before, list) and isinstance(after, list):
        for index, value in enumerate(before):
            kept(value, after[index], (*path, index))
    elif isinstance(before, str) and before != after:
        assert path[-1] == "value" and after == f"/opt/lastcall/site:{before}"
    else:
        assert before is None or before == after


@MANY
@given(damaged())
def test_a_patch_applies_keeps_what_was_there_and_is_made_once(obj: dict[str, Any]) -> None:
    before = copy.deepcopy(obj)
    try:
        operations = inject.patch(obj, options=OPTIONS)
    except noted.AnnotationError:
        return
    assert obj == before
    after = draft.applied(obj, operations)
    kept(before, after)
    assert inject.patch(after, options=OPTIONS) == []


@pytest.mark.parametrize("depth", [100, 300, 450, 900, 100_000])
def test_an_object_that_is_very_deep_is_admitted_or_told_to_be_unreadable(depth: int) -> None:
    obj = every({"lastcall.dev/enabled": "true"})[5]
    obj["spec"]["deep"] = "DEEP"
    review_of = {
        "apiVersion": "admission.k8s.io/v1",
        "kind": "AdmissionReview",
        "request": {"uid": "u", "operation": "CREATE", "object": obj},
    }
    body = json.dumps(review_of).replace('"DEEP"', '{"a":[' * depth + "1" + "]}" * depth).encode()
    try:
        answer = review.answer(review.parse(body), options=OPTIONS)
    except review.UnreadableReview:
        assert depth > 300
        return
    assert answer.document["response"]["allowed"] is True
    assert depth > 100 or answer.result == "patched"


def test_an_object_of_five_megabytes_is_patched() -> None:
    obj = every({"lastcall.dev/enabled": "true"})[5]
    container = obj["spec"]["template"]["spec"]["containers"][0]
    container["env"] = [{"name": f"V{index}", "value": "ü" * 40} for index in range(20_000)]
    answer = answered({"uid": "u", "operation": "CREATE", "object": obj})
    assert answer is not None and answer.result == "patched"
    made = json.loads(base64.b64decode(answer.document["response"]["patch"]))
    assert kinds.of(draft.applied(obj, made)) is not None
