"""Loaders and epochs out of the ordinary. CASE: TrainingArguments by name, `noise`, `plain` (a DataLoader
that Accelerate has not seen) and `cut` (an epoch is left at each step that it divides)."""

import json
import os
from typing import Any

import bits
from torch.utils.data import DataLoader
from transformers import Trainer, TrainerCallback

case: dict[str, Any] = json.loads(os.environ["CASE"])
noise, plain, cut = case.pop("noise", ""), case.pop("plain", False), case.pop("cut", 0)


class Own(Trainer):  # type: ignore[misc]
    def get_train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(self.train_dataset, 4, shuffle=True, collate_fn=self.data_collator)


class Cut(TrainerCallback):  # type: ignore[misc]
    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        control.should_epoch_stop = cut > 0 and state.global_step % cut == 0


trainer = (Own if plain else Trainer)(
    model=bits.model(),
    args=bits.arguments(**case),
    train_dataset=bits.Sentences(60, noise),
    eval_dataset=bits.Sentences(10, first=1000),
    data_collator=bits.padded,
    callbacks=[Cut()],
)
bits.train(trainer)
