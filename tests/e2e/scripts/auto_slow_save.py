"""A worker of torchrun on slow storage: SAVE_SECONDS pass between the first written byte of a checkpoint and
its commit, on the ranks named in SLOW_RANKS. Each rank has a directory of its own."""

from __future__ import annotations

import os
import sys
import threading
import time
from pathlib import Path

import torch

import lastcall
from lastcall.storage import files as storage

directory = Path(sys.argv[1])
rank = os.environ["RANK"]
slow = rank in os.environ["SLOW_RANKS"].split(",")


class SlowFiles(storage.Files):
    """The first file of a save takes long to become durable."""

    def __init__(self) -> None:
        self._first = threading.Lock()

    def fsync(self, fd: int) -> None:
        if slow and "/staging/" in os.readlink(f"/proc/self/fd/{fd}") and self._first.acquire(blocking=False):
            time.sleep(float(os.environ["SAVE_SECONDS"]))
        super().fsync(fd)


model = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
config = lastcall.JITCheckpointConfig(
    ranks="separate"
)  # each rank is a run of its own: one that saves slowly holds nobody up but torchrun
with lastcall.protect(
    directory / f"rank{rank}", config=config, files=SlowFiles(), model=model, optimizer=optimizer
) as run:
    for step in run.steps(1_000_000):
        model(torch.ones(1, 4)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        if step == 3:
            (directory / f"pid{rank}").write_text(str(os.getpid()))
        time.sleep(0.02)
