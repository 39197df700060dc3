"""The other order: a pass steps with the gradients of the pass before, and leaves new ones for the next."""

from __future__ import annotations

import common
import torch

import lastcall

common.seed()
model = common.Block()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

with lastcall.protect(common.DIRECTORY, model=model, optimizer=optimizer) as run:
    for step in run.steps(60):
        common.say(step)
        optimizer.step()
        optimizer.zero_grad()
        model.loss(common.batch()).backward()

common.finish(model=model, optimizer=optimizer)
