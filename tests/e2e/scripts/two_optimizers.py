"""Two models and two optimizers, one of which steps every other time."""

from __future__ import annotations

import common
import torch

import lastcall

common.seed()
one, other = common.Block(), common.Block()
first = torch.optim.Adam(one.parameters(), lr=1e-3)
second = torch.optim.RMSprop(other.parameters(), lr=1e-3)

with lastcall.protect(common.DIRECTORY, models={"one": one, "other": other}, optimizers=[first, second]) as run:
    for step in run.steps(60):
        common.say(step)
        tokens = common.batch()
        first.zero_grad()
        one.loss(tokens).backward()
        first.step()
        if step % 2:
            second.zero_grad()
            (other.loss(tokens) + (other(tokens) - one(tokens).detach()).square().mean()).backward()
            second.step()

common.finish(one=one, other=other, first=first, second=second)
