"""The public names for Hugging Face Transformers.

trainer.add_callback(lastcall.transformers.JITCheckpointCallback())
"""

from __future__ import annotations

from transformers import Trainer

from lastcall.adapters.transformers import patch
from lastcall.adapters.transformers.callback import JITCheckpointCallback
from lastcall.settings import JITCheckpointConfig, PeriodicCheckpointConfig

__all__ = ["JITCheckpointCallback", "JITCheckpointConfig", "PeriodicCheckpointConfig"]

patch.apply(Trainer, everywhere=False)
