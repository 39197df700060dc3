"""The settings in the annotations of an object and of its namespace.

The object's own annotation wins over its namespace's, name by name. `lastcall.dev/...` wins over
`ray.io/jit-checkpoint-...`, which applies only to Ray's kinds. Values are checked like the variables of the
same settings, so that a value that is admitted here is not refused in the pod.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from lastcall import errors, parsing, settings

PREFIX = "lastcall.dev/"
RAY_PREFIX = "ray.io/jit-checkpoint-"
# the parallelism of a Job in an old cluster before `lastcall kube pause`; not a setting
PARALLELISM = PREFIX + "paused-parallelism"
DEFAULT_DIRECTORY = "/mnt/kubeflow-checkpoints"  # where the second seed mounts a claim
LONGEST_GRACE = 7 * 24 * 3600.0  # seconds; a larger value, probably a typing error, would block node drains
_LONGEST_SHOWN = 80


class AnnotationError(errors.LastcallError, ValueError):
    """An annotation is wrong; the message names it."""


@dataclass(frozen=True)
class Claim:
    """A PersistentVolumeClaim, and the folder in it that is mounted ("": all of it)."""

    name: str
    folder: str = ""


@dataclass(frozen=True)
class Wishes:
    """The settings that were given; None for the others."""

    enabled: bool = False
    kill_wait: float | None = None
    grace: float | None = None
    directory: str | None = None
    storage: Claim | None = None
    texts: Mapping[str, str] = field(default_factory=dict)
    """The values as written, by their lastcall.dev names, for objects that controllers make from this one."""
    idle: tuple[str, ...] = ()
    """Annotations that have no effect."""
    beaten: tuple[str, ...] = ()
    """Ray's annotations that are overridden by one of ours on the same object."""

    def where(self) -> str | None:
        """The run's directory: as given, or the mount of the storage."""
        return self.directory or (DEFAULT_DIRECTORY if self.storage is not None else None)


def _at_most_a_week(field_name: str) -> Callable[[str], float]:
    def parse(value: str) -> float:
        number = _setting(field_name).parse(value)
        assert isinstance(number, float)
        if number > LONGEST_GRACE:
            raise ValueError("is more than a week")
        return number

    return parse


def _directory(value: str) -> str:
    path = value.strip()
    if not path.startswith("/") or path.strip("/") == "":
        raise ValueError("is not an absolute path")
    if ":" in path or ".." in path.split("/"):
        raise ValueError("cannot be mounted: it has a colon or a .. in it")
    return "/" + path.strip("/")


def _storage(value: str) -> Claim:
    name, _, folder = value.strip().removeprefix("pvc://").partition("/")
    folder = folder.strip("/")
    if not parsing.is_object_name(name):
        raise ValueError("does not begin with the name of a PersistentVolumeClaim")
    if ".." in folder.split("/"):
        raise ValueError("points outside the volume")
    return Claim(name, folder)


@dataclass(frozen=True)
class _Annotation:
    field: str
    name: str
    parse: Callable[[str], Any]
    allowed: str
    example: str


def _setting(name: str) -> settings.Setting:
    (found,) = (setting for setting in settings.JIT if setting.field == name)
    return found


def _of_setting(
    field_name: str, name: str, example: str, parse: Callable[[str], Any] | None = None
) -> _Annotation:
    setting = _setting(field_name)
    return _Annotation(field_name, name, parse or setting.parse, setting.allowed, example)


_OURS = (
    _of_setting("enabled", PREFIX + "enabled", "true"),
    _of_setting("kill_wait", PREFIX + "kill-wait-seconds", "3.0", _at_most_a_week("kill_wait")),
    _of_setting("grace", PREFIX + "grace-seconds", "120", _at_most_a_week("grace")),
    _Annotation("directory", PREFIX + "directory", _directory, "an absolute path", "/mnt/checkpoints/exp1"),
    _Annotation(
        "storage", PREFIX + "storage", _storage, "a PersistentVolumeClaim, or a folder in one", "shared/exp1"
    ),
)
_RAYS = (
    _of_setting("enabled", RAY_PREFIX + "enabled", "true"),
    _of_setting("kill_wait", RAY_PREFIX + "kill-wait", "5.0", _at_most_a_week("kill_wait")),
)
NAMES = tuple(annotation.name for annotation in _OURS + _RAYS)


