"""A TrainJob has no pod template: it names a runtime, from which the trainer's controller makes a JobSet.

It can carry variables, the grace and volumes, but no init container and no hook. So the annotations are passed on to the JobSet, where
the webhook sees the templates whole and adds what is missing. The grace is set here only where it was asked for: what the runtime says
cannot be seen, and might be more than a default.

Trainer's definition has limits, and the API server refuses a job beyond them, whoever has brought it there. What does not fit is left
out: variables come to the pods by way of the JobSet all the same.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from lastcall.kube.inject import mounts, variables
from lastcall.kube.inject.annotations import Wishes
from lastcall.kube.inject.draft import Draft, Object, Path, at, items

MANAGER = "lastcall.dev/webhook"
_NODE = "node"  # what the trainer calls the job, and the container in it, that trains
_PATCHES: Path = ("spec", "runtimePatches")
TRAINER: Path = ("spec", "trainer")  # has the command and the variables of the container
_ENV: Path = (*TRAINER, "env")
_MOST_PATCHES, _MOST_VARIABLES = 16, 128


def inject(draft: Draft, wishes: Wishes) -> list[str]:
    """What there was no room for is said."""
    given = max((seconds for pod in _pods(draft) if type(seconds := pod.get("terminationGracePeriodSeconds")) is int), default=0)
    asked = 0 if wishes.grace is None else math.ceil(wishes.grace)
    facts = variables.Facts(wishes, ray=False, grace=max(asked, given) or None)
    said: list[str] = []
    number = len(draft.items(_ENV))
    if number + len(variables.missing(draft, _ENV, variables.wanted(facts))) <= _MOST_VARIABLES:
        variables.add(draft, _ENV, variables.wanted(facts))
    else:
        said.append(f"spec.trainer.env has {number} variables of {_MOST_VARIABLES}: lastcall's are in the pods of the JobSet only")
    if any(isinstance(entry, dict) and entry.get("manager") == MANAGER for entry in draft.items(_PATCHES)):
        return said
    if len(draft.items(_PATCHES)) >= _MOST_PATCHES:
        return [*said, f"spec.runtimePatches has {_MOST_PATCHES} entries, and takes no more: the pods of this job are not protected"]
    pod = ({"terminationGracePeriodSeconds": asked} if asked > given else {}) | _storage(draft, wishes)
    draft.append(_PATCHES, _patch(wishes, pod))
    return said


def _storage(draft: Draft, wishes: Wishes) -> Object:
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
        template["spec"] = {"replicatedJobs": [{"name": _NODE, "template": {"spec": {"template": {"spec": pod}}}}]}
    return {"manager": MANAGER, "trainingRuntimeSpec": {"template": template}}


def _pods(draft: Draft) -> Iterator[Object]:
    """What the patches in the TrainJob say of the pods that train."""
    for entry in draft.items(_PATCHES):
        for job in items(entry, ("trainingRuntimeSpec", "template", "spec", "replicatedJobs")):
            pod = at(job, ("template", "spec", "template", "spec"))
            if at(job, ("name",)) == _NODE and isinstance(pod, dict):
                yield pod
