"""A plain Trainer. CASE: its TrainingArguments by name, and `noise`, `count`, `packing`, `patience`."""

import json
import os
from typing import Any

import bits
from transformers import EarlyStoppingCallback, Trainer

case: dict[str, Any] = json.loads(os.environ["CASE"])
noise, count, patience = case.pop("noise", ""), case.pop("count", 60), case.pop("patience", 0)
collator = bits.packed if case.pop("packing", False) else bits.padded

trainer = Trainer(
    model=bits.model(),
    args=bits.arguments(**case),
    train_dataset=bits.Sentences(count, noise),
    eval_dataset=bits.Sentences(10, first=1000),
    data_collator=collator,
    callbacks=[EarlyStoppingCallback(early_stopping_patience=patience)] if patience else None,
)
bits.train(trainer)
