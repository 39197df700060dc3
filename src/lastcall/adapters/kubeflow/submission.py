"""A TransformersTrainer in the SDK's terms: a CustomTrainer, and an option for what that cannot express. The
user's own settings stay."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kubeflow.trainer import CustomTrainer

from lastcall import settings
from lastcall.adapters.kubeflow import function_text, locations
from lastcall.adapters.kubeflow.trainer import TransformersTrainer, own_package

MANAGER = "lastcall.dev/kubeflow"  # of our entry in spec.runtimePatches
NODE = "node"  # the replicated job and the container that train, in Kubeflow's runtimes
_OURS = re.compile(r"\s*lastcall\s*($|[\[=<>!~@;])", re.IGNORECASE)


def custom(
    trainer: TransformersTrainer, directory: str | None, mirror: str | None = None, *, mounted: bool = False
) -> CustomTrainer:
    """`directory`: where the checkpoints go, as the processes see it; `mirror`: where they are uploaded to;
    `mounted`: whether secrets are mounted."""
    keys = locations.KEYS if mounted and trainer.data_connection_name is not None else None
    return CustomTrainer(
        func=function_text.stub(trainer.func, trainer.func_args),
        func_args=None,  # they are sent with the function
        image=trainer.image,
        packages_to_install=packages(trainer, mirror),
        pip_index_urls=trainer.pip_index_urls,
        num_nodes=trainer.num_nodes,
        resources_per_node=trainer.resources_per_node,
        env=variables(trainer, directory, mirror, keys),
    )


def packages(trainer: TransformersTrainer, mirror: str | None = None) -> list[str] | None:
    given = list(trainer.packages_to_install or ())
    if trainer.package is not None and not any(map(_OURS.match, given)):
        plain = mirror is None or trainer.package != own_package()
        given.append(trainer.package if plain else own_package("[s3]"))
    return given or None


def variables(
    trainer: TransformersTrainer, directory: str | None, mirror: str | None = None, keys: str | None = None
) -> dict[str, str]:
    """The environment of the processes in the pods."""
    ours: dict[str, str] = {"LASTCALL_ENABLED": "1" if _anything(trainer) else "0"}
    if trainer.enable_jit_checkpoint:
        ours["LASTCALL_GRACE_SECONDS"] = str(trainer.grace_seconds)
        # torchrun would kill its workers after 30 seconds
        ours["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"] = str(trainer.grace_seconds)
    else:
        ours["LASTCALL_SIGNALS"] = "none"
    if directory is not None:
        ours["LASTCALL_DIRECTORY"] = directory
    if mirror is not None:
        ours["LASTCALL_MIRROR"] = mirror
    if keys is not None:
        ours["LASTCALL_MIRROR_KEYS"] = keys
    if trainer.enable_progress_tracking:
        ours["LASTCALL_PROGRESS_PORT"] = str(trainer.metrics_port)
    else:
        ours["LASTCALL_PROGRESS_PUSH"] = "0"
    if (periodic := trainer.periodic_checkpoint_config) is not None:
        said = {setting.variable: getattr(periodic, setting.field) for setting in settings.PERIODIC}
        origins = {setting.variable: periodic.origins()[setting.field] for setting in settings.PERIODIC}
        ours.update(
            {
                name: _text(value)
                for name, value in said.items()
                if origins[name] != "default" and value is not None
            }
        )
    return {**ours, **(trainer.env or {})}


@dataclass(frozen=True)
class Additions:
    """An option of the SDK, called last with what the user's own options have made of the TrainJob."""

    trainer: TransformersTrainer
    place: locations.Location | None

    def __call__(self, job_spec: dict[str, Any], trainer: object, backend: object) -> None:
        metadata = job_spec.setdefault("metadata", {})
        if ours := job_annotations(self.trainer):
            metadata["annotations"] = {**ours, **(metadata.get("annotations") or {})}
        if (patch := runtime_patch(self.trainer, self.place)) is not None:
            job_spec.setdefault("spec", {}).setdefault("runtimePatches", []).append(patch)


def job_annotations(trainer: TransformersTrainer) -> dict[str, str]:
    ours: dict[str, str] = {}
    if trainer.enable_progress_tracking:
        ours["trainer.opendatahub.io/progression-tracking"] = "true"
        ours["trainer.opendatahub.io/metrics-port"] = str(trainer.metrics_port)
        ours["trainer.opendatahub.io/metrics-poll-interval"] = str(trainer.metrics_poll_interval_seconds)
    if trainer.package is None and _anything(trainer):
        ours["lastcall.dev/enabled"] = "true"
        ours["lastcall.dev/grace-seconds"] = str(trainer.grace_seconds)
    return ours


def runtime_patch(trainer: TransformersTrainer, place: locations.Location | None) -> dict[str, Any] | None:
    """For the pods of the training itself; those that download model and data are left alone."""
    pod: dict[str, Any] = {}
    if trainer.enable_jit_checkpoint:
        pod["terminationGracePeriodSeconds"] = trainer.grace_seconds
    if volumes := _volumes(trainer, place):
        pod["volumes"] = [{"name": name, **volume} for name, (_, volume) in volumes.items()]
        pod["containers"] = [
            {"name": NODE, "volumeMounts": [{"name": name, **mount} for name, (mount, _) in volumes.items()]}
        ]
    if not pod:
        return None
    job = {"name": NODE, "template": {"spec": {"template": {"spec": pod}}}}
    return {"manager": MANAGER, "trainingRuntimeSpec": {"template": {"spec": {"replicatedJobs": [job]}}}}


def _volumes(
    trainer: TransformersTrainer, place: locations.Location | None
) -> dict[str, tuple[dict[str, Any], dict[str, Any]]]:
    """By name: the mount and the volume. The keys of a bucket are mounted: the SDK cannot express variables
    from a secret, and this way they are in no process's environment."""
    found: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {}
    if place is not None and place.mirror is not None:
        found[locations.VOLUME] = {"mountPath": locations.MOUNT}, {"emptyDir": {}}
    elif place is not None and place.claim is not None:
        found[locations.VOLUME] = (
            {"mountPath": locations.MOUNT},
            {"persistentVolumeClaim": {"claimName": place.claim}},
        )
    if (secret := trainer.data_connection_name) is not None:
        found[locations.KEYS_VOLUME] = (
            {"mountPath": locations.KEYS, "readOnly": True},
            {"secret": {"secretName": secret}},
        )
    return found


def _anything(trainer: TransformersTrainer) -> bool:
    """Whether lastcall has anything to do in the pods."""
    asked: Mapping[str, object] = {
        "jit": trainer.enable_jit_checkpoint,
        "periodic": trainer.periodic_checkpoint_config,
        "directory": trainer.output_dir,
        "progress": trainer.enable_progress_tracking,
    }
    return any(value not in (None, False) for value in asked.values())


def _text(value: object) -> str:
    return str(int(value)) if isinstance(value, bool) else str(value)
