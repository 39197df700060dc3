"""In the driver: adds our callback to those of Ray.

Discarded: RAY_TRAIN_CALLBACKS, the variable that Ray offers for this. It takes a class without arguments, an
error in it ends the run before it starts, and a user's own value would have to be edited.
"""

from __future__ import annotations

import functools
import logging
import os
from types import ModuleType
from typing import Any

import ray
import ray.train

from lastcall import script as scripts
from lastcall.adapters.ray import internals
from lastcall.adapters.ray.driver import run_name, versions
from lastcall.core.process import logs
from lastcall.settings import JITCheckpointConfig

log = logging.getLogger("lastcall")
_MARK = "_lastcall_original"
# between two polls of Ray for drained nodes; its default of 5 is a sixth of a grace of 30
_DRAIN_SECONDS = "1.0"


def protect_all(module: ModuleType) -> None:
    """For ray.train.v2.api.data_parallel_trainer, from the bootstrap."""
    from lastcall.adapters.ray.driver import config

    config.accept(ray.train.RunConfig)
    trainer = module.DataParallelTrainer
    create = trainer._create_default_callbacks
    if hasattr(create, _MARK):
        return

    @functools.wraps(create)
    def with_ours(self: Any) -> list[Any]:
        try:
            ours = prepare(self)
        except Exception as error:
            log.warning("This run is not protected: %s: %s", type(error).__name__, error)
            ours = []
        return [*create(self), *ours]

    setattr(with_ours, _MARK, create)
    trainer._create_default_callbacks = with_ours


def prepare(trainer: Any) -> list[Any]:
    """Called by fit(), before the controller is made. The driver's environment counts, wherever the workers
    run."""
    from lastcall.adapters.ray.callback import JITCallback

    given = trainer.run_config.callbacks or ()
    present = [callback for callback in given if isinstance(callback, JITCallback)]
    # added by RunConfig(jit_checkpoint_config=...)
    jit = present[0]._jit if present else JITCheckpointConfig()
    asked = bool(present) or jit.origins()["enabled"] != "default"
    with logs.Visible(jit.log_level):
        if not asked or not jit.enabled or not versions.supported(ray.__version__):
            return []
        if getattr(trainer.backend_config.backend_cls, "has_replica_groups", False):
            log.warning(
                "This run is not protected: its replica groups (TorchFT) recover from a lost worker on their "
                "own"
            )
            return []
        if jit.mirror is not None:
            log.warning(
                "LASTCALL_MIRROR is ignored: Ray Train keeps its checkpoints in "
                "RunConfig(storage_path=...), which may be s3://"
            )
        run_name.pin(trainer.run_config, jit.run_id, None, internals.trial())
        os.environ.setdefault(internals.DRAIN_VARIABLE, _DRAIN_SECONDS)  # Ray passes it on to the controller
        sources = scripts.gather(trainer.train_loop_per_worker)
        for callback in present:
            callback.sources = sources
        return [] if present else [JITCallback.of(jit, sources)]
