"""Host memory as sources and targets, and the aligned buffers that bytes pass through on their way to the disk."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
from typing import Protocol

ALIGNMENT = 4096
HUGE = 2 * 1024 * 1024


class HostMemory:
    """Bytes at an address, both a Source and a Target. `owner` keeps them alive."""

    __slots__ = ("address", "nbytes", "owner")

    def __init__(self, address: int, nbytes: int, owner: object) -> None:
        self.address = address
        self.nbytes = nbytes
        self.owner = owner

    def read_into(self, address: int, offset: int, nbytes: int) -> None:
        ctypes.memmove(address, self.address + offset, nbytes)  # releases the GIL

    def write_from(self, address: int, offset: int, nbytes: int) -> None:
        ctypes.memmove(self.address + offset, address, nbytes)


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
    """The bytes at an address, for Python's file calls. Whoever owns them must outlive it."""
    return memoryview((ctypes.c_char * nbytes).from_address(address)).cast("B")


def address_of(mapping: mmap.mmap) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(mapping))


class Buffer(Protocol):
    """A piece of page-aligned host memory: `view` for Python's file calls, `address` for copies."""

    @property
    def address(self) -> int: ...

    @property
    def view(self) -> memoryview: ...


class PageBuffer:
    """Page-aligned memory from mmap, in huge pages where the kernel has them (a direct write from scattered small ones takes up to
    three times as long), touched once so that no page is missing when it is needed. Forked children do not get it: after a fork the
    next use would copy it page by page."""

    def __init__(self, nbytes: int) -> None:
        self._map = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        for advice in ("MADV_HUGEPAGE", "MADV_DONTFORK"):
            with contextlib.suppress(OSError, AttributeError):  # a kernel without huge pages
                self._map.madvise(getattr(mmap, advice))
        self.view = memoryview(self._map)
        self.address = address_of(self._map)
        ctypes.memset(self.address, 0, nbytes)
