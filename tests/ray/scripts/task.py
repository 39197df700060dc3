"""What the scripts in this folder train, their command line, and their diary. Knows nothing of lastcall.

A batch is a function of its number and the rank, so that the parameters after n updates are one value,
whatever happened on the way: `reference` computes it without Ray. The diary is a file with a line of JSON for
each step, with a digest of parameters and optimizer.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import time
from collections.abc import Iterator
from typing import Any

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


def compute(config: dict[str, Any]) -> None:
    """The time that a real step would take; none once somebody is in a hurry."""
    if not os.path.exists(f"{config['diary']}.hurry"):
        time.sleep(config["pause"])


def batches(epoch: int, config: dict[str, Any], rank: int = 0) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    for index in range(config["batches"]):
        compute(config)
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
    """The digests after 0, 1, ... updates of a run that nobody interrupted: gradients averaged over ranks, as
    DDP does it."""
    model = new_model()
    optimizer = new_optimizer(model)
    found = [digest(model, optimizer)]
    for number in range(steps):
        averages = [
            sum(gradients)
            for gradients in zip(
                *(_gradients(model, number, rank, world) for rank in range(world)), strict=True
            )
        ]
        for parameter, average in zip(model.parameters(), averages, strict=True):
            parameter.grad = average
        optimizer.step()
        found.append(digest(model, optimizer))
    return found


def _gradients(model: torch.nn.Module, number: int, rank: int, world: int) -> list[torch.Tensor]:
    inputs, targets = batch(number, rank)
    loss = torch.nn.functional.mse_loss(model(inputs), targets)
    return [gradient / world for gradient in torch.autograd.grad(loss, list(model.parameters()))]


def reference_of_seed(steps: int) -> list[str]:
    """The same for seed.py, which trains something else, and each rank for itself."""
    torch.manual_seed(0)
    model = torch.nn.Linear(10, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    found = [digest(model)]
    for number in range(steps):
        for parameter, gradient in zip(model.parameters(), _gradients(model, number, 0, 1), strict=True):
            parameter.grad = gradient
        optimizer.step()
        found.append(digest(model))
    return found


def say(config: dict[str, Any], event: str, **facts: object) -> None:
    import ray.train  # here, so that the tests have the reference without it

    context = ray.train.get_context()
    line = {
        "event": event,
        "rank": context.get_world_rank(),
        "pid": os.getpid(),
        "time": time.time(),
        **facts,
    }
    with open(config["diary"], "ab", buffering=0) as file:
        file.write(json.dumps(line).encode() + b"\n")


def arguments(**defaults: object) -> argparse.Namespace:
    """`--epochs 20` and the like; `defaults` are what the script needs besides."""
    import ray.train

    parser = argparse.ArgumentParser()
    options = {
        "name": "run",
        "storage": "",
        "diary": "",
        "workers": 2,
        "resource": "",
        "pause": 0.1,
        "keep": 0,
        **defaults,
    }
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