def wishes(own: object, namespace: object = None, *, ray: bool = False) -> Wishes:
    """Of an object with these annotations in a namespace with those. AnnotationError where one of them is
    wrong."""
    default, mine = read(namespace), read(own)
    values: dict[str, Any] = {}
    texts: dict[str, str] = {}
    origins: dict[str, str] = {}
    for source, found, where in ((namespace, default, " of the namespace"), (own, mine, "")):
        for annotation in _RAYS * ray + _OURS:  # ours last: it wins over Ray's of the same object
            if annotation.name in found:
                values[annotation.field] = found[annotation.name]
                texts[_name(annotation.field)] = _text(source, annotation.name)
                origins[annotation.field] = annotation.name + where
    _check_times(values, origins)
    idle = tuple(
        name for name in mine if "enabled" not in values or (name.startswith(RAY_PREFIX) and not ray)
    )
    beaten = tuple(
        one.name
        for one in _RAYS * ray
        if one.name in mine and mine.get(_name(one.field), mine[one.name]) != mine[one.name]
    )
    return Wishes(**{"enabled": False, **values}, texts=texts, idle=idle, beaten=beaten)


def read(annotations: object) -> dict[str, Any]:
    """The values of our annotations among these, by name. AnnotationError for a wrong value or an unknown
    name."""
    return {name: _value(_known(name), value) for name, value in ours(annotations).items()}


def ours(annotations: object) -> dict[str, object]:
    """Our annotations among these, unchanged."""
    if not isinstance(annotations, Mapping):
        return {}
    names = [
        name
        for name in annotations
        if isinstance(name, str) and name.startswith((PREFIX, RAY_PREFIX)) and name != PARALLELISM
    ]
    return {name: annotations[name] for name in names}


def _known(name: str) -> _Annotation:
    for annotation in _OURS + _RAYS:
        if annotation.name == name:
            return annotation
    nearest = max(
        NAMES, key=lambda other: difflib.SequenceMatcher(None, name[:_LONGEST_SHOWN], other).ratio()
    )
    raise AnnotationError(
        f"{_shown(name)} is not a lastcall annotation. Did you mean {nearest}? Known ones: "
        f"{', '.join(NAMES)}."
    )


def _value(annotation: _Annotation, value: object) -> Any:
    example = f'{annotation.name}: "{annotation.example}"'
    if not isinstance(value, str):
        raise AnnotationError(
            f"{annotation.name}: {_shown(value)} is not text. Put it in quotes, for example: {example}"
        )
    try:
        return annotation.parse(value)
    except ValueError as error:
        raise AnnotationError(
            f"{annotation.name}: {_shown(value)} {error}. Set it to {annotation.allowed}, for example: "
            f"{example}"
        ) from None


def _check_times(values: Mapping[str, Any], origins: Mapping[str, str]) -> None:
    wait, grace = values.get("kill_wait"), values.get("grace")
    if wait is not None and grace is not None and wait > grace:
        raise AnnotationError(
            f"{origins['kill_wait']}: {wait:g} is longer than {origins['grace']}: {grace:g}: "
            f"the kill would come before the save starts. Lower the first or raise the second."
        )


def _name(field_name: str) -> str:
    return next(annotation.name for annotation in _OURS if annotation.field == field_name)


def _text(annotations: object, name: str) -> str:
    assert isinstance(annotations, Mapping)
    return str(annotations[name]).strip()


def _shown(value: object) -> str:
    text = repr(value) if isinstance(value, str | int | float | bool | None) else type(value).__name__
    return text if len(text) <= _LONGEST_SHOWN else text[:_LONGEST_SHOWN] + "...'"
