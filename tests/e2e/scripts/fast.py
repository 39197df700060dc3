"""Steps of microseconds, too short for a copy at each boundary, with an accumulation of three inside."""

from __future__ import annotations

import torch

import lastcall
from helpers.models import training

training.seed()
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)

with lastcall.protect(training.DIRECTORY, model=model, optimizer=optimizer) as run:
    for step in run.steps(9000):
        if step % 100 == 0:
            print("at", step, flush=True)
        model(torch.randn(4)).square().sum().backward()
        if step % 3 == 2:
            optimizer.step()
            optimizer.zero_grad()

training.finish(model=model, optimizer=optimizer)
