"""Objects of every kind, drawn from their projects' own definitions: what lastcall makes of them is valid by
these, too. Where the projects' files are missing, generated definitions serve (helpers/kube/definitions)."""

from __future__ import annotations

import contextlib
import copy
import io
import json
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import yaml
from hypothesis import HealthCheck, given, settings

from helpers.kube import objects
from helpers.kube.definitions import drawn
from helpers.kube.definitions import kinds as kube_kinds
from lastcall.cli import main
from lastcall.kube.inject import draft, kinds
from lastcall.kube.inject.inject import InjectOptions
from lastcall.kube.webhook import review

SOME = settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
INJECTED = sorted(kube_kinds.NAMES.keys() & {kind.name for kind in kinds.KINDS})
CARRIERS = sorted(kube_kinds.NAMES.keys() - set(INJECTED))


def answered(item: dict[str, Any], operation: str = "CREATE", old: Any = None) -> dict[str, Any]:
    """The object as the API server has it after the webhook's answer."""
    answer = review.answer(
        review.parse(objects.review(item, operation, old)), options=InjectOptions(image="lastcall:1")
    )
    assert answer.result in ("patched", "unchanged"), answer
    return draft.applied(item, objects.operations(answer.document))


def typed(item: dict[str, Any]) -> Any:
    """What `lastcall kube inject` prints."""
    out, file = io.StringIO(), io.StringIO(json.dumps(item))
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(io.StringIO()):
        with mock.patch("sys.stdin", file):
            assert main.main(["kube", "inject", "-f", "-", "--image", "lastcall:1"]) == 0
    return yaml.safe_load(out.getvalue())


@pytest.mark.parametrize("kind", INJECTED)
def test_what_the_webhook_and_inject_write_is_valid_by_the_definition_of_the_kind(kind: str) -> None:
    @SOME
    @given(drawn.items(kind))
    def holds(item: dict[str, Any]) -> None:
        assert kube_kinds.faults(item) == []
        after = answered(item)
        assert after != item, "nothing of it was protected"
        assert kube_kinds.faults(after) == []
        assert typed(item) == after
        assert answered(after) == after

    holds()


@pytest.mark.parametrize("kind", INJECTED)
def test_what_the_webhook_restores_in_an_update_is_valid_and_the_same(kind: str) -> None:
    """The same, since rules in CEL say of a TrainJob that its trainer and its patches never change."""

    @SOME
    @given(drawn.items(kind), drawn.items(kind))
    def holds(old: dict[str, Any], new: dict[str, Any]) -> None:
        before = answered(old)
        assert kube_kinds.faults(answered(new, "UPDATE", before)) == []
        assert answered(old, "UPDATE", before) == before
        if kind == "TrainJob":
            asked_anew = {**old, "metadata": new["metadata"]}
            assert answered(asked_anew, "UPDATE", before)["spec"] == before["spec"]

    holds()


def carried(item: dict[str, Any]) -> Iterator[tuple[draft.Path, dict[str, Any]]]:
    """What is injected of an object that lastcall itself leaves alone, and where its `spec` is in it: the
    JobSet that Trainer makes of a runtime, and the Job that Kueue has made a Workload of."""
    annotations = item["metadata"]["annotations"]
    if item["kind"] != "Workload":
        jobs = item["spec"]["template"]["spec"]
        yield (
            ("spec", "template", "spec"),
            objects.made("jobset.x-k8s.io/v1alpha2", "JobSet", jobs, annotations),
        )
    for index, pods in enumerate(item["spec"].get("podSets", ())):
        yield (
            ("spec", "podSets", index),
            objects.made("batch/v1", "Job", {"template": pods["template"]}, annotations),
        )


@pytest.mark.parametrize("kind", CARRIERS)
def test_what_the_webhook_writes_is_valid_where_controllers_copy_it_from_or_to(kind: str) -> None:
    @SOME
    @given(drawn.items(kind))
    def holds(item: dict[str, Any]) -> None:
        assert kube_kinds.faults(item) == []
        after = copy.deepcopy(item)
        for path, made in carried(item):
            spec = answered(made)["spec"]
            spec.pop("podFailurePolicy", None)  # of the Job, of which a Workload has the pods only
            draft.at(after, path).update(spec)
        assert after != item, "nothing of it was protected"
        assert kube_kinds.faults(after) == []

    holds()


def test_an_object_is_drawn_in_many_ways() -> None:
    """Else the tests above would show nothing."""
    seen: set[str] = set()

    @SOME
    @given(drawn.items("RayJob"))
    def draws(item: dict[str, Any]) -> None:
        seen.update(
            word for word in ("initContainers", "env", "volumes") if f'"{word}": [{{' in json.dumps(item)
        )
        seen.update(
            word for word in ("preStop", "submitterPodTemplate", "workerGroupSpecs") if word in str(item)
        )
        seen.update(
            [
                str(
                    len(
                        draft.at(
                            item,
                            ("spec", "rayClusterSpec", "headGroupSpec", "template", "spec", "containers"),
                        )
                    )
                )
            ]
        )

    draws()
    assert seen >= {
        "initContainers",
        "env",
        "volumes",
        "preStop",
        "submitterPodTemplate",
        "workerGroupSpecs",
        "1",
        "2",
    }
