"""Page-locked buffers where the state lives on a GPU: copies from the device run at 55 GB/s into them, at 1
into plain memory."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable

import torch

from lastcall import memory

log = logging.getLogger("lastcall")


class PinnedBuffer:
    """Page-locked host memory; page-aligned, as O_DIRECT needs it. Allocating it is slow (2 GB/s): ahead of
    time only."""

    def __init__(self, nbytes: int) -> None:
        # One page more than asked for: torch's caching host allocator does not promise alignment.
        self._tensor = torch.empty(nbytes + memory.ALIGNMENT, dtype=torch.uint8, pin_memory=True)
        skip = -self._tensor.data_ptr() % memory.ALIGNMENT
        self.address = self._tensor.data_ptr() + skip
        self.view = memoryview(self._tensor.numpy().data)[skip : skip + nbytes]


def allocator(tensors: Iterable[torch.Tensor]) -> Callable[[int], memory.Buffer]:
    """How the buffers for this state are made."""
    return PinnedBuffer if any(tensor.is_cuda for tensor in tensors) else memory.PageBuffer
