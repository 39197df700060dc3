"""Epochs that end with a validation on a loader of its own, whose result decides about the learning rate, and
which draws random numbers as well."""

from __future__ import annotations

import numpy as np
import torch
from torch.utils.data import DataLoader

import lastcall
from helpers.models import training

if __name__ == "__main__":
    training.seed()
    loader = DataLoader(training.Sentences(24), batch_size=4, shuffle=True)
    held_out = DataLoader(training.Sentences(12), batch_size=4, shuffle=True)
    model = training.Block()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.5)
    history: list[float] = []
    counters = {"batches": 0}

    with lastcall.protect(
        training.DIRECTORY,
        model=model,
        optimizer=optimizer,
        scheduler=scheduler,
        history=history,
        counters=counters,
    ) as run:
        for _ in run.epochs(4):
            for tokens in run.batches(loader):
                training.say(counters["batches"])
                training.interrupt_first_pass(run)
                optimizer.zero_grad()
                model.loss(tokens).backward()
                optimizer.step()
                counters["batches"] += 1
            losses = []
            for tokens in held_out:
                training.interrupt_first_pass(run)
                with torch.no_grad():
                    losses.append(model.loss(tokens).item() + 1e-3 * np.random.normal())
            history.append(sum(losses))
            scheduler.step(history[-1])

    training.finish(model=model, optimizer=optimizer, scheduler=scheduler, history=history, counters=counters)
