"""FSDP2 on any number of ranks, or HSDP with two replicas. Every digest is of whole tensors, so that worlds
can be compared.

python fsdp.py DIRECTORY
"""

from __future__ import annotations

import itertools
import sys
from typing import Any

import member as members
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard

import lastcall


def mesh(member: members.Member) -> DeviceMesh:
    if member.plan.mesh == "hybrid":
        return init_device_mesh("cpu", (2, member.world // 2), mesh_dim_names=("replicate", "shard"))
    return init_device_mesh("cpu", (member.world,), mesh_dim_names=("shard",))


def net(width: int) -> nn.Sequential:
    """Without batch normalization, whose buffers FSDP leaves to each rank; odd sizes, so that shards are
    uneven."""
    sizes = [members.FEATURES, width + 1, width + 3, width]
    blocks = [
        nn.Sequential(nn.Linear(a, b), nn.LayerNorm(b), nn.ReLU(), nn.Dropout(0.2))
        for a, b in itertools.pairwise(sizes)
    ]
    return nn.Sequential(*blocks, nn.Linear(width, members.CLASSES))


def main(member: members.Member) -> None:
    plan = member.plan
    torch.manual_seed(1)
    model = net(plan.width)
    devices = mesh(member)
    for block in model:
        fully_shard(block, mesh=devices)
    fully_shard(model, mesh=devices)
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
        restored = members.digests(model, optimizer) if run.resumed else {}
        member.journal.say("protected", step=run.step, state=restored)
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
    member: members.Member, model: Any, optimizer: torch.optim.Optimizer, batches: list[Any], step: int
) -> None:
    optimizer.zero_grad()
    for number, (features, classes) in enumerate(batches):
        model.set_requires_gradient_sync(number == len(batches) - 1)
        loss = nn.functional.cross_entropy(model(features), classes) / len(batches)
        member.strike(step, "forward")
        loss.backward()
    member.strike(step, "backward")
    optimizer.step()
    member.strike(step, "optimizer")


with members.joined() as joined:
    main(joined)
