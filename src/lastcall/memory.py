"""Host memory as sources and targets, and the aligned buffers that bytes pass through on their way to the
disk."""

from __future__ import annotations

import contextlib
import ctypes
import math
import mmap
from typing import Literal, Protocol

ALIGNMENT = 4096
HUGE = 2 * 1024 * 1024
_SHORT = 64  # words: longer runs are copied faster one by one
_BRIEF = 64 * 1024  # bytes that are copied faster than the interpreter's lock can be released and reacquired
_WORDS: dict[int, Literal["Q", "I", "H", "B"]] = {8: "Q", 4: "I", 2: "H", 1: "B"}


_move_at_once = ctypes.PyDLL(None).memmove  # keeps the interpreter's lock, as this does:
_move_at_once.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
_view_of = ctypes.pythonapi.PyMemoryView_FromMemory
_view_of.argtypes = (ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int)
_view_of.restype = ctypes.py_object
_WRITABLE = 0x200  # PyBUF_WRITE


def move(to: int, address: int, nbytes: int) -> None:
    """Copy bytes. Short ranges are copied without releasing the lock: sixteen writers that release it for
    each sector spend their time reacquiring it."""
    if nbytes > _BRIEF:
        ctypes.memmove(to, address, nbytes)  # other threads run meanwhile
    elif nbytes > 0:
        _move_at_once(to, address, nbytes)


class HostMemory:
    """Bytes at an address, both a Source and a Target. `owner` keeps them alive."""

    __slots__ = ("address", "nbytes", "owner")

    def __init__(self, address: int, nbytes: int, owner: object) -> None:
        self.address = address
        self.nbytes = nbytes
        self.owner = owner

    def read_into(self, address: int, offset: int, nbytes: int) -> None:
        move(address, self.address + offset, nbytes)

    def write_from(self, address: int, offset: int, nbytes: int) -> None:
        move(self.address + offset, address, nbytes)

    def write_rows(self, address: int, stride: int, offset: int, step: int, nbytes: int, count: int) -> None:
        """Copy `count` runs of `nbytes`: `stride` bytes apart from `address` on, to places `step` bytes apart
        from `offset` on."""
        copy_rows(self.address + offset, step, address, stride, nbytes, count)


class BytesSource:
    """A Source over an immutable bytes object (a header, a JSON document)."""

    __slots__ = ("data",)

    def __init__(self, data: bytes) -> None:
        self.data = data

    @property
    def nbytes(self) -> int:
        return len(self.data)

    def read_into(self, address: int, offset: int, nbytes: int) -> None:
        ctypes.memmove(address, self.data[offset : offset + nbytes], nbytes)


def view(address: int, nbytes: int) -> memoryview:
    """The bytes at an address, for Python's file calls. Their owner must outlive it. (Not through an array of
    ctypes: that makes a type for each size, which takes twenty times as long and leaves it to the garbage
    collector.)"""
    found: memoryview = _view_of(address, nbytes, _WRITABLE)
    return found


def copy_rows(to: int, step: int, address: int, stride: int, nbytes: int, count: int) -> None:
    """Copy `count` runs of `nbytes`, `stride` bytes apart at one address and `step` apart at the other. Many
    short runs are copied a column of words at a time, which a slice of a memoryview does in C: for runs of 8
    bytes a hundred times as fast."""
    word = math.gcd(step, stride, nbytes, 8)
    if nbytes // word > _SHORT or count < nbytes // word:
        for number in range(count):
            move(to + number * step, address + number * stride, nbytes)
        return
    there = view(to, (count - 1) * step + nbytes).cast(_WORDS[word])
    here = view(address, (count - 1) * stride + nbytes).cast(_WORDS[word])
    for column in range(nbytes // word):
        there[column :: step // word] = here[column :: stride // word]


def address_of(mapping: mmap.mmap) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(mapping))


class Buffer(Protocol):
    """A piece of page-aligned host memory: `view` for Python's file calls, `address` for copies."""

    @property
    def address(self) -> int: ...

    @property
    def view(self) -> memoryview: ...


class PageBuffer:
    """Page-aligned memory from mmap, in huge pages where the kernel has them (a direct write from scattered
    small ones takes up to three times as long), touched once so that no page fault occurs later. Forked
    children do not inherit it: after a fork the next use would copy it page by page."""

    def __init__(self, nbytes: int) -> None:
        self._map = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        for advice in ("MADV_HUGEPAGE", "MADV_DONTFORK"):
            with contextlib.suppress(OSError, AttributeError):  # a kernel without huge pages
                self._map.madvise(getattr(mmap, advice))
        self.view = memoryview(self._map)
        self.address = address_of(self._map)
        ctypes.memset(self.address, 0, nbytes)
