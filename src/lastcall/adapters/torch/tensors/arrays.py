"""numpy arrays as sources and targets of bytes, in C order, without a copy of the whole."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np

from lastcall import errors, memory
from lastcall.adapters.torch.tensors import strided

Array = np.ndarray[Any, Any]


class StridedArray:
    """An array that is not in C order, both a Source and a Target."""

    __slots__ = ("_walk", "nbytes", "owner")

    def __init__(self, array: Array, owner: object) -> None:
        self._walk = strided.Strided(array, array.dtype.itemsize)
        self.nbytes = self._walk.nbytes
        self.owner = owner

    def read_into(self, address: int, offset: int, nbytes: int) -> None:
        self._walk.each(address, offset, nbytes, _gather)

    def write_from(self, address: int, offset: int, nbytes: int) -> None:
        self._walk.each(address, offset, nbytes, _scatter)


def _gather(view: Array, skip: int, nbytes: int, address: int) -> None:
    packed = np.array(view, order="C", copy=True)
    ctypes.memmove(address, packed.ctypes.data + skip, nbytes)


def _scatter(view: Array, skip: int, nbytes: int, address: int) -> None:
    packed = np.array(view, order="C", copy=True)  # a partly written element keeps its other bytes
    ctypes.memmove(packed.ctypes.data + skip, address, nbytes)
    view[...] = packed


def of(array: Array, keep: object = None) -> memory.HostMemory | StridedArray:
    """The bytes of an array. `keep` is held as long as the result is."""
    if array.flags.c_contiguous:
        return memory.HostMemory(array.__array_interface__["data"][0], array.nbytes, (array, keep))
    return StridedArray(array, (array, keep))


def check(array: Array, path: str) -> None:
    """Refuse arrays whose bytes are not the whole of them."""
    if array.dtype.hasobject:
        raise errors.StateError(
            f"{path}: a numpy array of Python objects cannot be saved. Save array.tolist(), or give it a "
            "number dtype."
        )
    if type(array) not in (np.ndarray, np.memmap):
        raise errors.StateError(
            f"{path}: a {type(array).__name__} (a subclass of numpy.ndarray) cannot be saved: it may hold "
            "more than "
            "its numbers. Save numpy.asarray(value), and its mask if it has one."
        )
