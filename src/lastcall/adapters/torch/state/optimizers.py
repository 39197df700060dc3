"""torch.optim.Optimizer: its state by parameter index, its groups without the parameters.

State changes inside step() only, numbers as well as tensors, and a save never runs inside step(): so all of
it is read live and belongs together. The groups (learning rates) change at any time and are copied at
boundaries.
"""

from __future__ import annotations

from typing import Any

import torch

from lastcall.adapters.torch.distributed import placement
from lastcall.adapters.torch.state import copies, fitting
from lastcall.adapters.torch.state.parts import Encoding, Restoration
from lastcall.adapters.torch.tensors import tensors
from lastcall.adapters.torch.tensors.table import place_of
from lastcall.formats import tree

_IMMUTABLE = frozenset({type(None), bool, int, float, str, complex})


def is_plain(optimizer: torch.optim.Optimizer) -> bool:
    """Whether its state_dict() is torch's own. Others (wrappers, sharded ones) are asked through
    state_dict()."""
    kind = type(optimizer)
    return (
        kind.state_dict is torch.optim.Optimizer.state_dict
        and not optimizer._optimizer_state_dict_pre_hooks
        and not optimizer._optimizer_state_dict_post_hooks
    )


class OptimizerPart:
    """Looks after one optimizer."""

    tag = "optimizer"
    rank = 2

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.value = optimizer
        self._groups = len(optimizer.param_groups)  # those that the script makes before protect()
        self._watch: Watch | None = None

    def parameters(self) -> list[torch.Tensor]:
        return [parameter for group in self.value.param_groups for parameter in group["params"]]

    def copy(self) -> list[dict[str, Any]]:
        groups = []
        for group in self.value.param_groups:
            copied = group.copy()
            del copied["params"]
            for key, value in copied.items():
                if type(value) not in _IMMUTABLE:
                    copied[key] = _copy(value)
            groups.append(copied)
        return groups

    def encode(self, encoder: Encoding, path: str, copied: object) -> dict[str, object]:
        groups = copied if isinstance(copied, list) else self.copy()
        rows = encoder.cached.get(id(self.value))
        if rows is None:
            rows = self._rows(encoder, path)
        document = {
            tree.TAG: self.tag,
            "class": type(self.value).__qualname__,
            "sizes": [len(group["params"]) for group in self.value.param_groups],
            "groups": encoder.value(groups, f"{path}.param_groups"),
            "state": rows,
        }
        # by add_param_group(), inside the loop: which parameters are they?
        if added := self.value.param_groups[self._groups :]:
            names = {id(parameter): name for name, parameter in encoder.parameters().items()}
            document["added"] = [
                [names.get(id(parameter)) for parameter in group["params"]] for group in added
            ]
        return document

    def fragment(self, encoder: Encoding, path: str) -> list[object] | None:
        """What may be cached: the state, if it is made of nothing but tensors."""
        self._watch = Watch(self.value)
        return self._rows(encoder, path) if self._watch.only_tensors else None

    def holds(self) -> bool:
        return self._watch is not None and self._watch.holds()

    def _rows(self, encoder: Encoding, path: str) -> list[object]:
        group, prefix = place_of(path, whole="")
        prefix = f"{prefix}." if prefix else ""
        state: Any = self.value.state
        rows: list[object] = []
        for index, parameter in enumerate(self.parameters()):
            kept = state.get(parameter)
            if kept:
                same = encoder.replicas.of(parameter)
                row = []
                for key, value in kept.items():
                    where = f"{path}.state[{index}][{key!r}]"
                    if isinstance(value, torch.Tensor):
                        tensors.check(value, where)
                        # moments, not counters
                        holders = same if value.ndim and value.shape == parameter.shape else None
                        row.append(
                            [
                                key,
                                encoder.put(value, (group, f"{prefix}state.{index}.{key}"), holders=holders),
                            ]
                        )
                    else:
                        row.append([key, encoder.value(value, where)])
                rows.append([index, row])
        return rows

    def match(self, restorer: Restoration, document: dict[str, object], path: str) -> None:
        fitting.match_optimizer(self.value, self.parameters(), restorer, document, path)


def _copy(value: Any) -> Any:
    """Of a value in a group: a tensor (a learning rate of a fused optimizer), betas, or whatever a custom one
    keeps."""
    return copies.tensor(value) if type(value) is torch.Tensor else tree.copy(value, _tensor_or_itself)


def _tensor_or_itself(value: Any) -> Any:
    return copies.tensor(value) if isinstance(value, torch.Tensor) else value


class Watch:
    """Whether an optimizer still keeps the same tensors at the same addresses."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._parameters = [p for group in optimizer.param_groups for p in group["params"]]
        self._ids = [*map(id, self._parameters)]
        self._states = list(optimizer.state.values())
        self._state_ids = [*map(id, self._states)]
        self._kept = [(kept, [*map(id, kept.values())]) for kept in self._states]
        values = [value for kept in self._states for value in kept.values()]
        self.only_tensors = all(
            (type(value) is torch.Tensor or placement.is_dtensor(value)) and value.layout is torch.strided
            for value in values
        )
        pieces = [(value, placement.local(value)) for value in values] if self.only_tensors else []
        self._values = [(value, mine, mine.data_ptr(), mine.shape) for value, mine in pieces]

    def holds(self) -> bool:
        if [id(p) for group in self._optimizer.param_groups for p in group["params"]] != self._ids:
            return False
        if [*map(id, self._optimizer.state.values())] != self._state_ids:
            return False
        if any([*map(id, kept.values())] != ids for kept, ids in self._kept):
            return False
        return all(
            mine.data_ptr() == address
            and mine.shape == shape
            and (mine is value or placement.local(value) is mine)
            for value, mine, address, shape in self._values
        )
