"""The only file here that touches lastcall: its public names, and what DESIGN.md says of the files on
disk."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

_WAIT_S = 300.0


class _Over(SystemExit):
    """Leaves the block as sys.exit() does: a run that ends well would save once more, and of many ranks also
    one that fails."""


class _Session:
    """A protected run that stays open between measurements. Imported here, so that `--without lastcall` works
    without it."""

    def __init__(
        self, folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer, **periodic: Any
    ) -> None:
        import lastcall

        self._scope: Any = lastcall.protect(
            folder,
            config=lastcall.JITCheckpointConfig(enabled=True, log_level="WARNING"),
            periodic=lastcall.PeriodicCheckpointConfig(
                save_total_limit=2, **(periodic or {"save_strategy": "no"})
            ),
            model=model,
            optimizer=optimizer,
        )
        self._folder = folder
        self._optimizer = optimizer
        self.run = self._scope.__enter__()

    def close(self) -> None:
        over = _Over()
        self._scope.__exit__(_Over, over, None)

    def _settle(self) -> None:
        """Until what lastcall does on the side is done: preparing space and memory after the first step,
        pruning after a periodic save. Training goes on meanwhile in a real run; here it would be in the time
        of the next method."""
        for thread in threading.enumerate():
            if thread.name in ("lastcall-space", "lastcall-periodic"):
                thread.join()


class Saver(_Session):
    """Saves when told to."""

    def __init__(self, folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        super().__init__(folder, model, optimizer)
        self._one_step()
        self._settle()

    def save(self) -> float:
        """Seconds from the boundary to the commit."""
        self._one_step()
        start = time.perf_counter()
        self.run.save()
        seconds = time.perf_counter() - start
        self._settle()
        return seconds

    def _one_step(self) -> None:
        """A whole step, so that save() stands at a boundary. Without gradients the optimizer changes
        nothing."""
        for _ in self.run.steps(self.run.step + 1):
            self._optimizer.step()


class Periodic(_Session):
    """Saves in the background at every boundary."""

    def __init__(self, folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        super().__init__(folder, model, optimizer, save_strategy="steps", save_steps=1)

    def stall(self) -> float:
        """Seconds that a boundary with a save keeps training from its next optimizer step. The step is in it,
        since a saver could return at once and hold the mutation back instead; without gradients it costs
        microseconds."""
        start = time.perf_counter()
        self.run.tick()
        self._optimizer.step()
        return time.perf_counter() - start

    def wait(self) -> None:
        """Until the save that `stall` began is committed."""
        self._settle()
        record = self._folder / f"checkpoint-{self.run.step}" / "lastcall.json"
        deadline = time.monotonic() + _WAIT_S
        while not record.exists():
            if time.monotonic() > deadline:
                raise TimeoutError(f"no {record} after {_WAIT_S:.0f} s: the background save did not commit")
            time.sleep(0.002)


class Steps(_Session):
    """The plain training loop, for the cost of a step."""

    def iterate(self) -> Iterator[int]:
        """Begun, and past what is prepared once after the first step."""
        passes = iter(self.run.steps(10**12))
        for _ in range(3):
            next(passes)
        self._settle()
        return passes


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
    """Leave two committed checkpoints of this state behind, as a run that has been going for a while has
    them. (A single one is checked as a whole before a live tensor is touched, since there would be no other
    to fall back on: that reads it twice.)"""
    saver = Saver(folder, model, optimizer)
    try:
        saver.save()
        saver.save()
    finally:
        saver.close()
