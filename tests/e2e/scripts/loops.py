"""Two loaders in every epoch, and random numbers drawn at its top, between the loops and at its end."""

from __future__ import annotations

import random

import numpy as np
import torch
from torch.utils.data import DataLoader

import lastcall
from helpers.models import training

EPOCHS = 3


def draw() -> float:
    return torch.rand(()).item() + random.random() + float(np.random.rand())


if __name__ == "__main__":
    training.seed()
    first = DataLoader(training.Sentences(24), batch_size=4, shuffle=True)
    second = DataLoader(training.Sentences(20), batch_size=4, shuffle=True, num_workers=1)
    model = training.Block()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    counters = {"batches": 0, "ends": []}

    with lastcall.protect(
        training.DIRECTORY, model=model, optimizer=optimizer, counters=counters, first=first
    ) as run:
        for _ in run.epochs(EPOCHS):
            draw()
            for loader in (first, second):
                for tokens in run.batches(loader):
                    training.say(counters["batches"])
                    training.interrupt_first_pass(run)
                    optimizer.zero_grad()
                    model.loss(tokens).backward()
                    optimizer.step()
                    counters["batches"] += 1
                draw()
            counters["ends"].append(draw())

    training.finish(model=model, optimizer=optimizer, counters=counters)
