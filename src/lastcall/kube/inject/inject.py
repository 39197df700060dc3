"""From an object to the JSON patch that protects it: a pure function, used by the webhook and by `lastcall
kube inject`.

Only two of the user's own values are changed: terminationGracePeriodSeconds is raised, never lowered, and our
folder is put in front of PYTHONPATH. The patch of a patched object is empty.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from lastcall import settings
from lastcall.kube.inject import annotations as noted
from lastcall.kube.inject import exit_codes, failures, kinds, mounts, package_volume, trainjobs, variables
from lastcall.kube.inject.annotations import Wishes
from lastcall.kube.inject.draft import Object, ObjectDraft, Path, ShapeError, at, pointer
from lastcall.kube.inject.kinds import ObjectKind, Template

DEFAULT_GRACE = 120  # seconds, if none is given; Kubernetes' default of 30 is too short for most saves
_KUBERNETES_GRACE = 30
_NO_TEMPLATE = (
    "this {} has no pod template, so nothing of it is protected: annotate the object that creates its pods"
)
_AFTER_WAIT = 60  # seconds that the default grace leaves after the kill wait


@dataclass(frozen=True)
class InjectOptions:
    """The settings of the webhook's administrator."""

    image: str | None = None
    """An image with lastcall, from which the init container copies the package; None: the users' images have
    it."""
    pull_policy: str = "IfNotPresent"


@dataclass(frozen=True)
class Injection:
    operations: tuple[Object, ...]
    because: str
    warnings: tuple[str, ...] = ()
    left: bool = False  # of a supported kind, but not protected


def patch(obj: Object, *, options: InjectOptions, namespace: Mapping[str, str] | None = None) -> list[Object]:
    """The operations of RFC 6902. AnnotationError names the annotation that is wrong."""
    return list(inject(obj, options=options, namespace=namespace).operations)


def inject(obj: Object, *, options: InjectOptions, namespace: Mapping[str, str] | None = None) -> Injection:
    """The patch and the reason. `namespace`: the annotations of the object's namespace."""
    kind = kinds.of(obj)
    if kind is None:
        return _of_another_kind(obj)
    for found in annotated(obj):
        noted.read(found)
    wishes = asked(obj, kind, namespace)
    idle = tuple(_idle(name, kind) for name in wishes.idle) + tuple(_beaten(name) for name in wishes.beaten)
    if not wishes.enabled:
        return Injection((), "not enabled by an annotation", idle, left=True)
    draft = ObjectDraft(obj)
    try:
        warnings = _changed(draft, obj, kind, wishes, options)
    except ShapeError as error:
        return Injection((), f"left alone: {error}", idle, left=True)
    if kinds.runs_ray(obj, kind) and wishes.directory is not None and wishes.storage is None:
        warnings.append(
            f"{noted.PREFIX}directory has no effect on Ray's kinds without "
            f"{noted.PREFIX}storage: see Ray's storage_path"
        )
    because = "enabled by annotation" if draft.operations else "nothing to change"
    return Injection(tuple(draft.operations), because, idle + tuple(warnings))


def asked(obj: Object, kind: ObjectKind, namespace: Mapping[str, str] | None) -> Wishes:
    """An object that a controller creates from an annotated one is not enabled again by the namespace."""
    default = None if kinds.owned(obj) else namespace
    return noted.wishes(at(obj, ("metadata", "annotations")), default, ray=kinds.runs_ray(obj, kind))


def _of_another_kind(obj: Object) -> Injection:
    """A namespace's annotations are checked when they are set; on an unsupported kind, they would silently
    have no effect."""
    found = at(obj, ("metadata", "annotations"))
    if (at(obj, ("apiVersion",)), at(obj, ("kind",))) == ("v1", "Namespace"):
        noted.wishes(found, ray=True)
        return Injection((), "the namespace's annotations are valid")
    because = "not a kind that lastcall protects"
    ignored = (
        f"{at(obj, ('kind',))} is {because}: its annotations have no effect. Supported kinds: "
        f"{', '.join(kinds.names())}"
    )
    return Injection((), because, (ignored,) if noted.ours(found) else ())


