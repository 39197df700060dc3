"""run.epochs and run.batches: a shuffled loader with two workers, accumulation of four, the last window of an
epoch unfinished. LOADER=persistent keeps the workers between the epochs."""

from __future__ import annotations

import os

import torch
from torch.utils.data import DataLoader

import lastcall
from helpers.models import training

EPOCHS, WINDOW = int(os.environ.get("EPOCHS", "3")), 4

if __name__ == "__main__":
    training.seed()
    loader = DataLoader(
        training.Sentences(108),
        batch_size=4,
        shuffle=True,
        num_workers=2,
        persistent_workers=os.environ.get("LOADER") == "persistent",
    )
    model = training.Block()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=30)
    ema = {name: value.detach().clone() for name, value in model.named_parameters()}

    counters = {"batches": 0}
    with lastcall.protect(
        training.DIRECTORY,
        model=model,
        optimizer=optimizer,
        scheduler=scheduler,
        ema=ema,
        counters=counters,
        data=loader,
    ) as run:
        for _ in run.epochs(EPOCHS):
            for tokens in run.batches(loader):
                training.say(counters["batches"])
                training.interrupt_first_pass(run)
                (model.loss(tokens) / WINDOW).backward()
                counters["batches"] += 1
                if counters["batches"] % WINDOW == 0:
                    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                    optimizer.step()
                    optimizer.zero_grad()
                    scheduler.step()
                    training.average(ema, model)

    training.finish(model=model, optimizer=optimizer, scheduler=scheduler, ema=ema, counters=counters)
