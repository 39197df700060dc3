"""Places in the state whose bytes tell cheaply that it was changed."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch

from lastcall.adapters.torch.distributed import placement

_SAMPLES = 4
_NAMED = 2  # ... of each name that was handed over


def storages(tensors: Iterable[torch.Tensor]) -> list[object]:
    return [placement.local(tensor).untyped_storage() for tensor in tensors if tensor.layout is torch.strided]


def sample(
    named: Iterable[tuple[str, torch.Tensor]],
) -> list[tuple[torch.Tensor, Callable[[torch.Tensor], tuple[int, ...]], int]]:
    """A few large tensors, spread over the state, with the places in them whose bytes may be read cheaply.
    Some of every name: an average of the weights changes at other times than the weights, and
    `p.data.mul_(...)` leaves no other trace."""
    large: dict[str, list[torch.Tensor]] = {}
    for name, tensor in named:
        mine = placement.local(tensor)
        if mine.numel() > 1 and mine.is_contiguous() and not mine.is_cuda:
            large.setdefault(name, []).append(mine)
    most = _SAMPLES if len(large) == 1 else _NAMED
    chosen = [tensor for each in large.values() for tensor in each[:: max(1, len(each) // most)][:most]]
    return [(tensor, _places, min(64, tensor.nbytes)) for tensor in chosen]


def _places(tensor: torch.Tensor) -> tuple[int, ...]:
    """The beginning, the middle and the end: a write to some rows of an embedding is seen more often than
    not."""
    first, room = tensor.data_ptr(), tensor.nbytes - min(64, tensor.nbytes)
    return first, first + room // 2, first + room