def annotated(obj: Object) -> list[Object]:
    """The annotations of the object and of its templates: the latter become the pods' own, and are refused
    here rather than there."""
    kind = kinds.of(obj)
    found = list(kind.find(obj)) if kind is not None else []
    # of the Jobs that a CronJob or a JobSet makes
    around = [template.job[:-1] for template in found if template.job]
    paths: list[Path] = list(dict.fromkeys([(), *around, *(template.path for template in found)]))
    return [noted.ours(at(obj, (*path, "metadata", "annotations"))) for path in paths]


def _changed(
    draft: ObjectDraft, obj: Object, kind: ObjectKind, wishes: Wishes, options: InjectOptions
) -> list[str]:
    if kind.name == "TrainJob":
        return [*trainjobs.inject(draft, wishes), *filter(None, [exit_codes.lost(obj, trainjobs.TRAINER)])]
    templates = list(kind.find(obj))
    found: list[str | None] = [] if templates else [_NO_TEMPLATE.format(kind.name)]
    for template in templates:
        if template.windows:
            found.append(f"{_place(template)}: skipping pods on Windows: lastcall runs on Linux only")
        else:
            found += _template(draft, template, kinds.runs_ray(obj, kind), wishes, options)
            # KubeRay generates the command of Ray's pods
            if not kinds.runs_ray(obj, kind) and not _comes_back(obj, kind, template):
                found.append(exit_codes.lost(obj, template.trainer))
    return list(dict.fromkeys(warning for warning in found if warning))


def _comes_back(obj: Object, kind: ObjectKind, template: Template) -> bool:
    """Whether its pods are restarted whatever their exit code."""
    ends = template.job is not None or kind.name == "PyTorchJob"
    return not ends and at(obj, (*template.spec, "restartPolicy")) in (None, "Always")


def _template(
    draft: ObjectDraft, template: Template, ray: bool, wishes: Wishes, options: InjectOptions
) -> list[str | None]:
    env: Path = (*template.trainer, "env")
    facts = variables.Facts(wishes, ray, _raised(draft, template, wishes), template.exit_codes)
    variables.add(draft, env, variables.wanted(facts))
    warnings = [mounts.storage(draft, template, wishes), failures.spare(draft, template)]
    warning = mounts.package(draft, template, options.image, options.pull_policy)
    if warning is not None:
        return [*warnings, warning]
    container = draft.get((*template.trainer, "name"))
    variables.add(draft, env, {"LASTCALL_STOP_FILE": package_volume.stop_file(container)})
    message = draft.get((*template.trainer, "terminationMessagePath"))
    if isinstance(message, str) and message not in (
        "",
        settings.TERMINATION_LOG,
    ):  # the API server fills it in
        variables.add(draft, env, {"LASTCALL_TERMINATION_LOG": message})
    warnings.append(mounts.hook(draft, template))
    if options.image is not None:
        warnings.append(variables.add_to_python_path(draft, env, container))
    return warnings


def _raised(draft: ObjectDraft, template: Template, wishes: Wishes) -> int:
    """The seconds between SIGTERM and the kill that the pod gets: the time that the user's hook sleeps is
    added."""
    path = (*template.spec, "terminationGracePeriodSeconds")
    present = draft.get(path)
    if present is not None and type(present) is not int:
        raise ShapeError("terminationGracePeriodSeconds is not a whole number")
    slept = mounts.hook_seconds(draft, template)
    wanted = slept + (default_grace(wishes) if wishes.grace is None else math.ceil(wishes.grace))
    given = _KUBERNETES_GRACE if present is None else present
    if wanted > given:
        draft.put(path, wanted)
    return max(wanted, given) - slept


def default_grace(wishes: Wishes) -> int:
    return max(DEFAULT_GRACE, math.ceil(wishes.kill_wait or 0) + _AFTER_WAIT)


def _idle(name: str, kind: ObjectKind) -> str:
    if name.startswith(noted.RAY_PREFIX) and not kind.ray:
        return f'{name} only applies to kinds of ray.io. Use {noted.PREFIX}enabled: "true"'
    return f'{name} has no effect without {noted.PREFIX}enabled: "true"'


def _beaten(name: str) -> str:
    return f"{name} has no effect: the {noted.PREFIX} annotation for the same setting differs and wins"


def _place(template: Template) -> str:
    return pointer(template.path) or "this pod"
