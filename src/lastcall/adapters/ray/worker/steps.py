"""The steps of the training thread: counted from the first one on, and held where the ranks have to agree.

Blocking a rank until all the others are there would deadlock: it waits at step n while another, whose notice
has not come yet, sits in the all-reduce of step n+1. So a side thread publishes how many steps were entered,
from then on the training thread stops at its next one, and the step to save is one more than the highest
count: a rank below it trains on to it.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

_CHECKPOINTING = "torch.distributed.checkpoint"
_NEAR = 12  # frames: torch's own wrappers around step(), and those of a scheduler


class Boundary:
    """`arrived(frame)` in the training thread at the first step, and at every step from `hold()` on.
    `before(frame)`, if it is set, just before the first optimizer of a pass steps: everything of the pass
    before it (schedulers, scalers, counters) is complete."""

    def __init__(self, arrived: Callable[[FrameType], None]) -> None:
        self.steps = 0
        self.before: Callable[[FrameType], None] | None = None
        self.curious = True  # call `arrived` at the next step too: the training loop was not found yet
        self._arrived = arrived
        self._holding = False
        self._open = threading.Event()
        self._open.set()
        self._first: int | None = None  # the optimizer that steps first in a pass
        self._handles: list[Any] = []

    @property
    def installed(self) -> bool:
        return bool(self._handles)

    @property
    def optimizers(self) -> bool:
        """Whether any has stepped."""
        return self._first is not None

    def install(self) -> None:
        """Imports torch."""
        from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

        self._handles = [
            register_optimizer_step_pre_hook(self._enter),
            register_optimizer_step_post_hook(self._leave),
        ]

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []
        self._open.set()

    def hold(self) -> int:
        """Side thread: the training thread stops at its next step until release(). Returns the steps entered
        so far."""
        self._open.clear()
        self._holding = True  # before the count is read: a step that it misses is one that stops
        return self.steps

    def release(self) -> None:
        self._open.set()

    def passed(self, frame: FrameType) -> None:
        """A step of a loop without an optimizer: a report."""
        self.steps += 1
        if self._holding or self.curious:
            self.curious = False
            self._stop(frame)

    def _enter(self, optimizer: object, _args: object, _kwargs: object) -> None:
        if (
            self.before is not None
            and id(optimizer) == self._first
            and not _of_torch(frame := sys._getframe(1))
        ):
            self.before(frame)

    def _leave(self, optimizer: object, _args: object, _kwargs: object) -> None:
        self.steps += 1  # whatever it is: all ranks count alike
        if (self._holding or self.curious) and not _of_torch(frame := sys._getframe(1)):
            self._first = self._first or id(optimizer)
            self.curious = False
            self._stop(frame)

    def _stop(self, frame: FrameType) -> None:
        self._open.wait()
        self._arrived(frame)


def _of_torch(frame: FrameType | None) -> bool:
    """Whether this is no step of the training: torch.distributed.checkpoint steps an optimizer once, without
    gradients, so that it makes the state that is about to be loaded into it."""
    for _ in range(_NEAR):
        if frame is None:
            return False
        if str(frame.f_globals.get("__name__", "")).startswith(_CHECKPOINTING):
            return True
        frame = frame.f_back
    return False
