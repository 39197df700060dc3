"""BatchNorm: buffers that change in every forward, also where no optimizer steps."""

from __future__ import annotations

import common
import torch
from torch import nn

import lastcall

common.seed()
model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.3), nn.Linear(16, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, nesterov=True)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 10)

with lastcall.protect(common.DIRECTORY, model=model, optimizer=optimizer, scheduler=scheduler) as run:
    for step in run.steps(80):
        common.say(step)
        model(common.batch().float())  # no step follows this one
        loss = model(common.batch().float()).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()

common.finish(model=model, optimizer=optimizer, scheduler=scheduler)
