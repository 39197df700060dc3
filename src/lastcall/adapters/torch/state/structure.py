"""What a module is made of, found once and compared cheaply later."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from lastcall.adapters.torch.distributed import placement
from lastcall.adapters.torch.tensors import tensors

Module = torch.nn.Module


def unwrapped(module: Module) -> Module:
    """torch.compile() and DistributedDataParallel wrap a module and prefix its names; a run may be resumed
    with or without them."""
    while True:
        inner = module._modules.get("_orig_mod") if type(module).__name__ == "OptimizedModule" else None
        inner = module._modules.get("module") if isinstance(module, DistributedDataParallel) else inner
        if inner is None:
            return module
        module = inner


def saves_plainly(module: Module) -> bool:
    """Whether state_dict() would give this module's parameters and persistent buffers under their names."""
    kind = type(module)
    return (
        kind.state_dict is Module.state_dict
        and kind._save_to_state_dict is Module._save_to_state_dict
        and not module._state_dict_hooks
        and all(map(placement.own_hook, module._state_dict_pre_hooks.values()))
    )


def loads_plainly(module: Module) -> bool:
    """Whether load_state_dict() would only copy tensors. torch's norm layers look at versions, no more."""
    kind = type(module)
    own = kind._load_from_state_dict
    return (
        kind.load_state_dict is Module.load_state_dict
        and (own is Module._load_from_state_dict or own.__module__.startswith("torch.nn.modules."))
        and all(map(placement.own_hook, module._load_state_dict_pre_hooks.values()))
        and all(map(placement.own_hook, module._load_state_dict_post_hooks.values()))
    )


class Structure:
    """The tensors of a module by state_dict name, in state_dict order. Under fully_shard() these are the
    sharded ones, also while the module holds the gathered ones (see placement)."""

    def __init__(self, module: Module) -> None:
        self.module = module
        # (name, where it is kept, key)
        self.buffers: list[tuple[str, dict[str, torch.Tensor | None], str]] = []
        self.extras: list[tuple[str, Any]] = []
        self.versions: list[list[object]] = []
        self._tensors: dict[str, torch.Tensor] = {}
        self._parameters: set[str] = set()
        self._dicts: list[tuple[dict[str, Any], list[int], list[Any]]] = []
        # parameters that come and go
        self._lent: list[tuple[dict[str, Any], list[str], Any, str, torch.Tensor | None]] = []
        self.plain = self.loads_plainly = True
        parts = list(module.named_modules(remove_duplicate=False))
        self.managed = placement.managed(part for _, part in parts)
        for prefix, part in parts:
            self._add(f"{prefix}." if prefix else "", part)
        self._seen = [
            (
                tensor,
                (mine := placement.local(tensor)),
                mine.data_ptr(),
                mine.shape,
                mine.stride(),
                tensor.requires_grad,
            )
            for tensor in self._tensors.values()
            if self.plain and not torch.nn.parameter.is_lazy(tensor) and tensor.layout is torch.strided
        ]

    def _add(self, prefix: str, part: Module) -> None:
        self.plain = self.plain and saves_plainly(part)
        self.loads_plainly = self.loads_plainly and loads_plainly(part)
        lent = [key for key in part._parameters if (id(part), key) in self.managed]
        for kept in (
            (part._buffers, part._modules) if lent else (part._parameters, part._buffers, part._modules)
        ):
            values = list(kept.values())
            self._dicts.append((kept, [*map(id, values)], values))
        if part._version != 1:
            self.versions.append([prefix[:-1], part._version])
        for key, parameter in part._parameters.items():
            owner = self.managed.get((id(part), key))
            live = parameter if owner is None else owner.sharded_param
            if lent:
                self._lent.append((part._parameters, [*part._parameters], owner, key, live))
            if live is not None:
                self._tensors[prefix + key] = live
                self._parameters.add(prefix + key)
        for key, buffer in part._buffers.items():
            if buffer is not None and key not in part._non_persistent_buffers_set:
                self._tensors[prefix + key] = buffer
                self.buffers.append((prefix + key, part._buffers, key))
        if type(part).get_extra_state is not Module.get_extra_state:
            self.extras.append((prefix + "_extra_state", part))

    def holds(self) -> bool:
        """Whether the module still has these very tensors at these very places."""
        for kept, ids, _ in self._dicts:
            if [*map(id, kept.values())] != ids:
                return False
        for kept, names, owner, key, live in self._lent:
            if [*kept] != names or (kept[key] if owner is None else owner.sharded_param) is not live:
                return False
        for tensor, mine, address, shape, stride, grad in self._seen:
            if mine.data_ptr() != address or mine.shape != shape or mine.stride() != stride:
                return False
            if tensor.requires_grad is not grad or (
                mine is not tensor and placement.local(tensor) is not mine
            ):
                return False
        return True

    def parameters(self) -> dict[str, torch.Tensor]:
        return {name: self._tensors[name] for name in self._tensors if name in self._parameters}

    def extra_states(self) -> dict[str, Any]:
        return {name: part.get_extra_state() for name, part in self.extras}

    def state(self) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
        """Tensors and other values, as state_dict() would give them."""
        if self.plain:
            return self._tensors, self.extra_states()
        live = self.module.state_dict()
        found = {name: value for name, value in live.items() if isinstance(value, torch.Tensor)}
        return found, {name: value for name, value in live.items() if name not in found}

    def frozen(self, live: dict[str, torch.Tensor], owned: frozenset[int]) -> set[str]:
        """The parameters that no given optimizer steps and whose gradient is not needed."""
        still = [p for p in self.parameters().values() if not p.requires_grad and id(p) not in owned]
        if not still:
            return set()
        if self.plain:
            ids = {id(parameter) for parameter in still}
            return {name for name in self._parameters if id(live[name]) in ids}
        addresses = {tensors.address(parameter) for parameter in still}
        return {
            name for name, tensor in live.items() if tensor.numel() and tensors.address(tensor) in addresses
        }

    def replicated(
        self, live: dict[str, torch.Tensor], replicas: placement.Replicas
    ) -> dict[str, placement.Holders]:
        """The ranks that have the same parameter, by state_dict name."""
        if not replicas.holders:
            return {}
        if self.plain:
            return {name: same for name in self._parameters if (same := replicas.of(live[name])) is not None}
        known = {
            (tensors.address(parameter), parameter.shape): same
            for parameter in self.parameters().values()
            if parameter.numel() and (same := replicas.of(parameter)) is not None
        }
        where = {name: (tensors.address(tensor), tensor.shape) for name, tensor in live.items()}
        return {name: known[place] for name, place in where.items() if place in known}

    def is_parameter(self, name: str) -> bool:
        return name in self._parameters

    def aliases(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor of state_dict() is the memory of a parameter or buffer, and not a copy."""
        if self.plain:
            return True
        if not hasattr(self, "_addresses"):
            every = [*self.parameters().values(), *self.module.buffers()]
            self._addresses = {tensors.address(live) for live in every}
        return tensors.address(tensor) in self._addresses
