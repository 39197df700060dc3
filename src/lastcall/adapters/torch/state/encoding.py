"""Live (or copied) state into the document, its tensors onto a shelf."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from lastcall import errors, types
from lastcall.adapters.torch.distributed import placement
from lastcall.adapters.torch.state import copies, parts
from lastcall.adapters.torch.tensors import arrays, nodes, tensors
from lastcall.adapters.torch.tensors.table import Place, Shelf, place_of, scalar
from lastcall.formats import tree


class Stale(Exception):
    """A copy does not have the form any more that was cached of its original: encode it without the cache."""


class Encoder:
    """Makes one document. `cached` are fragments, by the id of the object, whose tensors are on the shelf
    already."""

    def __init__(
        self,
        known: parts.PartLookup,
        shelf: Shelf,
        owned: frozenset[int],
        cached: dict[int, Any],
        replicas: placement.Replicas | None = None,
        unsaved: dict[str, str] | None = None,
    ) -> None:
        """`unsaved`: takes what cannot be saved, by its path, and why; without it, that is a StateError."""
        self.known = known
        self.unsaved = unsaved
        self.shelf = shelf
        self.owned = owned  # ids of the parameters that a given optimizer steps
        self.cached = cached
        self.replicas = placement.Replicas() if replicas is None else replicas
        self.seen: dict[int, tuple[parts.Part, str]] = {}
        self.ranks: dict[str, int] = {}
        self.parameters: Callable[[], dict[str, torch.Tensor]] = dict  # all of the state, by name
        self.checking = False  # nothing will be saved: it is looked whether it could be
        self._rank = 1

    def value(self, value: object, path: str) -> object:
        return tree.encode(value, path, self.foreign)

    def whole(self, value: object, path: str) -> object:
        """A value of protect(), whatever has become of it: what cannot be saved is left out, and noted."""
        try:
            return self.value(value, path)
        except errors.StateError as error:
            return self._left_out(value, path, error)

    def _left_out(self, value: object, path: str, error: Exception) -> object:
        part = value.part if type(value) is parts.Held else None
        heavy = isinstance(value if part is None else part.value, torch.nn.Module | torch.optim.Optimizer)
        if self.unsaved is None or heavy:  # a checkpoint without its weights is none
            raise error
        self.unsaved.setdefault(path, str(error))
        return {tree.TAG: nodes.UNSAVED_TAG}

    def foreign(self, value: Any, path: str) -> object:
        """What tree.encode() does not know."""
        try:
            return self._foreign(value, path)
        except errors.StateError as error:
            return self._left_out(value, path, error)

    def _foreign(self, value: Any, path: str) -> object:
        if type(value) is copies.Failed:
            raise errors.StateError(f"{path}: {value.because}")
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
        self,
        tensor: torch.Tensor,
        place: Place,
        keep: object = None,
        holders: placement.Holders | None = None,
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
        except Exception as error:  # state_dict() is anybody's code
            if (
                isinstance(error, errors.LastcallError)
                or self.unsaved is None
                or part.tag != "object"
                or copies.is_passing(error)
            ):
                raise
            raise errors.StateError(f"{path}: {copies.failure(part.value, error)}") from error
        finally:
            self._rank = outer
