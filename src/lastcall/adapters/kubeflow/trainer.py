"""TransformersTrainer: what the user writes."""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field

from kubeflow.trainer import CustomTrainer

import lastcall
from lastcall import errors, parsing, settings
from lastcall.adapters.kubeflow import function_text, locations, standalone
from lastcall.settings import JITCheckpointConfig, PeriodicCheckpointConfig

DEFAULT_GRACE_SECONDS = 120  # Kubernetes' default of 30 is enough for a checkpoint of a few GB at most
_PORTS = range(1024, 65536)  # the range that OpenShift AI's controller accepts
_POLLS = range(5, 301)


def own_package(extra: str = "") -> str:
    return f"lastcall{extra}=={lastcall.__version__}"


@dataclass
class TransformersTrainer(CustomTrainer):  # type: ignore[misc]
    """Kubeflow's CustomTrainer (func, func_args, image, packages_to_install, pip_index_urls, num_nodes,
    resources_per_node, env) for a function that calls `transformers.Trainer` as always. It saves when the
    pods are asked to stop, and resumes when they are restarted."""

    enable_jit_checkpoint: bool = True
    """Save when the pods get SIGTERM. Without it there are still periodic saves, the directory, and resuming
    from its checkpoints."""
    periodic_checkpoint_config: PeriodicCheckpointConfig | None = None
    """Instead of the save_* arguments of the function's TrainingArguments; None leaves those as they are."""
    output_dir: str | None = None
    """Instead of the function's own: pvc://NAME/PATH (the claim is mounted at /mnt/kubeflow-checkpoints),
    s3://BUCKET/PREFIX (they are saved in the pod, uploaded there, and downloaded from there) or a path in the
    pods."""
    data_connection_name: str | None = None
    """The secret with the keys for s3://, as in OpenShift AI's data connections; it is mounted. None: the
    pods already have keys."""
    enable_progress_tracking: bool = True
    """Steps, epoch, loss, time left and checkpoints, for OpenShift AI's dashboard and for Kubeflow's
    status."""
    metrics_port: int = 28080
    """The port where OpenShift AI's controller reads the progress."""
    metrics_poll_interval_seconds: int = 30
    """How often it reads it."""
    grace_seconds: int = DEFAULT_GRACE_SECONDS
    """How long the pods have between SIGTERM and the kill: terminationGracePeriodSeconds, and torchrun's
    shutdown time."""
    package: str | None = field(default_factory=own_package)
    """How lastcall gets into the pods: a requirement for pip. None: it is in the image, or the admission
    webhook mounts it."""

    def __post_init__(self) -> None:
        _check_types(self)
        if self.output_dir is not None:
            self.output_dir = os.fspath(self.output_dir)
            locations.parse(self.output_dir)
        if self.data_connection_name is not None and not parsing.is_object_name(self.data_connection_name):
            raise ValueError(
                f"data_connection_name={self.data_connection_name!r} is not the name of a secret"
            )
        _whole("metrics_port", self.metrics_port, _PORTS)
        _whole("metrics_poll_interval_seconds", self.metrics_poll_interval_seconds, _POLLS)
        _whole("grace_seconds", self.grace_seconds, range(1, 7 * 86400))
        function_text.source_of(self.func)
        function_text.arguments_of(self.func_args)
        standalone.check_call(self.func, self.func_args or {})
        function_text.check_size(self.func, self.func_args)
        for name, value in (self.env or {}).items():
            if not isinstance(value, str):
                raise ValueError(f"env: {name}={value!r} is not text. Write {str(value)!r}")
        try:  # now, and not when the pods have been scheduled
            JITCheckpointConfig(environ=self.env or {})
            PeriodicCheckpointConfig(environ=self.env or {})
        except errors.ConfigError as error:
            raise ValueError(f"env: {error}") from None
        for message in settings.unknown_variables(self.env or {}):
            warnings.warn(f"env: {message}", stacklevel=3)
        if (
            self.enable_jit_checkpoint
            and self.output_dir is None
            and not (self.env or {}).get("LASTCALL_DIRECTORY")
        ):
            warnings.warn(
                "No output_dir: checkpoints go to the TrainingArguments' output_dir, and are lost with the "
                "pod "
                "unless that is on a volume. For example: output_dir='pvc://shared/checkpoints/exp1'",
                stacklevel=3,
            )


def _check_types(trainer: TransformersTrainer) -> None:
    """Values that the SDK would misinterpret, or would pass to the API server unchecked."""
    if trainer.num_nodes is not None:
        _whole("num_nodes", trainer.num_nodes, range(1, 100_001))
    for name in ("enable_jit_checkpoint", "enable_progress_tracking"):
        if not isinstance(getattr(trainer, name), bool):
            raise ValueError(f"{name}={getattr(trainer, name)!r} is neither True nor False")
    for name in ("packages_to_install", "pip_index_urls"):
        value = getattr(trainer, name)
        if value is not None and (isinstance(value, str) or not all(isinstance(one, str) for one in value)):
            raise ValueError(f"{name}={value!r} is not a list of texts. Write [{value!r}]")
    for name in ("resources_per_node", "env"):
        value = getattr(trainer, name)
        if value is not None and not isinstance(value, Mapping):
            raise ValueError(f"{name}={value!r} is not a dict")
    periodic = trainer.periodic_checkpoint_config
    if periodic is not None and not isinstance(periodic, PeriodicCheckpointConfig):
        raise ValueError(
            f"periodic_checkpoint_config={periodic!r} is not a PeriodicCheckpointConfig, or None"
        )
    if trainer.package is not None and (not isinstance(trainer.package, str) or not trainer.package.strip()):
        raise ValueError(f"package={trainer.package!r} is not a pip requirement. None: it is in the image")
    if trainer.output_dir is not None and not isinstance(trainer.output_dir, str | os.PathLike):
        raise ValueError(
            f"output_dir={trainer.output_dir!r} is not text. For example: "
            "output_dir='pvc://shared/checkpoints/exp1'"
        )


def _whole(name: str, value: object, allowed: range) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value not in allowed:
        raise ValueError(f"{name}={value!r} is not a whole number from {allowed.start} to {allowed.stop - 1}")
