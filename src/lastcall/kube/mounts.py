"""What a pod gets besides variables: the package, a place for the stop file, the hook that writes it, and the storage."""

from __future__ import annotations

from lastcall.kube import tree
from lastcall.kube.annotations import Wishes
from lastcall.kube.kinds import VOLUME, Template
from lastcall.kube.patches import Draft, Object, at, items

INSTALL = "lastcall-install"
STORAGE = "lastcall-storage"
_RIGHTS = ("runAsUser", "runAsGroup", "runAsNonRoot", "seccompProfile", "seLinuxOptions")


def package(draft: Draft, template: Template, image: str | None, pull_policy: str) -> str | None:
    """The volume at tree.MOUNT, and the init container that copies the package there. A warning where it cannot be."""
    volumes, mounts = (*template.spec, "volumes"), (*template.trainer, "volumeMounts")
    volume = draft.named(volumes, VOLUME)
    taken = mounted(draft.get(template.trainer), tree.MOUNT)
    if (volume is not None and draft.get((*volumes, volume, "emptyDir")) is None) or taken not in (None, VOLUME):
        return (
            f"the volume {VOLUME}, or the mount at {tree.MOUNT}, is not ours: neither package nor stop file can be put there. Rename it"
        )
    if volume is None:
        draft.append(volumes, {"name": VOLUME, "emptyDir": {}})
    if image is not None and draft.named((*template.spec, "initContainers"), INSTALL) is None:
        rights = draft.mapping((*template.trainer, "securityContext"))
        draft.append((*template.spec, "initContainers"), _install(image, pull_policy, rights))
    if taken is None:
        draft.append(mounts, {"name": VOLUME, "mountPath": tree.MOUNT})
    return None


def hook(draft: Draft, template: Template) -> str | None:
    """The preStop hook reaches processes that no signal does, below a shell that is PID 1. A warning where the user has one."""
    present = draft.get((*template.trainer, "lifecycle", "preStop"))
    if present is None:
        draft.put((*template.trainer, "lifecycle", "preStop"), {"exec": {"command": list(tree.PRE_STOP)}})
    elif present != {"exec": {"command": list(tree.PRE_STOP)}}:
        return (
            f"container {draft.get((*template.trainer, 'name'))} has a preStop hook, which is left as it is: "
            "what it takes comes off the grace, and a training process below a shell without exec gets no notice"
        )
    return None


def storage(draft: Draft, template: Template, wishes: Wishes) -> None:
    """The claim at the run's directory, unless the user mounts something there."""
    where = wishes.where()
    if wishes.storage is None or where is None or mounted(draft.get(template.trainer), where) is not None:
        return
    draft.append((*template.trainer, "volumeMounts"), storage_mount(wishes))
    if draft.named((*template.spec, "volumes"), STORAGE) is None:
        draft.append((*template.spec, "volumes"), storage_volume(wishes))


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


def _install(image: str, pull_policy: str, rights: Object) -> Object:
    """Any user may write to an emptyDir, so it runs as the training does: a policy that admits the one admits the other."""
    return {
        "name": INSTALL,
        "image": image,
        "imagePullPolicy": pull_policy,
        "command": ["python3", "-m", "lastcall", "kube", "copy", tree.MOUNT],
        "resources": {"requests": {"cpu": "50m", "memory": "64Mi"}, "limits": {"cpu": "500m", "memory": "128Mi"}},
        "securityContext": {
            **{name: rights[name] for name in _RIGHTS if name in rights},
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        },
        "volumeMounts": [{"name": VOLUME, "mountPath": tree.MOUNT}],
    }
