"""What was given to protect(): others save it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from lastcall.adapters.torch.distributed import placement


class Handed:
    """Says of an object, or of the address of a tensor's memory, whether it belongs to what was handed
    over."""

    def __init__(self, state: Mapping[str, object]) -> None:
        self._ids: set[int] = set()
        self._memory: set[int] = set()
        self._kept: list[object] = []  # their ids stay theirs
        self._add(state, 0)

    def __call__(self, value: object) -> bool:
        return value in self._memory if type(value) is int else id(value) in self._ids

    def _add(self, value: Any, depth: int) -> None:
        if isinstance(value, int | float | str | bytes | type(None)) or depth > 20 or id(value) in self._ids:
            return
        self._ids.add(id(value))
        self._kept.append(value)
        if isinstance(value, torch.nn.Module):
            for module in value.modules():
                self._ids.add(id(module))
                for name, buffer in module._buffers.items():
                    if buffer is not None and name not in module._non_persistent_buffers_set:
                        self._tensor(buffer)
            for parameter in value.parameters():
                self._tensor(parameter)
        elif isinstance(value, torch.optim.Optimizer):
            for group in value.param_groups:
                self._ids.update((id(group), id(group["params"])))
                for parameter in group["params"]:
                    self._tensor(parameter)
        elif isinstance(value, torch.Tensor):
            self._tensor(value)
        elif isinstance(value, Mapping):
            for item in value.values():
                self._add(item, depth + 1)
        elif isinstance(value, list | tuple | set | frozenset):
            for item in value:
                self._add(item, depth + 1)

    def _tensor(self, tensor: torch.Tensor) -> None:
        self._ids.add(id(tensor))
        self._kept.append(tensor)
        local = placement.local(tensor)
        if local.layout is torch.strided and local.numel():
            self._memory.add(local.untyped_storage().data_ptr())
