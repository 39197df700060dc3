"""The gate on every optimizer of the process, through torch's global step hooks, and what the steps tell about gradients.

At a boundary gradients are usually spent: the optimizer has used them and the next pass clears them. They belong to the state only
when they wait for their optimizer: in the middle of an accumulation, or in loops that step first and run backward afterwards.
The first kind shows in the pass (no optimizer stepped). The second is learned from the first passes, so that later ones pay nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from lastcall.adapters.torch import cuda, placement
from lastcall.core.gate import Gate

_LESSONS = 64  # passes after which the shape of the loop is known
_SAMPLES = 3  # parameters looked at


class StepHooks:
    """Installed while a session runs."""

    def __init__(self, gate: Gate, device: bool, optimizers: Sequence[torch.optim.Optimizer] = ()) -> None:
        self._gate = gate
        self._optimizers = optimizers
        self._stepped: set[int] = set()
        self._device = device  # some state lives on a GPU: mark on its stream where a step ends
        self._handles: list[Any] = []
        self._lessons = _LESSONS
        self._seen: list[tuple[torch.Tensor, torch.Tensor | None, int]] = []
        self.waits_after_step = False  # backward runs after the step: gradients always belong to the state

    def install(self) -> None:
        gate = self._gate

        def before(_optimizer: object, _args: object, _kwargs: object) -> None:
            gate.begun += 1  # Gate.enter, inlined: this runs at every step
            if gate.closed:
                gate.begun -= 1
                gate.enter()

        self._handles = [register_optimizer_step_pre_hook(before), register_optimizer_step_post_hook(self._learning)]

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []
        self._seen = []

    def _learning(self, optimizer: torch.optim.Optimizer, _args: object, _kwargs: object) -> None:
        """The post-hook of the first passes."""
        if self._device:
            cuda.fence()
        self._gate.leave()
        self._stepped.add(id(optimizer))
        params = [param for group in optimizer.param_groups for param in group["params"]]
        self._seen = [(p, p.grad, p.grad._version if p.grad is not None else 0) for p in params[:: max(1, len(params) // _SAMPLES)]]

    def end_of_pass(self) -> None:
        """Called at the boundaries of the first passes (while `learning`)."""
        for param, grad, version in self._seen:
            now = param.grad
            if now is not None and (now is not grad or now._version != version) and bool(placement.local(now).any()):
                self.waits_after_step = True
        for optimizer in self._optimizers:  # one that steps rarely, beside one that steps in every pass
            if self._stepped and id(optimizer) not in self._stepped and _has_gradients(optimizer):
                self.waits_after_step = True
        self._seen, self._stepped = [], set()
        self._lessons -= 1
        if self._lessons <= 0 or self.waits_after_step:
            self._graduate()

    @property
    def learning(self) -> bool:
        return self._lessons > 0

    def _graduate(self) -> None:
        self._lessons = 0
        gate = self._gate

        def after(_optimizer: object, _args: object, _kwargs: object) -> None:
            gate.steps += 1  # Gate.leave, inlined

        def after_on_device(_optimizer: object, _args: object, _kwargs: object) -> None:
            cuda.fence()
            gate.leave()

        self._handles[1].remove()
        self._handles[1] = register_optimizer_step_post_hook(after_on_device if self._device else after)


def _has_gradients(optimizer: torch.optim.Optimizer) -> bool:
    return any(p.grad is not None and bool(placement.local(p.grad).any()) for group in optimizer.param_groups for p in group["params"])


class Counter:
    """Counts optimizer steps, for as long as it is there."""

    def __init__(self) -> None:
        self.steps = 0
        self._handle = register_optimizer_step_post_hook(self._count)

    def _count(self, _optimizer: object, _args: object, _kwargs: object) -> None:
        self.steps += 1

    def remove(self) -> None:
        self._handle.remove()


def updates_in_backward(tensors: Iterable[torch.Tensor]) -> bool:
    """Whether an optimizer may be stepping from inside backward(), where no gate can see a whole step."""
    return any(getattr(tensor, "_post_accumulate_grad_hooks", None) for tensor in tensors)
