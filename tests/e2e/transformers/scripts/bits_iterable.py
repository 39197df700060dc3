"""A stream that shuffles through a buffer. CASE: TrainingArguments by name, and `length`, `shuffle` ("own" or
"global"), `noise`."""

import functools
import json
import os
import random
from collections.abc import Iterator
from typing import Any

import bits
import torch
from torch.utils.data import IterableDataset, get_worker_info
from transformers import Trainer

case: dict[str, Any] = json.loads(os.environ["CASE"])
length, shuffle, noise = case.pop("length", False), case.pop("shuffle", "own"), case.pop("noise", "")


class Stream(IterableDataset[dict[str, torch.Tensor]]):
    """Sentences from somewhere else, one after the other."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        worker = get_worker_info()
        part, parts = (worker.id, worker.num_workers) if worker else (0, 1)
        dice: Any = random.Random(self.epoch) if shuffle == "own" else random
        buffer: list[int] = []
        for number in range(part, 60, parts):
            buffer.append(number)
            if len(buffer) > 8:
                yield self.read(buffer.pop(dice.randrange(len(buffer))))
        while buffer:
            yield self.read(buffer.pop(dice.randrange(len(buffer))))

    def read(self, number: int) -> dict[str, torch.Tensor]:
        return {"input_ids": bits.noisy(bits.sentence(number), noise)}


class Known(Stream):
    def __len__(self) -> int:
        return 60


trainer = Trainer(
    model=bits.model(),
    args=bits.arguments(**case),
    train_dataset=Known() if length else Stream(),
    eval_dataset=bits.Sentences(10, first=1000),
    # rank 0 joins the batches of all ranks into one
    data_collator=functools.partial(bits.padded, length=bits.LONGEST),
)
bits.train(trainer)
