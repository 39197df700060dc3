"""Live (or copied) state into the document, its tensors onto a shelf."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from lastcall import types
from lastcall.adapters.torch import placement
from lastcall.adapters.torch.state import arrays, copies, parts, tensors
from lastcall.adapters.torch.state.shelf import Place, Shelf, place_of, scalar
from lastcall.formats import tree


class Stale(Exception):
    """A copy does not have the form any more that was cached of its original: encode it without the cache."""


class Encoder:
    """Makes one document. `cached` are fragments, by the id of the object, whose tensors are on the shelf already."""

    def __init__(
        self,
        known: parts.Parts,
        shelf: Shelf,
        owned: frozenset[int],
        cached: dict[int, Any],
        replicas: placement.Replicas | None = None,
    ) -> None:
        self.known = known
        self.shelf = shelf
        self.owned = owned  # ids of the parameters that a given optimizer steps
        self.cached = cached
        self.replicas = placement.Replicas() if replicas is None else replicas
        self.seen: dict[int, tuple[parts.Part, str]] = {}
        self.ranks: dict[str, int] = {}
        self._rank = 1

    def value(self, value: object, path: str) -> object:
        return tree.encode(value, path, self.foreign)

    def foreign(self, value: Any, path: str) -> object:
        """What tree.encode() does not know."""
        if type(value) is parts.Held:
            return self._part(value.part, path, value.copied)
        if type(value) is copies.Copied:
            return self._tensor(value.copy, value.original, path)
        if isinstance(value, torch.Tensor):
            return self._tensor(value, value, path)
        if isinstance(value, np.ndarray):
            arrays.check(value, path)
            return self.shelf.put_array(value, self._place(path))
        if isinstance(value, np.generic) and not value.dtype.hasobject:
            return scalar(value)
        if isinstance(value, torch.dtype | torch.device):
            return {tree.TAG: f"torch.{type(value).__name__}", "v": str(value)}
        if type(value) is torch.Size:
            return {tree.TAG: "torch.Size", "v": list(value)}
        part = self.known.of(value)
        return tree.refuse(value, path) if part is None else self._part(part, path, None)

    def put(
        self, tensor: torch.Tensor, place: Place, keep: object = None, holders: placement.Holders | None = None
    ) -> dict[str, object]:
        return self.shelf.put(tensor, place, keep, holders)

    def replace(self, place: Place, source: types.Source) -> None:
        self.shelf.replace(place, source)

    def _place(self, path: str) -> Place:
        """Where a leaf goes. Its group is wanted as much as the most wanted thing in it."""
        place = place_of(path)
        self.ranks[place[0]] = min(self.ranks.get(place[0], self._rank), self._rank)
        return place

    def _tensor(self, tensor: torch.Tensor, original: torch.Tensor, path: str) -> object:
        tensors.check(original, path)
        ref = self.shelf.put(tensor, self._place(path))
        if isinstance(original, torch.nn.Parameter):
            ref["kind"] = "parameter"
        if original.requires_grad:
            ref["grad"] = True
        return ref

    def _part(self, part: parts.Part, path: str, copied: object) -> object:
        self.seen.setdefault(id(part.value), (part, path))
        outer, self._rank = self._rank, part.rank
        try:
            self._place(path)
            return part.encode(self, path, copied)
        finally:
            self._rank = outer
