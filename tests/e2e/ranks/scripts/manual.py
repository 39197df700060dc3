"""No DistributedDataParallel: the gradients are averaged by hand. Some ranks may have steps of their own
after the common ones.

python manual.py DIRECTORY
"""

from __future__ import annotations

import sys
from typing import Any

import member as members
import torch
import torch.distributed as dist
from torch import nn

import lastcall


def main(member: members.Member) -> None:
    plan = member.plan
    torch.manual_seed(1)
    model = members.net(plan.width)
    optimizer = members.adamw(member, model)
    loader, sampler = members.loader(member)
    progress = members.progress(member)
    torch.manual_seed(100 + member.rank)
    member.late()
    state: dict[str, Any] = {"model": model, "optimizer": optimizer, "data": loader, "progress": progress}
    with lastcall.protect(sys.argv[1], files=member.files(), **state) as run:
        member.journal.say("protected", step=run.step)
        feed = members.Feed(loader, sampler, progress)
        for step in run.steps(plan.steps + plan.extra.get(member.rank, 0)):
            batches, names = feed.take(1)
            member.journal.say("at", step=step, data=names)
            member.lose_time(step)
            train(member, model, optimizer, batches[0], step)
            member.tail(step)
            member.journal.say("did", step=step + 1)
            member.strike(step, "end")
    member.journal.say("left")
    member.done(members.digests(model, optimizer, progress=progress, randomness=torch.get_rng_state()))


def train(
    member: members.Member, model: nn.Module, optimizer: torch.optim.Optimizer, batch: Any, step: int
) -> None:
    features, classes = batch
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(features), classes).backward()
    member.strike(step, "forward")
    if step < member.plan.steps:
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
            assert parameter.grad is not None
            parameter.grad /= member.world
    member.strike(step, "backward")
    optimizer.step()
    member.strike(step, "optimizer")


with members.joined() as joined:
    main(joined)
