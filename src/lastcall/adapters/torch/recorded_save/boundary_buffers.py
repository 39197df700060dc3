"""Buffers that a forward changes (BatchNorm's) as they were at the boundary: a rescue has them written in
place of the live ones, wherever a framework's own save writes those."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import NamedTuple

import torch

from lastcall import types
from lastcall.adapters.torch.distributed import placement
from lastcall.adapters.torch.tensors import tensors


class CopiedBuffer(NamedTuple):
    live: torch.Tensor
    copy: torch.Tensor
    owner: object  # keeps the copy's memory


class BoundaryBuffers:
    def __init__(self, buffers: Iterable[CopiedBuffer] = ()) -> None:
        self._known = {one.live.data_ptr(): one for one in buffers if not placement.is_dtensor(one.live)}
        self._missed = dict(self._known)  # not written by us: the framework has copied it, or not wanted it

    def source(self, address: int, nbytes: int) -> types.Source | None:
        """What is written instead of these live bytes, if they are those of a buffer."""
        found = self._known.get(address)
        if found is None or found.live.nbytes != nbytes or not found.live.is_contiguous():
            return None
        self._missed.pop(address, None)
        return tensors.source(found.copy, found.owner)

    def _moved(self) -> bool:
        return any(not torch.equal(one.live, one.copy) for one in self._missed.values())

    def judged(self, capture: types.Capture) -> types.Capture:
        """Not exact if a buffer was written as it is now, and has changed since the boundary."""
        if not self._missed or not capture.exact:
            return capture
        if self._moved():
            because = "buffers of the model have changed since the last boundary, and were saved as they are"
            return dataclasses.replace(capture, exact=False, because=because)
        still = capture.still
        return dataclasses.replace(capture, still=lambda: still() and not self._moved())
