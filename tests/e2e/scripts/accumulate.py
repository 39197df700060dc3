"""run.steps with an accumulation inside: three of four boundaries have gradients that wait for the optimizer."""

from __future__ import annotations

import common
import torch

import lastcall

common.seed()
model = common.Block()
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)

with lastcall.protect(common.DIRECTORY, model=model, optimizer=optimizer) as run:
    for step in run.steps(82):
        common.say(step)
        (model.loss(common.batch()) / 4).backward()
        if step % 4 == 3:
            optimizer.step()
            optimizer.zero_grad()

gradients = [value.grad for value in model.parameters()]
common.finish(model=model, optimizer=optimizer, gradients=gradients)
