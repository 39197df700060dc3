"""The public names for Ray Train. Nothing of this is needed where RAY_TRAIN_JIT_CHECKPOINT_ENABLED=1 is set.

RunConfig   Ray's own, with jit_checkpoint_config=JITCheckpointConfig(enabled=True); from now on
            ray.train.RunConfig has that, too
protect     in the train function: what is to be saved and put back where the script has no save of its own
"""

from __future__ import annotations

import ray.train

from lastcall.adapters.ray.driver.config import JITCheckpointConfig, RunConfig, accept
from lastcall.adapters.ray.saves.protect import protect

__all__ = ["JITCheckpointConfig", "RunConfig", "protect"]

accept(ray.train.RunConfig)
