"""A training as people write them, with transformers.Trainer and without a line of lastcall, in a pod whose
image does not know it.

STEPS  how many                            PACE  seconds that a step takes at least
EVERY  a checkpoint each so many steps     SLOW  seconds that a checkpoint takes

What it says goes to its output: `from 7` when the training begins (after that many steps), `step 8` after
each, and at the end `finished` with the digest of the weights.
"""

from __future__ import annotations

import hashlib
import os
import sys
import time
from typing import Any

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments, set_seed

STEPS, EVERY = (int(os.environ.get(name, "0")) for name in ("STEPS", "EVERY"))
PACE, SLOW = (float(os.environ.get(name, "0")) for name in ("PACE", "SLOW"))


class Rows(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        row = (torch.arange(16) * 7 + index * 13) % 96
        return {"input_ids": row, "labels": row}


class Diary(TrainerCallback):
    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        print("from", state.global_step, flush=True)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        time.sleep(PACE)
        print("step", state.global_step, flush=True)


class SlowTrainer(Trainer):
    """On a volume that needs its time."""

    def save_model(self, *arguments: Any, **options: Any) -> None:
        print("saving", flush=True)
        time.sleep(SLOW)
        super().save_model(*arguments, **options)


def main(folder: str) -> None:
    set_seed(0)
    config = GPT2Config(
        vocab_size=96, n_positions=16, n_embd=32, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0
    )
    arguments = TrainingArguments(
        output_dir=f"{folder}/run",
        max_steps=STEPS,
        per_device_train_batch_size=4,
        save_strategy="steps" if EVERY else "no",
        save_steps=EVERY or 500,
        logging_steps=1,
        dataloader_pin_memory=False,
        use_cpu=True,
        disable_tqdm=True,
        report_to="none",
    )
    trainer = SlowTrainer(
        model=GPT2LMHeadModel(config), args=arguments, train_dataset=Rows(), callbacks=[Diary()]
    )
    trainer.train()
    digest = hashlib.sha256()
    for name, tensor in sorted(trainer.model.state_dict().items()):
        digest.update(name.encode() + tensor.contiguous().numpy().tobytes())
    print("finished", digest.hexdigest(), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
