"""The other order: a pass steps with the gradients of the pass before, and leaves new ones for the next."""

from __future__ import annotations

import torch

import lastcall
from helpers.models import training

training.seed()
model = training.Block()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

with lastcall.protect(training.DIRECTORY, model=model, optimizer=optimizer) as run:
    for step in run.steps(60):
        training.say(step)
        optimizer.step()
        optimizer.zero_grad()
        model.loss(training.batch()).backward()

training.finish(model=model, optimizer=optimizer)
