"""The variables that a training container gets, each only if the user has none of that name."""

from __future__ import annotations

import math
from dataclasses import dataclass

from lastcall import settings
from lastcall.kube.inject.annotations import Wishes
from lastcall.kube.inject.draft import ObjectDraft, Path, ShapeError, at
from lastcall.kube.inject.package_volume import SITE

# the training operator's "retryable, defined by the user": with restartPolicy ExitCode it gives up below 128
RETRIED_EXIT_CODE = 138
_DRAIN_MARGIN = 10  # seconds that Ray needs to exit after the drain, before the kubelet's SIGKILL
_OTHER_NAME = {setting.variable: setting.alias for setting in settings.JIT if setting.alias} | {
    setting.alias: setting.variable for setting in settings.JIT if setting.alias
}


@dataclass(frozen=True)
class Facts:
    """The inputs for the variables."""

    wishes: Wishes
    ray: bool
    grace: int | None  # the pod's grace in seconds; None if it is unknown
    exit_codes: bool = False


def wanted(facts: Facts) -> dict[str, str]:
    """Ray's kinds get the seeds' own variables: with those, only Ray Train is patched in their processes."""
    wishes, grace = facts.wishes, facts.grace
    wait = wishes.texts.get("lastcall.dev/kill-wait-seconds")
    made: dict[str, str | None] = {}
    if facts.ray:
        made["RAY_TRAIN_JIT_CHECKPOINT_ENABLED"] = "true"
        made["RAY_TRAIN_JIT_CHECKPOINT_KILL_WAIT"] = wait
    else:
        made["LASTCALL_ENABLED"] = "1"
        made["LASTCALL_KILL_WAIT_SECONDS"] = wait
        # Ray Train's own storage_path says where its checkpoints go
        made["LASTCALL_DIRECTORY"] = wishes.where()
    if grace is not None:
        made["LASTCALL_GRACE_SECONDS"] = str(grace)
        name, seconds = (
            ("RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S", drain(grace))
            if facts.ray
            else ("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", grace)
        )
        made[name] = str(seconds)
    if facts.exit_codes:
        made["LASTCALL_EXIT_CODE"] = str(RETRIED_EXIT_CODE)
    return {name: value for name, value in made.items() if value is not None}


def add(draft: ObjectDraft, env: Path, variables: dict[str, str]) -> None:
    """To the list of variables at `env`."""
    for name, value in missing(draft, env, variables).items():
        draft.append(env, {"name": name, "value": value})


def missing(draft: ObjectDraft, env: Path, variables: dict[str, str]) -> dict[str, str]:
    """The variables that are not in the list at `env`. A setting given by its other name counts as given."""
    there = [at(item, ("name",)) for item in draft.items(env)]  # of any type: they are not checked yet
    return {
        name: value
        for name, value in variables.items()
        if name not in there and _OTHER_NAME.get(name) not in there
    }


def add_to_python_path(draft: ObjectDraft, env: Path, container: object) -> str | None:
    """In front of the existing entries: our sitecustomize forwards to the user's, theirs not to ours. A
    warning if that is impossible."""
    index = draft.named(env, "PYTHONPATH")
    if index is None:
        draft.append(env, {"name": "PYTHONPATH", "value": SITE})
        return None
    if draft.get((*env, index, "valueFrom")) is not None:
        return (
            f"container {container}: PYTHONPATH has a valueFrom and is left unchanged: the mounted lastcall "
            "will not be found. "
            f"Add {SITE} to it, or install lastcall in the image"
        )
    given = draft.get((*env, index, "value")) or ""
    if not isinstance(given, str):
        raise ShapeError("PYTHONPATH is not text")
    if SITE not in given.split(":"):
        draft.put((*env, index, "value"), f"{SITE}:{given}" if given else SITE)
    return None


def drain(grace: int) -> int:
    """How long Ray may drain a node, so that it has exited when the grace ends."""
    return max(grace - _DRAIN_MARGIN, math.ceil(grace / 2))
