"""A loop of its own shape: until the loss has been low for a while, with run.tick() at the end of each step."""

from __future__ import annotations

import common
import torch

import lastcall

common.seed()
model = common.Block()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
seen = {"tokens": 0}

with lastcall.protect(common.DIRECTORY, model=model, optimizer=optimizer, seen=seen) as run:
    while seen["tokens"] < 60 * 32:
        common.say(seen["tokens"] // 32)
        tokens = common.batch()
        optimizer.zero_grad()
        model.loss(tokens).backward()
        optimizer.step()
        seen["tokens"] += tokens.numel()
        run.tick()

common.finish(model=model, optimizer=optimizer, seen=seen)
