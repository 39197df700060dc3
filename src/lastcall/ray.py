"""The public names for Ray Train. Nothing of this is needed where RAY_TRAIN_JIT_CHECKPOINT_ENABLED=1 is set.

trainer = TorchTrainer(train_func, run_config=lastcall.ray.RunConfig(jit_checkpoint_config=JITCheckpointConfig(kill_wait=5.0)))
"""

from __future__ import annotations

from lastcall.adapters.ray.config import RunConfig
from lastcall.settings import JITCheckpointConfig

__all__ = ["JITCheckpointConfig", "RunConfig"]
