"""Two models and two optimizers, one of which steps every other time."""

from __future__ import annotations

import torch

import lastcall
from helpers.models import training

training.seed()
one, other = training.Block(), training.Block()
first = torch.optim.Adam(one.parameters(), lr=1e-3)
second = torch.optim.RMSprop(other.parameters(), lr=1e-3)

with lastcall.protect(
    training.DIRECTORY, models={"one": one, "other": other}, optimizers=[first, second]
) as run:
    for step in run.steps(60):
        training.say(step)
        tokens = training.batch()
        first.zero_grad()
        one.loss(tokens).backward()
        first.step()
        if step % 2:
            second.zero_grad()
            (other.loss(tokens) + (other(tokens) - one(tokens).detach()).square().mean()).backward()
            second.step()

training.finish(one=one, other=other, first=first, second=second)
