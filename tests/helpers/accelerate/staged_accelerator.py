"""A loop around an Accelerator that goes as far as a test says: see helpers.core.staged."""

from __future__ import annotations

from accelerate import Accelerator  # type: ignore[import-untyped]
from torch.utils.data import DataLoader

import lastcall
from helpers.core.staged import quiet
from helpers.models.staged_torch import TorchTraining


class AcceleratorLoop(TorchTraining):
    def train(self) -> None:
        accelerator = Accelerator(cpu=True)
        loader = DataLoader(self.data, batch_size=2, shuffle=True)
        net, optimizer, scheduler, batches = accelerator.prepare(
            self.net, self.optimizer, self.scheduler, loader
        )
        with lastcall.protect(
            self.root, accelerator=accelerator, config=quiet(), mean=self.mean
        ) as run:
            for _ in run.epochs(100):
                for (batch,) in run.batches(batches):
                    loss = net(batch)["loss"]
                    accelerator.backward(loss)
                    optimizer.step()
                    optimizer.zero_grad()
                    self.mean.add_(batch.mean())
                    run.report(loss=loss)
                    scheduler.step()
