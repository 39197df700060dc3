"""Whether an object that exists may be changed by its update.

`kubectl apply` of a custom resource replaces lists, and with them what was injected: putting it back changes nothing. Otherwise a new
template is refused by the API server, or replaces running pods, so it is left alone unless the user's own change does that anyway.
"""

from __future__ import annotations

from collections.abc import Mapping

from lastcall.kube import inject
from lastcall.kube.annotations import AnnotationError
from lastcall.kube.inject import Options
from lastcall.kube.kinds import Kind
from lastcall.kube.patches import Object, at


def harmless(kind: Kind, old: Object, new: Object, *, options: Options, namespace: Mapping[str, str] | None) -> bool:
    return kind.update == "free" or _restored(old, new, options, namespace) or (kind.update == "rolls" and _rolls(kind, old, new))


def asks_anew(old: Object, new: Object) -> bool:
    """Whether the annotations are the update's own. Wrong ones that were there before must not keep an object from being changed,
    or from being deleted: finalizers are removed by updates."""
    return inject.annotated(old) != inject.annotated(new) and at(new, ("metadata", "deletionTimestamp")) is None


def _restored(old: Object, new: Object, options: Options, namespace: Mapping[str, str] | None) -> bool:
    """Whether the old object has all of it, for the same annotations."""
    if inject.annotated(old) != inject.annotated(new):
        return False
    try:
        return not inject.patch(old, options=options, namespace=namespace)
    except AnnotationError:
        return False


def _rolls(kind: Kind, old: Object, new: Object) -> bool:
    before, after = ([at(obj, template.path) for template in kind.find(obj)] for obj in (old, new))
    return before != after
