"""What the scripts in this folder train, their command line, and their diary. Knows nothing of lastcall.

A batch is a function of its number and the rank, so that the parameters after n updates are one value, whatever happened on the way:
`reference` computes it without Ray. The diary is a file with a line of JSON for each step, with a digest of parameters and optimizer.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import time
from collections.abc import Iterator
from typing import Any

import ray.train
import torch


def new_model() -> torch.nn.Module:
    torch.manual_seed(7)
    return torch.nn.Sequential(torch.nn.Linear(10, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))


def new_optimizer(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01)


def batch(number: int, rank: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1000 * number + rank)
    inputs = torch.randn(8, 10, generator=generator)
    return inputs, inputs.sum(1, keepdim=True) + 0.1 * torch.randn(8, 1, generator=generator)


def batches(epoch: int, config: dict[str, Any], rank: int = 0) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Those of an epoch, each after the time that a real one would take."""
    for index in range(config["batches"]):
        time.sleep(config["pause"])
        yield batch(epoch * config["batches"] + index, rank)


def updates(optimizer: torch.optim.Optimizer) -> int:
    """How often Adam has stepped, as its own state says."""
    return max((int(state["step"]) for state in optimizer.state.values()), default=0)


def digest(model: torch.nn.Module, optimizer: torch.optim.Optimizer | None = None) -> str:
    """Of every bit of the parameters, and of what Adam knows of each."""
    found = hashlib.sha256()
    for parameter in model.parameters():
        state = optimizer.state.get(parameter, {}) if optimizer is not None else {}
        for tensor in (parameter, *(state[name] for name in sorted(state))):
            found.update(tensor.detach().contiguous().numpy().tobytes())
    return found.hexdigest()[:16]


def reference(steps: int, world: int = 1) -> list[str]:
    """The digests after 0, 1, ... updates of a run that nobody interrupted: gradients averaged over ranks, as DDP does it."""
    model = new_model()
    optimizer = new_optimizer(model)
    found = [digest(model, optimizer)]
    for number in range(steps):
        sums = [torch.zeros_like(parameter) for parameter in model.parameters()]
        for rank in range(world):
            inputs, targets = batch(number, rank)
            model.zero_grad()
            torch.nn.functional.mse_loss(model(inputs), targets).backward()
            for total, parameter in zip(sums, model.parameters(), strict=True):
                total += parameter.grad / world
        for total, parameter in zip(sums, model.parameters(), strict=True):
            parameter.grad = total
        optimizer.step()
        found.append(digest(model, optimizer))
    return found


def say(config: dict[str, Any], event: str, **facts: object) -> None:
    context = ray.train.get_context()
    line = {"event": event, "rank": context.get_world_rank(), "pid": os.getpid(), "time": time.time(), **facts}
    with open(config["diary"], "ab", buffering=0) as file:
        file.write(json.dumps(line).encode() + b"\n")


def arguments(**defaults: object) -> argparse.Namespace:
    """`--epochs 20` and the like; `defaults` are what the script needs besides."""
    parser = argparse.ArgumentParser()
    options = {"name": "run", "storage": "", "diary": "", "workers": 2, "resource": "", "pause": 0.05, "keep": 0, **defaults}
    for name, value in options.items():
        parser.add_argument(f"--{name}", type=type(value), default=value)
    given = parser.parse_args()
    given.config = {name: getattr(given, name) for name in ("diary", "pause", *defaults)}
    needs = {"CPU": 0.1, **({given.resource: 1} if given.resource else {})}
    given.scaling = ray.train.ScalingConfig(num_workers=given.workers, resources_per_worker=needs)
    given.run = ray.train.RunConfig(
        name=given.name or None,
        storage_path=given.storage,
        checkpoint_config=ray.train.CheckpointConfig(num_to_keep=given.keep or None),
    )
    return given
