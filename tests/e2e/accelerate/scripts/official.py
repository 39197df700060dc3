"""The state that Accelerate itself loads from a checkpoint, without lastcall: python official.py CHECKPOINT
RESULT"""

from __future__ import annotations

import sys
from typing import Any

import torch
from accelerate import Accelerator

from helpers.models import training

if __name__ == "__main__":
    from loop import Seen

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model: Any = training.Block()
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler: Any = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=30)
    model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
    seen = Seen()
    accelerator.register_for_checkpointing(seen)
    accelerator.load_state(sys.argv[1])
    training.finish(model=model, optimizer=optimizer.optimizer, scheduler=scheduler.scheduler, seen=seen)
