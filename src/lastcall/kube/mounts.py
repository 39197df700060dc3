"""What a pod gets besides variables: the package, a place for the stop file, the hook that writes it, and the storage."""

from __future__ import annotations

from lastcall.kube import tree
from lastcall.kube.annotations import Wishes
from lastcall.kube.kinds import Template
from lastcall.kube.patches import Draft, Object, Path

VOLUME = "lastcall"
INSTALL = "lastcall-install"
STORAGE = "lastcall-storage"


def package(draft: Draft, template: Template, image: str | None, pull_policy: str) -> str | None:
    """The volume at tree.MOUNT, and the init container that copies the package there. A warning where it cannot be."""
    volume = draft.named((*template.spec, "volumes"), VOLUME)
    if volume is not None and draft.get((*template.spec, "volumes", volume, "emptyDir")) is None:
        return f"the volume {VOLUME} of the pod is not ours: neither the package nor the stop file can be mounted. Give it another name"
    if volume is None:
        draft.append((*template.spec, "volumes"), {"name": VOLUME, "emptyDir": {}})
    if image is not None and draft.named((*template.spec, "initContainers"), INSTALL) is None:
        draft.append((*template.spec, "initContainers"), _install(image, pull_policy))
    _mount(draft, template.trainer, {"name": VOLUME, "mountPath": tree.MOUNT})
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
    if wishes.storage is None:
        return
    if _mount(draft, template.trainer, storage_mount(wishes)) and draft.named((*template.spec, "volumes"), STORAGE) is None:
        draft.append((*template.spec, "volumes"), storage_volume(wishes))


def storage_mount(wishes: Wishes) -> Object:
    assert wishes.storage is not None
    below = {"subPath": wishes.storage.folder} if wishes.storage.folder else {}
    return {"name": STORAGE, "mountPath": wishes.where(), **below}


def storage_volume(wishes: Wishes) -> Object:
    assert wishes.storage is not None
    return {"name": STORAGE, "persistentVolumeClaim": {"claimName": wishes.storage.name}}


def _mount(draft: Draft, container: Path, mount: Object) -> bool:
    """False where something is mounted there."""
    mounts = (*container, "volumeMounts")
    paths = [item.get("mountPath") for item in draft.items(mounts) if isinstance(item, dict)]
    if mount["mountPath"] in [path.rstrip("/") for path in paths if isinstance(path, str)]:
        return False
    draft.append(mounts, mount)
    return True


def _install(image: str, pull_policy: str) -> Object:
    """Any user may write to an emptyDir, so it needs no rights, and runs as whoever the pod says."""
    return {
        "name": INSTALL,
        "image": image,
        "imagePullPolicy": pull_policy,
        "command": ["python3", "-m", "lastcall", "kube", "copy", tree.MOUNT],
        "resources": {"requests": {"cpu": "50m", "memory": "64Mi"}, "limits": {"cpu": "500m", "memory": "128Mi"}},
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        },
        "volumeMounts": [{"name": VOLUME, "mountPath": tree.MOUNT}],
    }
