"""The public names for Ray Train. Nothing of this is needed where RAY_TRAIN_JIT_CHECKPOINT_ENABLED=1 is set.

RunConfig   Ray's own, with jit_checkpoint_config=
protect     in the train function: what is to be saved and put back where the script has no save of its own
"""

from __future__ import annotations

from lastcall.adapters.ray.config import RunConfig
from lastcall.adapters.ray.named import protect
from lastcall.settings import JITCheckpointConfig

__all__ = ["JITCheckpointConfig", "RunConfig", "protect"]
