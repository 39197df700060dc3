"""run.steps with an accumulation inside: three of four boundaries have gradients that wait for the
optimizer."""

from __future__ import annotations

import os

import torch

import lastcall
from helpers.models import training

training.seed()
model = training.Block()
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)

with lastcall.protect(training.DIRECTORY, model=model, optimizer=optimizer) as run:
    for step in run.steps(int(os.environ.get("STEPS", "82"))):
        training.say(step)
        training.interrupt_first_pass(run)
        (model.loss(training.batch()) / 4).backward()
        if step % 4 == 3:
            optimizer.step()
            optimizer.zero_grad()

gradients = [value.grad for value in model.parameters()]
training.finish(model=model, optimizer=optimizer, gradients=gradients)
