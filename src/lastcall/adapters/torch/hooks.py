"""The gate on every optimizer of the process, through torch's global step hooks, and what the steps tell
about gradients.

At a boundary gradients are usually spent: the optimizer has used them and the next pass clears them. They
belong to the state only when they wait for their optimizer: in the middle of an accumulation, or in loops
that step first and run backward afterwards. The first kind shows in the pass (no optimizer stepped). The
second is learned from the first passes, so that later ones pay nothing.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from lastcall.adapters.torch.distributed import placement
from lastcall.adapters.torch.tensors import cuda
from lastcall.core.sync.gate import Gate

_LESSONS = 64  # passes after which the shape of the loop is known
_SAMPLES = 3  # parameters looked at
_BY_HAND = 8  # ... where no optimizer tells that they were changed


class StepHooks:
    """Installed while a session runs. `on_step` hears of the steps of the first passes; `on_new` of an
    optimizer that begins later."""

    def __init__(
        self,
        gate: Gate,
        device: bool,
        optimizers: Sequence[torch.optim.Optimizer] = (),
        on_step: Callable[[torch.optim.Optimizer], None] = lambda _: None,
        on_new: Callable[[], None] = lambda: None,
    ) -> None:
        self._gate = gate
        self._optimizers = optimizers
        self._on_step = on_step
        self._on_new = on_new
        self._device = device  # some state lives on a GPU: mark on its stream where a step ends
        self._handles: list[Any] = []
        self._lessons = _LESSONS
        # by optimizer, as it left its gradients
        self._seen: dict[int, list[tuple[torch.Tensor, torch.Tensor | None, int]]] = {}
        # that have stepped while the passes were looked at
        self._known: dict[int, weakref.ref[torch.optim.Optimizer]] = {}
        self.waits_after_step = False  # backward runs after the step: gradients always belong to the state

    def install(self) -> None:
        gate = self._gate

        def before(_optimizer: object, _args: object, _kwargs: object) -> None:
            gate.begun += 1  # Gate.enter, inlined: this runs at every step
            if gate.closed:
                gate.begun -= 1
                gate.enter()

        self._handles = [
            register_optimizer_step_pre_hook(before),
            register_optimizer_step_post_hook(self._learning),
        ]

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []
        self._seen = {}

    def _learning(self, optimizer: torch.optim.Optimizer, _args: object, _kwargs: object) -> None:
        """The post-hook of the first passes."""
        if self._device:
            cuda.fence()
        self._gate.leave()
        key = id(optimizer)
        if key not in self._known:
            self._known[key] = weakref.ref(optimizer, lambda _: self._known.pop(key, None))
        self._on_step(optimizer)
        params = [param for group in optimizer.param_groups for param in group["params"]]
        self._seen[key] = [
            (p, p.grad, p.grad._version if p.grad is not None else 0)
            for p in params[:: max(1, len(params) // _SAMPLES)]
        ]

    def end_of_pass(self) -> None:
        """Called at the boundaries of the first passes (while `learning`)."""
        for param, grad, version in [seen for each in self._seen.values() for seen in each]:
            now = param.grad
            if (
                now is not None
                and (now is not grad or now._version != version)
                and bool(placement.local(now).any())
            ):
                self.waits_after_step = True
        for optimizer in self._optimizers:  # one that steps rarely, beside one that steps in every pass
            if self._seen and id(optimizer) not in self._seen and _has_gradients(optimizer):
                self.waits_after_step = True
        self._seen = {}
        self._lessons -= 1
        if self._lessons <= 0:
            self._graduate()

    @property
    def learning(self) -> bool:
        return self._lessons > 0

    def _graduate(self) -> None:
        gate, known, device = self._gate, self._known, self._device

        def after(optimizer: torch.optim.Optimizer, args: object, kwargs: object) -> None:
            if id(optimizer) not in known:
                self._learn_again(optimizer, args, kwargs)
            elif device:
                cuda.fence()
                gate.leave()
            else:
                gate.steps += 1  # Gate.leave, inlined

        self._handles[1].remove()
        self._handles[1] = register_optimizer_step_post_hook(after)

    def _learn_again(self, optimizer: torch.optim.Optimizer, args: object, kwargs: object) -> None:
        """Another optimizer begins, after the others were known: the loop has another shape now."""
        self._lessons = _LESSONS
        self._handles[1].remove()
        self._handles[1] = register_optimizer_step_post_hook(self._learning)
        self._learning(optimizer, args, kwargs)
        self._on_new()


def _has_gradients(optimizer: torch.optim.Optimizer) -> bool:
    return any(
        p.grad is not None and bool(placement.local(p.grad).any())
        for group in optimizer.param_groups
        for p in group["params"]
    )


class ByHand:
    """Sees whether parameters were changed, in a loop without a torch optimizer: some of them, by their
    version and their first values (`p.data -= ...` does not count as a version)."""

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        trained = [
            tensor
            for tensor in tensors
            if tensor.requires_grad and tensor.is_leaf and tensor.layout is torch.strided
        ]
        self._tensors = trained[:: max(1, len(trained) // _BY_HAND)][:_BY_HAND]
        self._versions, self._values = self._read()

    def changed(self) -> bool:
        """Since it was asked last."""
        before = self._versions, self._values
        self._versions, self._values = self._read()
        return before != (self._versions, self._values)

    def seen(self) -> object:
        """Something to compare with later."""
        return self._read()

    def _read(self) -> tuple[list[int], list[list[float]]]:
        few = [
            placement.local(tensor.detach()).reshape(-1)[:_SAMPLES].tolist() for tensor in self._tensors[:2]
        ]
        return [tensor._version for tensor in self._tensors], few


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
