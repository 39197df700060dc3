"""run.steps with dropout, a schedule, an average of the weights, and randomness of all kinds."""

from __future__ import annotations

import math

import torch

import lastcall
from helpers.models import training

training.seed()
model = training.Block()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
scheduler = torch.optim.lr_scheduler.LambdaLR(
    optimizer, lambda step: 0.5 * (1 + math.cos(math.pi * step / 80))
)
ema = {name: value.detach().clone() for name, value in model.named_parameters()}
extra = {"seen": 0, "words": set(), "pair": (1, b"\x00\xff"), "big": 1 << 80, "losses": []}

with lastcall.protect(
    training.DIRECTORY, model=model, optimizer=optimizer, scheduler=scheduler, ema=ema, extra=extra
) as run:
    for step in run.steps(80):
        training.say(step)
        tokens = training.batch()
        loss = model.loss(tokens)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        training.average(ema, model)
        extra["seen"] += len(tokens)
        extra["words"].add(int(tokens[0, 0]))
        extra["big"] += step
        extra["losses"] = [*extra["losses"][-4:], loss.item()]
        run.report(loss=loss)

extra["words"] = sorted(extra["words"])
training.finish(model=model, optimizer=optimizer, scheduler=scheduler, ema=ema, extra=extra)
