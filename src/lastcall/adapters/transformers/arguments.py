"""What of a Trainer's arguments is ours to say: the save strategy and the folder, where a configuration or
the environment set them."""

from __future__ import annotations

import logging
from typing import Any

from transformers.trainer_utils import SaveStrategy

from lastcall import settings
from lastcall.settings import JITCheckpointConfig, PeriodicCheckpointConfig

log = logging.getLogger("lastcall")


def override(args: Any, periodic: PeriodicCheckpointConfig | None) -> None:
    """The script's own save_* arguments give way to what was said from outside."""
    config = periodic if periodic is not None else PeriodicCheckpointConfig()
    said = {name: getattr(config, name) for name, origin in config.origins().items() if origin != "default"}
    changes: dict[str, object] = {}
    if (strategy := said.get("save_strategy")) is not None:
        changes["save_strategy"] = SaveStrategy(str(strategy))
    if (steps := said.get("save_steps")) is not None:
        changes["save_steps"] = steps
    if (limit := said.get("save_total_limit")) is not None:
        changes["save_total_limit"] = limit
    for name, value in changes.items():
        before = getattr(args, name)
        if before != value:
            log.info(
                "%s=%s instead of the script's %s",
                name,
                getattr(value, "value", value),
                getattr(before, "value", before),
            )
            setattr(args, name, value)


def redirect(args: Any, jit: JITCheckpointConfig) -> None:
    """The script's output_dir gives way to LASTCALL_DIRECTORY: in the script's own object, so that what it
    saves there itself (its final model) goes there, too."""
    if jit.directory is not None and args.output_dir != jit.directory:
        log.info("output_dir=%s instead of the script's %s", jit.directory, args.output_dir)
        args.output_dir = jit.directory


def suited(jit: JITCheckpointConfig) -> JITCheckpointConfig:
    """Without what a Trainer's checkpoints do not have."""
    if jit.guard:
        log.warning("LASTCALL_GUARD is not used with a Trainer: its checkpoints are Hugging Face's own files")
        return settings.changed(jit, guard=False)
    return jit
