"""Restores the state of a script without a save of its own: each module before its first forward pass, each
optimizer before its first step. What does not fit is left as it is, and logged."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from lastcall.adapters.ray.never_raise import never_raises
from lastcall.adapters.ray.saves import state

log = logging.getLogger("lastcall")
_NOT = (
    "the script's own counts (epoch, step), schedulers, random numbers and the position in the data: they "
    "start from scratch"
)


class Restoring:
    """In the training thread, until the first optimizer has stepped. `has_own`: whether the script resumes
    from checkpoints of its own; they are older than this state, and belong to the script's own counts: the
    two must not be mixed."""

    def __init__(
        self, body: Mapping[str, Any], reason: str, has_own: Callable[[], bool] = lambda: False
    ) -> None:
        self._modules = list(body["modules"])
        self._optimizers = list(body["optimizers"])
        self._named = dict(body["named"])
        self._reason = reason
        self._has_own = has_own
        self._done: list[str] = []
        self._patience = len(self._optimizers)  # steps within which each of them steps once
        self._forward: Any = None
        self._handles: list[Any] = []

    def begin(self) -> None:
        if self._modules or self._optimizers:
            self._forward = register_module_forward_pre_hook(self._before_forward)
            self._handles = [
                register_optimizer_step_pre_hook(self._before_step),
                register_optimizer_step_post_hook(self._after_step),
            ]

    def end(self) -> None:
        """Not within a step: torch iterates over its hooks then, and none may be removed."""
        self._stop()
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def _stop(self) -> None:
        """All is done. The hook of every forward pass is removed at once; those of the steps cost next to
        nothing."""
        if self._forward is not None:
            self._forward.remove()
            self._forward = None

    def named(self, values: Mapping[str, Any]) -> None:
        """protect(): restores now what was saved under these names."""
        for name, value in values.items():
            if name in self._named:
                _restore(value, self._named.pop(name))
                self._done.append(name)
        if self._done:
            log.info("Restored what was saved after %s: %s", self._reason, ", ".join(self._done))

    def _is_the_scripts(self) -> bool:
        if self._forward is not None and not self._done and self._has_own():
            self._stop()
            log.warning(
                "The model and optimizer that were saved after %s are not restored: the script resumes from "
                "checkpoints of its own",
                self._reason,
            )
        return self._forward is None

    @never_raises
    def _before_forward(self, module: torch.nn.Module, _args: object) -> None:
        if not any(entry["class"] == state.kind(module) for entry in self._modules) or self._is_the_scripts():
            return
        live = {name: tuple(value.shape) for name, value in module.state_dict().items()}
        for entry in self._modules:
            if entry["class"] == state.kind(module) and live == {
                name: tuple(value.shape) for name, value in entry["state"].items()
            }:
                module.load_state_dict(entry["state"])
                self._modules.remove(entry)
                self._done.append(type(module).__name__)
                return

    @never_raises
    def _before_step(self, optimizer: torch.optim.Optimizer, _args: object, _kwargs: object) -> None:
        if self._forward is None or self._is_the_scripts():
            return
        shapes = state.shapes(state.parameters(optimizer))
        for entry in self._optimizers:
            if entry["class"] == state.kind(optimizer) and entry["shapes"] == shapes:
                optimizer.load_state_dict(entry["state"])
                self._optimizers.remove(entry)
                self._done.append(type(optimizer).__name__)
                return

    @never_raises
    def _after_step(self, _optimizer: object, _args: object, _kwargs: object) -> None:
        self._patience -= 1
        if self._forward is None or (self._optimizers and self._patience > 0):
            return
        self._stop()
        left = [entry["class"].rpartition(".")[2] for entry in (*self._modules, *self._optimizers)]
        if self._done:
            log.info(
                "Restored what was saved after %s: %s. Not restored: %s",
                self._reason,
                ", ".join(self._done),
                _NOT,
            )
        if left:
            log.warning(
                "Not restored, since nothing in the script has its class and its shapes: %s", ", ".join(left)
            )


def _restore(live: Any, saved: Any) -> None:
    if hasattr(live, "load_state_dict"):
        live.load_state_dict(saved)
    elif isinstance(live, dict):
        live.clear()
        live.update(saved)
    elif isinstance(live, list):
        live[:] = saved
    elif isinstance(live, torch.Tensor):
        with torch.no_grad():
            live.copy_(saved)
