"""DistributedDataParallel with a DistributedSampler and one worker: python pipeline.py DIRECTORY LOOP
KILL."""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler

import lastcall

DIRECTORY, LOOP, KILL = sys.argv[1], sys.argv[2], int(sys.argv[3])


class Numbers(Dataset[float]):
    def __len__(self) -> int:
        return 48

    def __getitem__(self, index: int) -> float:
        return index + float(torch.rand(())) * 0.5 + random.random() * 0.1


dist.init_process_group("gloo")
torch.manual_seed(1)
random.seed(2)
model = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Linear(1, 8), nn.Dropout(0.2), nn.Linear(8, 1)))
optimizer = torch.optim.Adam(model.parameters(), 1e-2)
sampler: Any = DistributedSampler(Numbers(), seed=3)
data: Any = DataLoader(Numbers(), batch_size=2, sampler=sampler, num_workers=1)
config = lastcall.JITCheckpointConfig(enabled=True, kill_wait=0.0, grace=60.0)


def learn(run: Any, step: int, batch: torch.Tensor) -> None:
    model(batch.float().reshape(-1, 1)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    print(json.dumps([step, batch.tolist()]), flush=True)
    if step == KILL and run.resumed is None:
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0.2)


def epochs(run: Any) -> None:
    for epoch in run.epochs(3):
        if LOOP == "set_epoch":
            sampler.set_epoch(epoch)
        for batch in run.batches(data):
            learn(run, run.step, batch)


def steps(run: Any) -> None:
    """Epochs are counted by hand."""
    epoch = 0
    sampler.set_epoch(epoch)
    batches = iter(data)
    for step in run.steps(36):
        batch = next(batches, None)
        if batch is None:
            epoch += 1
            sampler.set_epoch(epoch)
            batches = iter(data)
            batch = next(batches)
        learn(run, step, batch)


with lastcall.protect(
    DIRECTORY, config=config, model=model, optimizer=optimizer, **({"data": data} if LOOP == "steps" else {})
) as run:
    (steps if LOOP == "steps" else epochs)(run)
print(json.dumps(["end", [parameter.tolist() for parameter in model.parameters()]]), flush=True)
dist.destroy_process_group()
