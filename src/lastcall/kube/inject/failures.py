"""How a Job treats a pod that saved and exited, or was evicted: it must not count towards `backoffLimit`, nor
end the Job."""

from __future__ import annotations

from typing import Any

from lastcall import settings
from lastcall.kube.inject.draft import ObjectDraft, Path, at, items
from lastcall.kube.inject.kinds import Template

_DISRUPTED = {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]}
_FATAL = ("FailJob", "FailIndex")


def spare(draft: ObjectDraft, template: Template) -> str | None:
    """Adds a policy if the Job has none, which also makes the replacement wait until the pod is gone. Warns
    if the Job's own policy would end it.

    Kubernetes allows one with restartPolicy Never and podReplacementPolicy Failed only.
    """
    if template.final:
        return (
            "restartPolicy Never of a PyTorchJob's replicas: the job fails when its first pod exits, saved "
            "or "
            "not. Set it to ExitCode or OnFailure"
        )
    if template.job is None or draft.get((*template.spec, "restartPolicy")) != "Never":
        return None
    own: Path = (*template.job, "podFailurePolicy")
    container, code = draft.get((*template.trainer, "name")), _exit_code(draft, template)
    if draft.get(own) is not None:
        return _warning(draft.items((*own, "rules")), container, code)
    if draft.get((*template.job, "podReplacementPolicy")) in (None, "Failed"):
        saved = {
            "action": "Ignore",
            "onExitCodes": {"containerName": container, "operator": "In", "values": [code]},
        }
        draft.put(own, {"rules": [saved, _DISRUPTED]})
    return None


def _warning(rules: list[Any], container: object, code: int) -> str | None:
    action = next((at(rule, ("action",)) for rule in rules if _matches(rule, container, code)), None)
    if action not in _FATAL:
        return None
    return (
        f"podFailurePolicy ends the Job ({action}) on exit code {code} of a saved run. Put this rule first: "
        f"{{action: Ignore, onExitCodes: {{containerName: {container}, operator: In, values: [{code}]}}}}"
    )


def _matches(rule: Any, container: object, code: int) -> bool:
    """Whether the rule matches a container that exits with this code. The conditions of a pod are not known
    yet."""
    if at(rule, ("onExitCodes", "containerName")) not in (None, container):
        return False
    listed = code in items(rule, ("onExitCodes", "values"))
    return {"In": listed, "NotIn": not listed}.get(str(at(rule, ("onExitCodes", "operator"))), False)


def _exit_code(draft: ObjectDraft, template: Template) -> int:
    """The exit code of a saved run: the user's variable, else the default."""
    (setting,) = (setting for setting in settings.JIT if setting.field == "exit_code")
    env: Path = (*template.trainer, "env")
    index = draft.named(env, setting.variable)
    try:
        code = setting.parse(draft.get((*env, index, "value"))) if index is not None else setting.default
    except ValueError:  # the pod itself will report it
        code = setting.default
    assert isinstance(code, int)
    return code
