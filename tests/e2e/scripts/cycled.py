"""A loader that the user cycles through by himself, under run.steps; WORKERS says with how many processes."""

from __future__ import annotations

import os

import torch
from torch.utils.data import DataLoader

import lastcall
from helpers.models import training

if __name__ == "__main__":
    training.seed()
    workers = int(os.environ.get("WORKERS", "0"))
    loader = DataLoader(
        training.Sentences(60), batch_size=4, shuffle=True, num_workers=workers, drop_last=True
    )
    model = training.Block()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    with lastcall.protect(training.DIRECTORY, model=model, optimizer=optimizer, data=loader) as run:
        batches = training.cycle(loader)
        for step in run.steps(70):
            training.say(step)
            optimizer.zero_grad()
            model.loss(next(batches)).backward()
            optimizer.step()

    training.finish(model=model, optimizer=optimizer)
