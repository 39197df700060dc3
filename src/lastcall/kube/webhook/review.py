"""An AdmissionReview (admission.k8s.io/v1) and the answer to it.

Whatever is in the request: the answer admits the object as it is, admits it with a patch, or refuses an
annotation that is wrong. An unknown object is admitted: a webhook that refuses what it does not know blocks a
whole cluster.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from lastcall.kube.inject import annotations as noted
from lastcall.kube.inject import inject, kinds
from lastcall.kube.inject.annotations import AnnotationError
from lastcall.kube.inject.draft import Object, at
from lastcall.kube.inject.inject import Injection, InjectOptions
from lastcall.kube.webhook import updates

VERSION = "admission.k8s.io/v1"
_LONGEST_WARNING = 256  # the API server cuts longer ones
_MOST_WARNINGS = 8
Result = Literal["patched", "unchanged", "refused", "failed"]


class UnreadableReview(ValueError):
    """Not an AdmissionReview: there is no request to answer."""


@dataclass(frozen=True)
class AdmissionRequest:
    uid: str
    operation: str
    namespace: str
    obj: Any
    old: Any
    subresource: bool

    def told(self) -> dict[str, object]:
        """The fields of its log line. The object itself is left out: its variables may be secret."""
        name = at(self.obj, ("metadata", "name")) or at(self.obj, ("metadata", "generateName"))
        kind = at(self.obj, ("kind",))
        return {
            "uid": self.uid,
            "operation": self.operation,
            "kind": kind,
            "namespace": self.namespace,
            "name": name,
        }


@dataclass(frozen=True)
class AdmissionAnswer:
    result: Result
    because: str
    document: Object = field(repr=False)
    operations: int = 0
    failure: Exception | None = None  # of our own

    @property
    def quiet(self) -> bool:
        """Whether there is nothing to log. A warning may go to a controller, which does not show it to a
        user."""
        return self.result == "unchanged" and "warnings" not in self.document["response"]


def parse(body: bytes) -> AdmissionRequest:
    try:
        review = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise UnreadableReview(f"not JSON: {type(error).__name__}") from None
    request, uid = at(review, ("request",)), at(review, ("request", "uid"))
    if (
        at(review, ("apiVersion",)) != VERSION
        or at(review, ("kind",)) != "AdmissionReview"
        or not isinstance(uid, str)
    ):
        raise UnreadableReview(f"not an AdmissionReview of {VERSION} with a request")
    operation, namespace = request.get("operation"), request.get("namespace")
    return AdmissionRequest(
        uid=uid,
        operation=operation if isinstance(operation, str) else "",
        namespace=namespace if isinstance(namespace, str) else "",
        obj=request.get("object"),
        old=request.get("oldObject"),
        subresource=bool(request.get("subResource") or request.get("requestSubResource")),
    )


def answer(
    request: AdmissionRequest,
    *,
    options: InjectOptions,
    namespace: Mapping[str, str] | None = None,
    warnings: tuple[str, ...] = (),
) -> AdmissionAnswer:
    """`namespace`: the annotations of the namespace; `warnings`: always part of the answer."""
    try:
        namespace, wrong = _checked(namespace)
        injection = _injection(request, options, namespace)
        return _admitted(request, injection, warnings + wrong + injection.warnings)
    except AnnotationError as error:
        if (why := _spared(request)) is not None:
            return _admitted(request, Injection((), f"{error} {why}"), (str(error),))
        return AdmissionAnswer(
            "refused", str(error), _document(request, {"allowed": False, "status": _status(str(error))})
        )
    except Exception as error:
        because = f"{type(error).__name__}: {error}"
        return AdmissionAnswer("failed", because, _document(request, {"allowed": True}), failure=error)


def _spared(request: AdmissionRequest) -> str | None:
    """Why an object with a wrong annotation is admitted unchanged: refusing it would not help."""
    if request.operation == "UPDATE" and not updates.asks_anew(request.old, request.obj):
        return "It was wrong before this update"
    if kinds.made_by_controller(request.obj):
        return "It was created by a controller, which would retry forever: the job runs unprotected"
    return None


def _checked(namespace: Mapping[str, str] | None) -> tuple[Mapping[str, str] | None, tuple[str, ...]]:
    """A namespace with a wrong annotation enables nothing: refusing everything created in it would be too
    much."""
    try:
        noted.read(namespace)
        return namespace, ()
    except AnnotationError as error:
        return None, (f"ignoring the namespace's annotations: {error}",)


def _injection(
    request: AdmissionRequest, options: InjectOptions, namespace: Mapping[str, str] | None
) -> Injection:
    obj = request.obj
    if request.operation not in ("CREATE", "UPDATE") or request.subresource or not isinstance(obj, dict):
        return Injection((), "nothing is created or changed")
    made = inject.inject(obj, options=options, namespace=namespace)
    if request.operation == "CREATE":
        return made
    if not made.operations:
        return replace(made, warnings=made.warnings + updates.stays(request.old, obj))
    return _updated(obj, request.old, made, options, namespace)


def _updated(
    new: Object, old: Any, made: Injection, options: InjectOptions, namespace: Mapping[str, str] | None
) -> Injection:
    kind = kinds.of(new)
    if kind is None or not isinstance(old, dict):
        return Injection((), "left alone: its previous state is unknown")
    put_back = updates.lost(old, new, options=options, namespace=namespace)
    if updates.replaces_pods(kind, old, new, put_back):
        return made
    late = (
        f"lastcall will apply these annotations only when this {kind.name} is recreated: it is already "
        "running"
    )
    warnings = (late,) if updates.asks_anew(old, new) else ()
    return Injection(
        put_back,
        "restored what the update removed" if put_back else "left alone: it is already running",
        warnings,
    )


def _admitted(request: AdmissionRequest, injection: Injection, warnings: tuple[str, ...]) -> AdmissionAnswer:
    response: Object = {"allowed": True}
    if warnings:
        response["warnings"] = [_short(warning) for warning in warnings[:_MOST_WARNINGS]]
    if injection.operations:
        text = json.dumps(injection.operations, separators=(",", ":"))
        response |= {"patchType": "JSONPatch", "patch": base64.b64encode(text.encode()).decode()}
    result: Result = "patched" if injection.operations else "unchanged"
    return AdmissionAnswer(result, injection.because, _document(request, response), len(injection.operations))


def _document(request: AdmissionRequest, response: Object) -> Object:
    return {"apiVersion": VERSION, "kind": "AdmissionReview", "response": {"uid": request.uid, **response}}


def _status(message: str) -> Object:
    # Not "Invalid": kubectl 1.20 then says "The request is invalid", and keeps the message to itself
    return {"status": "Failure", "reason": "BadRequest", "code": 400, "message": message}


def _short(text: str) -> str:
    return text if len(text) <= _LONGEST_WARNING else text[: _LONGEST_WARNING - 3] + "..."
