"""A loop of its own shape: until the loss has been low for a while, with run.tick() at the end of each
step."""

from __future__ import annotations

import torch

import lastcall
from helpers.models import training

training.seed()
model = training.Block()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
seen = {"tokens": 0}

with lastcall.protect(training.DIRECTORY, model=model, optimizer=optimizer, seen=seen) as run:
    while seen["tokens"] < 60 * 32:
        training.say(seen["tokens"] // 32)
        tokens = training.batch()
        optimizer.zero_grad()
        model.loss(tokens).backward()
        optimizer.step()
        seen["tokens"] += tokens.numel()
        run.tick()

training.finish(model=model, optimizer=optimizer, seen=seen)
