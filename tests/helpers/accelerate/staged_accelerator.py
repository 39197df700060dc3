"""A loop around an Accelerator that goes as far as a test says: see helpers.core.staged."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator  # type: ignore[import-untyped]
from torch.utils.data import DataLoader

import lastcall
from helpers.core.staged import quiet
from helpers.models.staged_torch import TorchTraining, follow


class AcceleratorLoop(TorchTraining):
    def train(self) -> None:
        accelerator = Accelerator(cpu=True)
        loader = DataLoader(self.data, batch_size=2, shuffle=True)
        prepared = accelerator.prepare(self.net, self.optimizer, self.scheduler, loader)
        _loop(self.root, accelerator, prepared, self.mean)


def _loop(root: Path, accelerator: Any, prepared: Any, mean: torch.nn.Linear) -> None:
    """A script's: its variables are carried, and none is the test's."""
    net, optimizer, scheduler, loader = prepared
    with lastcall.protect(root, accelerator=accelerator, config=quiet(), mean=mean) as run:
        for _ in run.epochs(100):
            for (batch,) in run.batches(loader):
                loss = net(batch)["loss"]
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
                follow(mean, batch)
                run.report(loss=loss)
                scheduler.step()
