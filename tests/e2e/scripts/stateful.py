"""torchdata's StatefulDataLoader, used through its own state."""

from __future__ import annotations

import torch
from torchdata.stateful_dataloader import StatefulDataLoader

import lastcall
from helpers.models import training

if __name__ == "__main__":
    training.seed()
    loader = StatefulDataLoader(training.Sentences(80), batch_size=4, shuffle=True, num_workers=0)
    model = training.Block()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    counters = {"batches": 0}

    with lastcall.protect(
        training.DIRECTORY, model=model, optimizer=optimizer, counters=counters, data=loader
    ) as run:
        for _ in run.epochs(3):
            for tokens in run.batches(loader):
                training.say(counters["batches"])
                optimizer.zero_grad()
                model.loss(tokens).backward()
                optimizer.step()
                counters["batches"] += 1

    training.finish(model=model, optimizer=optimizer, counters=counters)
