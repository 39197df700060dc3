"""A GradScaler that grows, and that skips a step when a gradient overflows."""

from __future__ import annotations

import torch

import lastcall
from helpers.models import training

training.seed()
model = training.Block()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
scaler = torch.amp.GradScaler("cpu", init_scale=16.0, growth_interval=7)

with lastcall.protect(training.DIRECTORY, model=model, optimizer=optimizer, scaler=scaler) as run:
    for step in run.steps(60):
        training.say(step)
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = model.loss(training.batch())
        scaler.scale(loss).backward()
        if step % 17 == 11:
            model.embed.weight.grad.fill_(float("inf"))
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()

training.finish(model=model, optimizer=optimizer, scaler=scaler)
