"""What a pod gets besides variables: the package, the stop file's folder, the hook that writes the file, and
the storage."""

from __future__ import annotations

import re

from lastcall.kube.inject import package_volume
from lastcall.kube.inject.annotations import Wishes
from lastcall.kube.inject.draft import Object, ObjectDraft, at, items
from lastcall.kube.inject.kinds import VOLUME, Template

INSTALL = "lastcall-install"
STORAGE = "lastcall-storage"
_RIGHTS = ("runAsUser", "runAsGroup", "runAsNonRoot", "seccompProfile", "seLinuxOptions")
_COUNTED = ("cpu", "memory", "ephemeral-storage")  # of the resources; no accelerators
_SLEEP = re.compile(r"(?:exec\s+)?(?:/bin/|/usr/bin/)?sleep\s+([0-9]{1,9})s?")
_LONGEST_HOOK = 600  # seconds; a longer sleep expects to be cut short, and would block node drains


def package(draft: ObjectDraft, template: Template, image: str | None, pull_policy: str) -> str | None:
    """The volume at MOUNT, and the init container that copies the package there. A warning if that is
    impossible."""
    volumes, mounts = (*template.spec, "volumes"), (*template.trainer, "volumeMounts")
    volume = draft.named(volumes, VOLUME)
    taken = mounted(draft.get(template.trainer), package_volume.MOUNT)
    if (volume is not None and draft.get((*volumes, volume, "emptyDir")) is None) or taken not in (
        None,
        VOLUME,
    ):
        return (
            f"the volume {VOLUME}, or the mount at {package_volume.MOUNT}, is in use: "
            "neither the package nor the stop file can be placed there. Rename it"
        )
    if volume is None:
        draft.append(volumes, {"name": VOLUME, "emptyDir": {}})
    if image is not None and draft.named((*template.spec, "initContainers"), INSTALL) is None:
        draft.append(
            (*template.spec, "initContainers"), _install(image, pull_policy, draft.mapping(template.trainer))
        )
    if taken is None:
        draft.append(mounts, {"name": VOLUME, "mountPath": package_volume.MOUNT})
    return None


def hook(draft: ObjectDraft, template: Template) -> str | None:
    """The preStop hook reaches processes that signals do not, below a shell that is PID 1. A warning if the
    user has a hook."""
    present = draft.get((*template.trainer, "lifecycle", "preStop"))
    if present is None:
        draft.put(
            (*template.trainer, "lifecycle", "preStop"), {"exec": {"command": list(package_volume.PRE_STOP)}}
        )
    elif present != {"exec": {"command": list(package_volume.PRE_STOP)}}:
        return (
            f"container {draft.get((*template.trainer, 'name'))} has a preStop hook, which is kept: "
            f"{_meaning(present)}"
        )
    return None


def hook_seconds(draft: ObjectDraft, template: Template) -> int:
    """How long the user's preStop hook sleeps before SIGTERM is sent; 0 where it does not, or does something
    else."""
    present = draft.get((*template.trainer, "lifecycle", "preStop"))
    seconds = at(present, ("sleep", "seconds"))
    words = [word for word in items(present, ("exec", "command")) if isinstance(word, str)]
    text = words[2] if len(words) == 3 and words[1] in ("-c", "-ec") else " ".join(words)
    found = _SLEEP.fullmatch(text.strip())
    slept = seconds if type(seconds) is int else int(found[1]) if found else 0
    return slept if 0 < slept <= _LONGEST_HOOK else 0


def _meaning(present: object) -> str:
    """The effect of the user's own hook."""
    if "ray stop" in " ".join(word for word in items(present, ("exec", "command")) if isinstance(word, str)):
        # KubeRay's older samples have it.
        return "`ray stop` ends the node before the workers are notified, and little is saved. Remove it"
    return (
        "its duration is taken from the grace, and a training process below a shell without exec gets no "
        "notice"
    )


def storage(draft: ObjectDraft, template: Template, wishes: Wishes) -> str | None:
    """The claim at the run's directory, unless the user mounts something there. A warning if the run saves
    elsewhere."""
    where = wishes.where()
    if wishes.storage is None or where is None:
        return None
    if mounted(draft.get(template.trainer), where) is None:
        draft.append((*template.trainer, "volumeMounts"), storage_mount(wishes))
        if draft.named((*template.spec, "volumes"), STORAGE) is None:
            draft.append((*template.spec, "volumes"), storage_volume(wishes))
    index = draft.named((*template.trainer, "env"), "LASTCALL_DIRECTORY")
    said = None if index is None else draft.get((*template.trainer, "env", index, "value"))
    if index is None or (isinstance(said, str) and f"{said}/".startswith(f"{where}/")):
        return None
    return (
        f"container {draft.get((*template.trainer, 'name'))} sets LASTCALL_DIRECTORY itself ({said}), which "
        "is kept: "
        f"it will not save to the storage at {where}. Remove one of the two"
    )


def storage_mount(wishes: Wishes) -> Object:
    assert wishes.storage is not None
    below = {"subPath": wishes.storage.folder} if wishes.storage.folder else {}
    return {"name": STORAGE, "mountPath": wishes.where(), **below}


def storage_volume(wishes: Wishes) -> Object:
    assert wishes.storage is not None
    return {"name": STORAGE, "persistentVolumeClaim": {"claimName": wishes.storage.name}}


def mounted(container: object, where: str | None) -> object:
    """The name of the volume that is mounted there; None if none is."""
    for mount in items(container, ("volumeMounts",)):
        path = at(mount, ("mountPath",))
        if isinstance(path, str) and path.rstrip("/") == where:
            return at(mount, ("name",)) or ""
    return None


def _install(image: str, pull_policy: str, trainer: Object) -> Object:
    """Any user may write to an emptyDir, so the init container runs as the training does: a policy that
    admits one admits the other.

    It requests the same resources as the training. That costs nothing, since it ends before; other numbers
    may be refused by a LimitRange or a quota, and would lose the pod its Guaranteed class, and with it its
    exclusive cores.
    """
    rights = _mapping(trainer, "securityContext")
    return {
        "name": INSTALL,
        "image": image,
        "imagePullPolicy": pull_policy,
        "command": ["python3", "-m", "lastcall", "kube", "copy", package_volume.MOUNT],
        "resources": _resources(_mapping(trainer, "resources")),
        "securityContext": {
            **{name: rights[name] for name in _RIGHTS if name in rights},
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        },
        "volumeMounts": [{"name": VOLUME, "mountPath": package_volume.MOUNT}],
    }


def _resources(trainer: Object) -> Object:
    found = {
        part: {name: value for name, value in _mapping(trainer, part).items() if name in _COUNTED}
        for part in trainer
    }
    return {part: found[part] for part in ("requests", "limits") if found.get(part)}


def _mapping(obj: Object, name: str) -> Object:
    value = obj.get(name)
    return value if isinstance(value, dict) else {}
