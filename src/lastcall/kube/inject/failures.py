"""What a Job makes of a pod that has saved and left, or was taken away: it must not count on `backoffLimit`, nor end the Job."""

from __future__ import annotations

from typing import Any

from lastcall import settings
from lastcall.kube.inject.draft import Draft, Path, at, items
from lastcall.kube.inject.kinds import Template

_DISRUPTED = {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]}
_FATAL = ("FailJob", "FailIndex")


def spare(draft: Draft, template: Template) -> str | None:
    """A policy where the Job has none, so that its successor waits until the pod is gone, too. A warning where the Job's own ends it.

    Kubernetes allows one with restartPolicy Never and podReplacementPolicy Failed only.
    """
    if template.final:
        return (
            "restartPolicy Never of a PyTorchJob's replicas: the job fails with the first pod that leaves, saved or not. "
            "Set it to ExitCode or OnFailure"
        )
    if template.job is None or draft.get((*template.spec, "restartPolicy")) != "Never":
        return None
    own: Path = (*template.job, "podFailurePolicy")
    container, code = draft.get((*template.trainer, "name")), _exit_code(draft, template)
    if draft.get(own) is not None:
        return _warning(draft.items((*own, "rules")), container, code)
    if draft.get((*template.job, "podReplacementPolicy")) in (None, "Failed"):
        saved = {"action": "Ignore", "onExitCodes": {"containerName": container, "operator": "In", "values": [code]}}
        draft.put(own, {"rules": [saved, _DISRUPTED]})
    return None


def _warning(rules: list[Any], container: object, code: int) -> str | None:
    action = next((at(rule, ("action",)) for rule in rules if _matches(rule, container, code)), None)
    if action not in _FATAL:
        return None
    return (
        f"podFailurePolicy takes exit code {code} of a run that has saved for the end ({action}). Put this rule first: "
        f"{{action: Ignore, onExitCodes: {{containerName: {container}, operator: In, values: [{code}]}}}}"
    )


def _matches(rule: Any, container: object, code: int) -> bool:
    """Whether a container that leaves with this code is meant. Of the conditions of a pod nothing is known yet."""
    if at(rule, ("onExitCodes", "containerName")) not in (None, container):
        return False
    listed = code in items(rule, ("onExitCodes", "values"))
    return {"In": listed, "NotIn": not listed}.get(str(at(rule, ("onExitCodes", "operator"))), False)


def _exit_code(draft: Draft, template: Template) -> int:
    """Of a run that has saved: the user's variable, else the default."""
    (setting,) = (setting for setting in settings.JIT if setting.field == "exit_code")
    env: Path = (*template.trainer, "env")
    index = draft.named(env, setting.variable)
    try:
        code = setting.parse(draft.get((*env, index, "value"))) if index is not None else setting.default
    except ValueError:  # the pod itself will say so
        code = setting.default
    assert isinstance(code, int)
    return code
