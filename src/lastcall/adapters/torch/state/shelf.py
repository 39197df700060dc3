"""Where the tensors of a capture are put while the document is made: unique names in groups, no memory twice."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

import numpy as np
import torch

from lastcall import types
from lastcall.adapters.torch.state import arrays, dtypes, tensors
from lastcall.formats import tree

_SEPARATORS = re.compile(r"[^\w\-/:+]+")

Place = tuple[str, str]  # group, name in it


def place_of(path: str, whole: str = "value") -> Place:
    """The group and the name of a leaf: `extra['ema'][0]` is `ema.0` in `extra`. Not unique yet: see Shelf.put().

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

    def put(self, tensor: torch.Tensor, place: Place, keep: object = None) -> dict[str, object]:
        """The reference that stands in the document for a tensor. It is to be checked (tensors.check) before."""
        full = tuple(tensor.shape)
        tensor = tensors.dense(tensor)
        shape = tuple(tensor.shape)
        code, stored = dtypes.stored_as(tensor.dtype, shape)
        device = str(tensor.device)
        key = (device, tensor.data_ptr(), tensor.dtype, shape, tensor.stride())
        known = self.places.get(key) if tensor.numel() else None  # empty tensors all lie at 0
        if known is None:
            known = self._add(place, code, stored, tensors.source(tensor, keep))
            self.places[key] = known
        ref: dict[str, object] = {
            tree.TAG: "tensor",
            "g": known[0],
            "n": known[1],
            "dtype": dtypes.name_of(tensor.dtype),
            "shape": list(full),
            "device": device,
            "kind": "torch",
        }
        if shape != full:
            ref["dense"] = list(shape)
        return ref

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
        entry = self.entries[place[0]][place[1]]
        self.entries[place[0]][place[1]] = types.TensorEntry(entry.name, entry.dtype, entry.shape, source)

    def _add(self, place: Place, code: str, shape: tuple[int, ...], source: types.Source) -> Place:
        group, name = place
        entries = self.entries.setdefault(group, {})
        unique, count = name, 1
        while unique in entries or unique == "__metadata__":  # safetensors keeps that name for itself
            count += 1
            unique = f"{name}#{count}"
        entries[unique] = types.TensorEntry(unique, code, shape, source)
        return group, unique


def scalar(value: np.generic) -> dict[str, object]:
    """A numpy scalar, kept in the document itself."""
    descr = tree.encode(dtypes.numpy_descr(value.dtype), "dtype", tree.refuse)
    return {tree.TAG: "numpy", "dtype": descr, "hex": value.tobytes().hex()}
