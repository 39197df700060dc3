"""Common code of the formats: turning pieces into a FileLayout."""

from __future__ import annotations

import ctypes

from lastcall.memory import BytesSource
from lastcall.types import Extent, FileLayout, Source


class Pieces:
    """The pieces of a file, in order. Neighbouring bytes become one extent: a zip of 5,000 tensors has 15,000
    small headers, and each extent costs the writer a call. Empty sources get none."""

    def __init__(self) -> None:
        self.size = 0
        self._extents: list[Extent] = []
        self._bytes = bytearray()

    def write(self, data: bytes | bytearray) -> None:
        self._bytes += data
        self.size += len(data)

    def add(self, source: Source) -> None:
        nbytes = source.nbytes
        if nbytes:
            self._flush()
            self._extents.append(Extent(self.size, source))
            self.size += nbytes

    def layout(self, name: str) -> FileLayout:
        self._flush()
        return FileLayout(name, self.size, tuple(self._extents))

    def _flush(self) -> None:
        if self._bytes:
            self._extents.append(Extent(self.size - len(self._bytes), BytesSource(bytes(self._bytes))))
            self._bytes.clear()


def check(layout: FileLayout) -> None:
    """Assert that the extents cover the file from 0 to its size, each byte once."""
    end = 0
    for index, extent in enumerate(layout.extents):
        assert extent.offset == end, (
            f"{layout.name}: extent {index} begins at {extent.offset}, the one before ends at {end}"
        )
        end += extent.source.nbytes
    assert end == layout.size, f"{layout.name}: the extents end at {end}, the file at {layout.size}"


def materialize(layout: FileLayout) -> bytes:
    """The whole file in memory: for small files and for tests."""
    check(layout)
    data = ctypes.create_string_buffer(layout.size)
    base = ctypes.addressof(data)
    for extent in layout.extents:
        extent.source.read_into(base + extent.offset, 0, extent.source.nbytes)
    return data.raw
