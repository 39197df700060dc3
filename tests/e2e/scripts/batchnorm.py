"""BatchNorm: buffers that change in every forward, also where no optimizer steps."""

from __future__ import annotations

import torch
from torch import nn

import lastcall
from helpers.models import training

training.seed()
model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.3), nn.Linear(16, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, nesterov=True)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 10)

with lastcall.protect(training.DIRECTORY, model=model, optimizer=optimizer, scheduler=scheduler) as run:
    for step in run.steps(80):
        training.say(step)
        model(training.batch().float())  # no step follows this one
        loss = model(training.batch().float()).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()

training.finish(model=model, optimizer=optimizer, scheduler=scheduler)
