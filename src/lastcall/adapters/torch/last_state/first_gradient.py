"""Tells when the first gradient of a backward is there: the forward is over, and nothing has been sent to
other ranks yet.

One hook on one parameter, learned from the first backward. Any parameter that gets a gradient would do: no
other rank completes its step before that gradient is reduced, hence not before the hook has run. Where
parameters themselves get no gradient from autograd (FSDP2 hands it to them), a hook on the output of the
forward takes over.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

# a model whose parameters take turns is not learned for ever: every parameter is hooked while it is
_LESSONS = 8


class FirstGradient:
    """Calls `fire` in every backward. It runs inside autograd, perhaps on another thread, and must not
    raise."""

    def __init__(self, modules: Sequence[torch.nn.Module], fire: Callable[[], None]) -> None:
        self._modules = modules
        self._fire = fire
        self._handles: list[Any] = []
        self._lessons = _LESSONS
        self._ever = False
        self.fired = False  # since somebody set it back
        self._chosen: Any = None  # the parameter that was learned
        self.resting = False

    def install(self) -> None:
        parameters: dict[int, Any] = {
            id(p): p for module in self._modules for p in module.parameters() if p.requires_grad
        }
        self._handles = [p.register_hook(functools.partial(self._learned, p)) for p in parameters.values()]

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def rest(self) -> None:
        """No listener at the moment: a hook costs a short step several microseconds."""
        if self._chosen is not None and not self.resting:
            self.remove()
            self.resting = True

    def wake(self) -> None:
        if self.resting:
            self.resting = False
            self._handles = [self._chosen.register_hook(self._hooked)]

    def missed(self) -> None:
        """A step was completed, and nothing fired."""
        if self._lessons <= 0:
            return
        self._lessons -= 1
        self.remove()
        self._chosen = None
        if self._ever:
            self.install()
        else:
            self._lessons = 0
            self._handles = [module.register_forward_hook(self._forwarded) for module in self._modules]

    def _learned(self, parameter: Any, grad: torch.Tensor) -> None:
        self.remove()
        self._chosen = parameter
        self._handles = [parameter.register_hook(self._hooked)]
        self._hooked(grad)

    def _hooked(self, _grad: torch.Tensor) -> None:
        self.fired = self._ever = True
        self._fire()

    def _forwarded(self, _module: object, _inputs: object, output: object) -> None:
        for tensor in _tensors(output):
            if tensor.requires_grad:
                tensor.register_hook(self._hooked)
                return


def _tensors(output: object, depth: int = 0) -> Iterator[Any]:
    """What a forward gives, in whatever it is wrapped."""
    if isinstance(output, torch.Tensor):
        yield output
    elif depth < 3 and isinstance(output, dict):
        for item in output.values():
            yield from _tensors(item, depth + 1)
    elif depth < 3 and isinstance(output, list | tuple):
        for item in output:
            yield from _tensors(item, depth + 1)
