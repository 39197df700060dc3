"""Where the tensors of a capture are put while the document is made: unique names in groups, no memory
twice."""

from __future__ import annotations

import dataclasses
import re
from dataclasses import dataclass, field

import numpy as np
import torch

from lastcall import types
from lastcall.adapters.torch.distributed import placement
from lastcall.adapters.torch.tensors import arrays, dtypes, tensors
from lastcall.formats import tree

_SEPARATORS = re.compile(r"[^\w\-/:+]+")

Place = tuple[str, str]  # group, name in it


def place_of(path: str, whole: str = "value") -> Place:
    """The group and the name of a leaf: `extra['ema'][0]` is `ema.0` in `extra`. Not unique yet: see
    Shelf.put().

    `whole` is the name of what is a whole top-level value itself."""
    group = re.split(r"\W", path, maxsplit=1)[0]
    rest = path[len(group) :].replace(".state_dict()", "")
    return group, _SEPARATORS.sub(".", rest).strip(".") or whole


@dataclass
class Shelf:
    """Tensors put here get a place in a group; the same memory is given the same place again."""

    places: dict[tuple[object, ...], Place] = field(default_factory=dict)
    entries: dict[str, dict[str, types.TensorEntry]] = field(default_factory=dict)

    def child(self) -> Shelf:
        """A shelf that starts with what is on this one and leaves this one as it is."""
        return Shelf(self.places.copy(), {group: entries.copy() for group, entries in self.entries.items()})

    def put(
        self,
        tensor: torch.Tensor,
        place: Place,
        keep: object = None,
        holders: placement.Holders | None = None,
    ) -> dict[str, object]:
        """The reference that stands in the document for a tensor. It is to be checked (tensors.check) before.
        Of a DTensor, this rank's piece is put here. `holders`: the ranks that have the same tensor, where it
        is not a DTensor, which says so itself."""
        full, sharded = tuple(tensor.shape), placement.is_dtensor(tensor)
        mine = tensors.dense(placement.local(tensor))
        shape = tuple(mine.shape)
        device = str(mine.device)
        key: tuple[object, ...] = (device, mine.data_ptr(), mine.dtype, shape, mine.stride())
        if sharded and not mine.numel():
            # Tied parameters must have one name on the ranks whose piece is empty, too: known by their
            # storage, which the source keeps.
            key = ("empty", mine.untyped_storage()._cdata, mine.dtype, full)
        known = self.places.get(key) if mine.numel() or sharded else None  # other empty tensors all lie at 0
        if known is None:
            known = self.places[key] = self._shelve(tensor, mine, place, keep, holders)
        ref: dict[str, object] = {
            tree.TAG: "tensor",
            "g": known[0],
            "n": known[1],
            "dtype": dtypes.name_of(mine.dtype),
            "shape": list(full),
            "device": device,
            "kind": "torch",
        }
        if sharded:
            ref["dtensor"] = True
        elif shape != full:
            ref["dense"] = list(shape)
        return ref

    def _shelve(
        self,
        tensor: torch.Tensor,
        mine: torch.Tensor,
        place: Place,
        keep: object,
        holders: placement.Holders | None,
    ) -> Place:
        code, stored = dtypes.stored_as(mine.dtype, tuple(mine.shape))
        share = None
        if placement.is_dtensor(tensor):
            share = stored_share(tensor, stored)
            place = (place[0], place[1] + placement.mark_of(tensor))
        elif holders is not None:
            share = types.Share(stored, (0,) * len(stored), holders)
            place = (place[0], place[1] + placement.mark(holders))
        return self._add(place, code, stored, tensors.source(mine, keep), share)

    def put_array(self, array: arrays.Array, place: Place) -> dict[str, object]:
        code, stored = dtypes.numpy_stored_as(array.dtype, array.shape)
        key = ("numpy", array.__array_interface__["data"][0], array.dtype, array.shape, array.strides)
        known = self.places.get(key) if array.size else None
        if known is None:
            known = self._add(place, code, stored, arrays.of(array))
            self.places[key] = known
        return {
            tree.TAG: "tensor",
            "g": known[0],
            "n": known[1],
            "dtype": tree.encode(dtypes.numpy_descr(array.dtype), "dtype", tree.refuse),
            "shape": list(array.shape),
            "device": "cpu",
            "kind": "numpy",
        }

    def replace(self, place: Place, source: types.Source) -> None:
        """Read a tensor from elsewhere: from the copy that was made of it."""
        entries = self.entries[place[0]]
        entries[place[1]] = dataclasses.replace(entries[place[1]], source=source)

    def _add(
        self,
        place: Place,
        code: str,
        shape: tuple[int, ...],
        source: types.Source,
        share: types.Share | None = None,
    ) -> Place:
        group, name = place
        entries = self.entries.setdefault(group, {})
        unique, count = name, 1
        while unique in entries or unique == "__metadata__":  # safetensors keeps that name for itself
            count += 1
            unique = f"{name}#{count}"
        entries[unique] = types.TensorEntry(unique, code, shape, source, share)
        return group, unique


def stored_share(tensor: torch.Tensor, stored: tuple[int, ...]) -> types.Share:
    """The share of a DTensor whose piece has the shape `stored` in the file: a dtype that safetensors lacks
    adds a dimension."""
    assert placement.is_dtensor(tensor)
    share = placement.share_of(tensor)
    added = stored[len(share.whole) :]
    if not added:
        return share
    return types.Share((*share.whole, *added), (*share.offset, *(0 for _ in added)), share.holders)


def scalar(value: np.generic) -> dict[str, object]:
    """A numpy scalar, kept in the document itself."""
    descr = tree.encode(dtypes.numpy_descr(value.dtype), "dtype", tree.refuse)
    return {tree.TAG: "numpy", "dtype": descr, "hex": value.tobytes().hex()}
