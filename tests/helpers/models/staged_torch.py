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

    def __init__(self, root: Path, **how: Any) -> None:
        super().__init__(root, **how)
        random.seed(self.seed), np.random.seed(self.seed)
        torch.manual_seed(self.seed)
        self.net = Net(7 if self.wide else 6)
        self.build()

    def build(self) -> None:
        self.optimizer = Adam(self.net.parameters(), lr=0.1)
        self.scheduler = Decay(self.optimizer, 3)
        self.mean = torch.zeros(5 if self.wide else 3)
        self.data = TensorDataset(torch.arange(4.0 * ROWS).reshape(ROWS, 4) / ROWS)

    def live(self) -> Mapping[str, object]:
        return {
            "model": self.net.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "scheduler": self.scheduler.state_dict(),
            "mean": self.mean,
        }

    def be(self, rank: int, size: int) -> None:
        assert isinstance(self.subject, TorchSubject)
        self.subject.together.among(rank, size)


class PlainLoop(TorchTraining):
    def train(self) -> None:
        loader = DataLoader(self.data, batch_size=2, shuffle=True)
        state = {"model": self.net, "optimizer": self.optimizer, "scheduler": self.scheduler}
        with lastcall.protect(self.root, config=quiet(), **state, data=loader, mean=self.mean) as run:
            for _ in run.epochs(100):
                for (batch,) in run.batches(loader):
                    loss = self.net(batch)["loss"]
                    loss.backward()
                    self.optimizer.step()
                    self.optimizer.zero_grad()
                    self.mean.add_(batch.mean())
                    run.report(loss=loss)
                    self.scheduler.step()


class ShardedLoop(PlainLoop):
    """FSDP, with one rank that has every shard."""

    def build(self) -> None:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        for layer in (self.net.first, self.net.last, self.net):
            fully_shard(layer)
        super().build()

    def close(self) -> None:
        super().close()
        dist.destroy_process_group()
