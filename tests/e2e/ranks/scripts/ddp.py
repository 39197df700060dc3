"""DistributedDataParallel with several buckets, batch normalization, dropout, a schedule, and accumulation if
asked for.

python ddp.py DIRECTORY
"""

from __future__ import annotations

import contextlib
import sys
from typing import Any

import member as members
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import lastcall


def main(member: members.Member) -> None:
    plan = member.plan
    torch.manual_seed(1)
    model = DistributedDataParallel(members.net(plan.width), bucket_cap_mb=0.01)
    optimizer = members.adamw(member, model)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=plan.steps)
    loader, sampler = members.loader(member)
    progress = members.progress(member)
    torch.manual_seed(100 + member.rank)
    member.late()
    state: dict[str, Any] = {
        "model": model,
        "optimizer": optimizer,
        "scheduler": scheduler,
        "data": loader,
        "progress": progress,
    }
    with lastcall.protect(sys.argv[1], files=member.files(), **state) as run:
        member.journal.say("protected", step=run.step)
        feed = members.Feed(loader, sampler, progress)
        for step in run.steps(plan.steps):
            batches, names = feed.take(plan.accumulate)
            member.journal.say("at", step=step, data=names)
            member.lose_time(step)
            train(member, model, optimizer, batches, step)
            scheduler.step()
            member.tail(step)
            whole = members.digests(model, optimizer) if plan.digests else {}
            member.journal.say("did", step=step + 1, state=whole)
            member.strike(step, "end")
    member.journal.say("left")
    member.done(
        members.digests(
            model,
            optimizer,
            scheduler=scheduler.state_dict(),
            progress=progress,
            randomness=torch.get_rng_state(),
        )
    )


def train(
    member: members.Member, model: nn.Module, optimizer: torch.optim.Optimizer, batches: list[Any], step: int
) -> None:
    optimizer.zero_grad()
    for number, (features, classes) in enumerate(batches):
        assert isinstance(model, DistributedDataParallel)
        last = number == len(batches) - 1
        with contextlib.nullcontext() if last else model.no_sync():
            loss = nn.functional.cross_entropy(model(features), classes) / len(batches)
            member.strike(step, "forward")
            loss.backward()
    member.strike(step, "backward")
    optimizer.step()
    member.strike(step, "optimizer")


with members.joined() as joined:
    main(joined)
