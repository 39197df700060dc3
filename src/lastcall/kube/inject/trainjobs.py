"""A TrainJob has no pod template: it names a runtime, from which the trainer's controller makes a JobSet.

It can carry variables, the grace and volumes, but no init container and no hook. So the annotations are
passed to the JobSet, where the webhook sees the complete templates and adds what is missing. The grace is set
here only if it was given: the runtime's own is not visible here, and might be longer than the default.

Trainer's definition has limits, and the API server refuses a job beyond them, whatever added the entries.
What does not fit is left out: the variables still reach the pods through the JobSet.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from lastcall.kube.inject import mounts, variables
from lastcall.kube.inject.annotations import Wishes
from lastcall.kube.inject.draft import Object, ObjectDraft, Path, at, items

MANAGER = "lastcall.dev/webhook"
_NODE = "node"  # the trainer's names for the training job and its container
_PATCHES: Path = ("spec", "runtimePatches")
TRAINER: Path = ("spec", "trainer")  # has the command and the variables of the container
_ENV: Path = (*TRAINER, "env")
_MOST_PATCHES, _MOST_VARIABLES = 16, 128


def inject(draft: ObjectDraft, wishes: Wishes) -> list[str]:
    """Returns a warning for what did not fit."""
    given = max(
        (seconds for pod in _pods(draft) if type(seconds := pod.get("terminationGracePeriodSeconds")) is int),
        default=0,
    )
    asked = 0 if wishes.grace is None else math.ceil(wishes.grace)
    facts = variables.Facts(wishes, ray=False, grace=max(asked, given) or None)
    said: list[str] = []
    number = len(draft.items(_ENV))
    if number + len(variables.missing(draft, _ENV, variables.wanted(facts))) <= _MOST_VARIABLES:
        variables.add(draft, _ENV, variables.wanted(facts))
    else:
        said.append(
            f"spec.trainer.env has {number} of {_MOST_VARIABLES} possible variables: lastcall's are set only "
            "in the pods of the JobSet"
        )
    if any(isinstance(entry, dict) and entry.get("manager") == MANAGER for entry in draft.items(_PATCHES)):
        return said
    if len(draft.items(_PATCHES)) >= _MOST_PATCHES:
        return [
            *said,
            f"spec.runtimePatches is full ({_MOST_PATCHES} entries): the pods of this job are not protected",
        ]
    pod = ({"terminationGracePeriodSeconds": asked} if asked > given else {}) | _storage(draft, wishes)
    draft.append(_PATCHES, _patch(wishes, pod))
    return said


def _storage(draft: ObjectDraft, wishes: Wishes) -> Object:
    if wishes.storage is None:
        return {}
    containers = [container for pod in _pods(draft) for container in items(pod, ("containers",))]
    if any(mounts.mounted(container, wishes.where()) is not None for container in containers):
        return {}
    container = {"name": _NODE, "volumeMounts": [mounts.storage_mount(wishes)]}
    return {"volumes": [mounts.storage_volume(wishes)], "containers": [container]}


def _patch(wishes: Wishes, pod: Object) -> Object:
    template: Object = {"metadata": {"annotations": dict(wishes.texts)}}
    if pod:
        template["spec"] = {
            "replicatedJobs": [{"name": _NODE, "template": {"spec": {"template": {"spec": pod}}}}]
        }
    return {"manager": MANAGER, "trainingRuntimeSpec": {"template": template}}


def _pods(draft: ObjectDraft) -> Iterator[Object]:
    """The settings of the training pods in the TrainJob's patches."""
    for entry in draft.items(_PATCHES):
        for job in items(entry, ("trainingRuntimeSpec", "template", "spec", "replicatedJobs")):
            pod = at(job, ("template", "spec", "template", "spec"))
            if at(job, ("name",)) == _NODE and isinstance(pod, dict):
                yield pod
