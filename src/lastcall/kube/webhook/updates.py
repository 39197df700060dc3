"""What may be changed in an existing object during its update.

`kubectl apply` of a custom resource replaces lists, and with them what was injected: that is restored. What
the object did not have before is not added: a changed template is refused by the API server, or replaces
running pods. So it is left alone, unless the user's own change does that anyway.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from lastcall.kube.inject import inject, kinds
from lastcall.kube.inject.annotations import AnnotationError
from lastcall.kube.inject.draft import Object, applied, at, replayed
from lastcall.kube.inject.inject import InjectOptions
from lastcall.kube.inject.kinds import ObjectKind


def replaces_pods(kind: ObjectKind, old: Object, new: Object, put_back: Sequence[Object]) -> bool:
    """Whether our change makes this update no worse. What the update removed is not a change by the user."""
    before, after = (
        [at(obj, template.path) for template in kind.find(obj)] for obj in (old, applied(new, put_back))
    )
    return kind.update == "free" or (kind.update == "rolls" and before != after)


def lost(
    old: Object, new: Object, *, options: InjectOptions, namespace: Mapping[str, str] | None
) -> tuple[Object, ...]:
    """The operations that restore what the update removed: those that the new object needs, as it was
    annotated, and the old one does not. A field that an older API server drops is missing in both, and is not
    added again and again."""
    metadata = at(new, ("metadata",))
    as_before = {
        **(metadata if isinstance(metadata, dict) else {}),
        "annotations": at(old, ("metadata", "annotations")),
    }
    try:
        wanted = inject.patch({**new, "metadata": as_before}, options=options, namespace=namespace)
        missing = inject.patch(old, options=options, namespace=namespace)
    except AnnotationError:
        return ()
    return tuple(replayed(new, [operation for operation in wanted if operation not in missing]))


def asks_anew(old: Object, new: Object) -> bool:
    """Whether the annotations are the update's own. Wrong ones that were there before must not keep an object
    from being changed, or from being deleted: finalizers are removed by updates."""
    return (
        inject.annotated(old) != inject.annotated(new) and at(new, ("metadata", "deletionTimestamp")) is None
    )


def stays(old: object, new: Object) -> tuple[str, ...]:
    """A warning if protection is no longer enabled: what it added is the user's by now and is not removed."""
    if not isinstance(old, dict) or not _asks(old) or _asks(new):
        return ()
    return ("what lastcall added to this object stays. To remove it, delete and recreate the object",)


def _asks(obj: Object) -> bool:
    kind = kinds.of(obj)
    try:
        return kind is not None and inject.asked(obj, kind, None).enabled
    except AnnotationError:
        return False
