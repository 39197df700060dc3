"""From an object to the JSON patch that protects it: a pure function, used by the webhook and by `lastcall kube inject`.

Nothing that the user has set is changed but two things: terminationGracePeriodSeconds is raised, never lowered, and our folder is put
in front of PYTHONPATH. The patch of a patched object is empty.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from lastcall import settings
from lastcall.kube import annotations as noted
from lastcall.kube import kinds, mounts, trainjobs, tree, variables
from lastcall.kube.annotations import Wishes
from lastcall.kube.kinds import Kind, Template
from lastcall.kube.patches import Draft, Object, Path, ShapeError, at

DEFAULT_GRACE = 120  # seconds, where none was asked for; Kubernetes' own default of 30 holds few saves
_KUBERNETES_GRACE = 30
_AFTER_WAIT = 60  # seconds that a default grace leaves after the kill wait
_DISRUPTED = {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]}


@dataclass(frozen=True)
class Options:
    """What the webhook's administrator decides."""

    image: str | None = None
    """An image with lastcall in it, which the init container copies to the pod; None: the user's images have it."""
    pull_policy: str = "IfNotPresent"


@dataclass(frozen=True)
class Injection:
    operations: tuple[Object, ...]
    because: str
    warnings: tuple[str, ...] = ()


def patch(obj: Object, *, options: Options, namespace: Mapping[str, str] | None = None) -> list[Object]:
    """The operations of RFC 6902. AnnotationError names the annotation that is wrong."""
    return list(inject(obj, options=options, namespace=namespace).operations)


def inject(obj: Object, *, options: Options, namespace: Mapping[str, str] | None = None) -> Injection:
    """The patch with its reason. `namespace`: the annotations of the object's namespace."""
    kind = kinds.of(obj)
    if kind is None:
        return Injection((), "not a kind that lastcall protects")
    for found in annotated(obj):
        noted.read(found)
    wishes = asked(obj, kind, namespace)
    idle = tuple(_idle(name, kind) for name in wishes.idle)
    if not wishes.enabled:
        return Injection((), "no annotation asks for it", idle)
    draft = Draft(obj)
    try:
        warnings = _changed(draft, obj, kind, wishes, options)
    except ShapeError as error:
        return Injection((), f"left alone: {error}", idle)
    because = "asked for by annotation" if draft.operations else "nothing is missing"
    return Injection(tuple(draft.operations), because, idle + tuple(warnings))


def asked(obj: Object, kind: Kind, namespace: Mapping[str, str] | None) -> Wishes:
    """What a controller makes of an object that was asked itself is not asked again by way of the namespace."""
    default = None if kinds.owned(obj) else namespace
    return noted.wishes(at(obj, ("metadata", "annotations")), default, ray=kind.ray)


def annotated(obj: Object) -> list[Object]:
    """The annotations of the object and of its templates: those are the pods' own, and are refused here rather than there."""
    kind = kinds.of(obj)
    paths: list[Path] = [(), *(template.path for template in (kind.find(obj) if kind is not None else ()))]
    return [noted.ours(at(obj, (*path, "metadata", "annotations"))) for path in paths]


def _changed(draft: Draft, obj: Object, kind: Kind, wishes: Wishes, options: Options) -> list[str]:
    if kind.name == "TrainJob":
        return trainjobs.inject(draft, wishes)
    found: list[str | None] = []
    for template in kind.find(obj):
        found += _template(draft, template, kind, wishes, options)
    return list(dict.fromkeys(warning for warning in found if warning))


def _template(draft: Draft, template: Template, kind: Kind, wishes: Wishes, options: Options) -> list[str | None]:
    env: Path = (*template.trainer, "env")
    facts = variables.Facts(wishes, kind.ray, _raised(draft, template, wishes), template.exit_codes)
    variables.add(draft, env, variables.wanted(facts))
    mounts.storage(draft, template, wishes)
    _spare_backoff(draft, template)
    warning = mounts.package(draft, template, options.image, options.pull_policy)
    if warning is not None:
        return [warning]
    container = draft.get((*template.trainer, "name"))
    variables.add(draft, env, {"LASTCALL_STOP_FILE": tree.stop_file(container)})
    warnings = [mounts.hook(draft, template)]
    if options.image is not None:
        warnings.append(variables.add_to_python_path(draft, env, container))
    return warnings


def _raised(draft: Draft, template: Template, wishes: Wishes) -> int:
    """The seconds that the pod has from now on."""
    path = (*template.spec, "terminationGracePeriodSeconds")
    present = draft.get(path)
    if present is not None and type(present) is not int:
        raise ShapeError("terminationGracePeriodSeconds is not a whole number")
    wanted = default_grace(wishes) if wishes.grace is None else math.ceil(wishes.grace)
    if wanted > (_KUBERNETES_GRACE if present is None else present):
        draft.put(path, wanted)
        return wanted
    return _KUBERNETES_GRACE if present is None else present


def default_grace(wishes: Wishes) -> int:
    return max(DEFAULT_GRACE, math.ceil(wishes.kill_wait or 0) + _AFTER_WAIT)


def _spare_backoff(draft: Draft, template: Template) -> None:
    """A pod that saved and left, or was taken away, does not count on a Job's backoffLimit, and its successor waits until it is gone.

    Only where the Job has no policy of its own: Kubernetes allows one with restartPolicy Never and podReplacementPolicy Failed only.
    """
    if template.job is None or draft.get((*template.spec, "restartPolicy")) != "Never":
        return
    replacement = draft.get((*template.job, "podReplacementPolicy"))
    if draft.get((*template.job, "podFailurePolicy")) is not None or replacement not in (None, "Failed"):
        return
    codes = {"containerName": draft.get((*template.trainer, "name")), "operator": "In", "values": [_exit_code(draft, template)]}
    saved = {"action": "Ignore", "onExitCodes": codes}
    draft.put((*template.job, "podFailurePolicy"), {"rules": [saved, _DISRUPTED]})


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


def _idle(name: str, kind: Kind) -> str:
    if name.startswith(noted.RAY_PREFIX) and not kind.ray:
        return f'{name} is read on kinds of ray.io only. Use {noted.PREFIX}enabled: "true"'
    return f'{name} has no effect without {noted.PREFIX}enabled: "true"'
