"""Small trainings with torch that go as far as a test says: see helpers.core.staged."""

from __future__ import annotations

import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, TensorDataset

import lastcall
from helpers.core.staged import Staged, quiet, reach
from lastcall.adapters.torch.subject import TorchSubject

ROWS = 8  # samples: four steps an epoch


class Net(torch.nn.Module):
    """Its forward draws, and changes buffers."""

    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.first = torch.nn.Linear(4, width)
        self.norm = torch.nn.BatchNorm1d(width)
        self.drop = torch.nn.Dropout(0.2)
        self.last = torch.nn.Linear(width, 1)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        loss = self.last(self.drop(self.norm(self.first(x)))).square().mean()
        reach("forward")
        return {"loss": loss}


class Adam(torch.optim.AdamW):
    def step(self, closure: Any = None) -> Any:
        done = super().step(closure)
        reach("mutation")
        return done


class Decay(torch.optim.lr_scheduler.StepLR):
    def step(self, epoch: int | None = None) -> None:
        super().step(epoch)
        reach("stepped")


class TorchTraining(Staged):
    """What each of them has before its loop."""

    reports = frozenset({"loss"})

    def __init__(self, root: Path, **how: Any) -> None:
        super().__init__(root, **how)
        random.seed(self.seed), np.random.seed(self.seed)
        torch.manual_seed(self.seed)
        self.net = Net(7 if self.wide else 6)
        self.build()

    def build(self) -> None:
        self.optimizer = Adam(self.net.parameters(), lr=0.1)
        self.scheduler = Decay(self.optimizer, 3)
        self.mean = torch.nn.Linear(5 if self.wide else 3, 1)  # no optimizer has it
        self.rows = torch.arange(4.0 * ROWS).reshape(ROWS, 4) / ROWS
        self.data = TensorDataset(self.rows)

    def live(self) -> Mapping[str, object]:
        return {
            "model": self.net.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "scheduler": self.scheduler.state_dict(),
            "mean": self.mean.state_dict(),
        }

    def be(self, rank: int, size: int) -> None:
        assert isinstance(self.subject, TorchSubject)
        self.subject.together.among(rank, size)


def follow(mean: torch.nn.Linear, batch: torch.Tensor) -> None:
    with torch.no_grad():
        mean.weight.mul_(0.9).add_(batch.mean())


class PlainLoop(TorchTraining):
    def train(self) -> None:
        _loop(self.root, self.net, self.optimizer, self.scheduler, self.mean, self.data)


def _loop(
    root: Path,
    net: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    scheduler: Decay,
    mean: torch.nn.Linear,
    data: TensorDataset,
) -> None:
    """A script's: its variables are carried, and none is the test's."""
    loader = DataLoader(data, batch_size=2, shuffle=True)
    state: dict[str, Any] = {
        "model": net,
        "optimizer": optimizer,
        "scheduler": scheduler,
        "mean": mean,
        "data": loader,
    }
    with lastcall.protect(root, config=quiet(), **state) as run:
        for _ in run.epochs(100):
            for (batch,) in run.batches(loader):
                loss = net(batch)["loss"]
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                follow(mean, batch)
                run.report(loss=loss)
                scheduler.step()


class ShardedLoop(PlainLoop):
    """FSDP, with one rank that has every shard."""

    def build(self) -> None:
        store = dist.HashStore()  # type: ignore[attr-defined]
        dist.init_process_group("gloo", store=store, rank=0, world_size=1)
        for layer in (self.net.first, self.net.last, self.net):
            fully_shard(layer)
        super().build()

    def close(self) -> None:
        super().close()
        dist.destroy_process_group()
