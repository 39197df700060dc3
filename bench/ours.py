"""The only file here that touches lastcall, through its public names and what DESIGN.md says of the files on disk."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from torch import nn

_WAIT_S = 300.0


class _Session:
    """A protected run that stays open between measurements. Imported here, so that `--without lastcall` works
    without it."""

    def __init__(self, folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer, **periodic: Any) -> None:
        import lastcall

        self._scope: AbstractContextManager[Any] = lastcall.protect(
            folder,
            config=lastcall.JITCheckpointConfig(enabled=True, log_level="WARNING"),
            periodic=lastcall.PeriodicCheckpointConfig(save_total_limit=2, **(periodic or {"save_strategy": "no"})),
            model=model,
            optimizer=optimizer,
        )
        self.run = self._scope.__enter__()

    def close(self) -> None:
        self._scope.__exit__(None, None, None)


class Saver(_Session):
    """Saves when told to."""

    def save(self, step: int) -> float:
        """Seconds from the boundary to the commit."""
        self.run.tick()
        start = time.perf_counter()
        self.run.save()
        return time.perf_counter() - start


class Periodic(_Session):
    """Saves in the background at every boundary."""

    def __init__(self, folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        super().__init__(folder, model, optimizer, save_strategy="steps", save_steps=1)
        self._folder = folder
        self._optimizer = optimizer

    def stall(self) -> float:
        """Seconds that a boundary with a save keeps training from its next optimizer step. The step is in it,
        since a saver could return at once and hold the mutation back instead; without gradients it changes
        nothing and costs microseconds."""
        start = time.perf_counter()
        self.run.tick()
        self._optimizer.step()
        return time.perf_counter() - start

    def wait(self) -> None:
        """Until the save that `stall` began is committed."""
        record = self._folder / f"checkpoint-{self.run.step}" / "lastcall.json"
        deadline = time.monotonic() + _WAIT_S
        while not record.exists():
            if time.monotonic() > deadline:
                raise TimeoutError(f"no {record} after {_WAIT_S:.0f} s: the background save did not commit")
            time.sleep(0.002)


class Steps(_Session):
    """The plain training loop, for the cost of a step."""

    def iterate(self) -> Iterator[int]:
        return iter(self.run.steps(10**12))


def load(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> float:
    """Restore the newest checkpoint into the live tensors; seconds until training could begin."""
    start = time.perf_counter()
    session = _Session(folder, model, optimizer)
    seconds = time.perf_counter() - start
    try:
        if session.run.resumed is None:
            raise RuntimeError(f"lastcall found nothing to resume from in {folder}")
    finally:
        session.close()
    return seconds


def fill(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Leave a committed checkpoint of this state behind."""
    saver = Saver(folder, model, optimizer)
    try:
        saver.save(1)
    finally:
        saver.close()
