"""RunConfig(jit_checkpoint_config=...): protection that is asked for in code. The environment has the last word."""

from __future__ import annotations

import warnings
from typing import Any

import ray.train

from lastcall.adapters.ray.callback import JITCallback
from lastcall.adapters.torch import script as scripts
from lastcall.settings import JITCheckpointConfig, changed


class RunConfig(ray.train.RunConfig):  # type: ignore[misc]
    """Ray's own, with one argument more. Deprecated in favour of RAY_TRAIN_JIT_CHECKPOINT_ENABLED=1, which needs no change of code."""

    def __init__(self, *args: Any, jit_checkpoint_config: JITCheckpointConfig | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.jit_checkpoint_config = jit_checkpoint_config
        if jit_checkpoint_config is None:
            return
        warnings.warn(
            "RunConfig(jit_checkpoint_config=...) is deprecated: set RAY_TRAIN_JIT_CHECKPOINT_ENABLED=1 and "
            "RAY_TRAIN_JIT_CHECKPOINT_KILL_WAIT instead, and leave the code as it was",
            DeprecationWarning,
            stacklevel=2,
        )
        jit = over(jit_checkpoint_config)
        if jit.enabled:
            self.callbacks: list[Any] = [*self.callbacks, JITCallback.of(jit, scripts.gather(None))]


def over(given: JITCheckpointConfig) -> JITCheckpointConfig:
    """What was given, with what the environment says in its place."""
    found = JITCheckpointConfig()
    said = {name: getattr(found, name) for name, origin in found.origins().items() if origin != "default"}
    return changed(given, **said)
