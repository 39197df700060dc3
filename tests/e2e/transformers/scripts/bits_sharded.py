"""A plain Trainer whose model is sharded: by Accelerate's FSDP2, or by DeepSpeed. CASE: its TrainingArguments
by name, `noise`, and `evaluation`: the seconds that a batch of an evaluation takes.

Accelerate knows both on accelerators only, and trains with DistributedDataParallel on CPUs, without a word.
They work there all the same: here they are let."""

import json
import os
import sys
import time
from typing import Any

import bits
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import DistributedType
from torch.distributed.fsdp import FSDPModule
from transformers import Trainer, TrainerCallback


def let_fsdp() -> None:
    original = AcceleratorState.__init__

    def init(self: Any, *args: Any, fsdp_plugin: Any = None, **kwargs: Any) -> None:
        original(self, *args, fsdp_plugin=fsdp_plugin, **kwargs)
        if fsdp_plugin is not None and self.distributed_type == DistributedType.MULTI_CPU:
            self.fsdp_plugin = fsdp_plugin
            self.distributed_type = PartialState._shared_state["distributed_type"] = DistributedType.FSDP

    AcceleratorState.__init__ = init


def let_deepspeed() -> None:
    """DS_ACCELERATOR=cpu is to be set."""
    import deepspeed.comm.torch

    assert deepspeed
    sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None  # it would be compiled now, for minutes
    PartialState._prepare_backend = lambda self, *args, **kwargs: ("gloo", DistributedType.MULTI_CPU)


class Slow(TrainerCallback):  # type: ignore[misc]
    def on_prediction_step(self, *args: Any, **kwargs: Any) -> None:
        time.sleep(seconds)


case: dict[str, Any] = json.loads(os.environ["CASE"])
noise, seconds = case.pop("noise", ""), case.pop("evaluation", 0.0)
(let_deepspeed if "deepspeed" in case else let_fsdp)()
trainer = Trainer(
    model=bits.model(),
    args=bits.arguments(**case),
    train_dataset=bits.Sentences(60, noise),
    eval_dataset=bits.Sentences(10, first=1000),
    data_collator=bits.padded,
    callbacks=[Slow()],
)
bits.train(trainer)
sharded = trainer.is_deepspeed_enabled or isinstance(trainer.model, FSDPModule)
assert sharded, "nothing was sharded: nothing would be shown by this"
