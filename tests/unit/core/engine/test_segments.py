"""Pieces written from where they lie: the same bytes as through the buffer, on sectors, whatever the
alignment."""

from __future__ import annotations

import ctypes
import errno
import os
from collections.abc import Sequence
from pathlib import Path

import pytest

from lastcall import memory
from lastcall.core.engine import segments, writer
from lastcall.formats import safetensors
from lastcall.storage import files as storage
from lastcall.types import Extent, FileLayout, TensorEntry

KB = 1024


def source(size: int, phase: int, seed: int) -> memory.HostMemory:
    """Bytes that begin `phase` behind a page, as an allocator might put them."""
    room = (ctypes.c_char * (size + 2 * memory.ALIGNMENT))()
    address = -(-ctypes.addressof(room) // memory.ALIGNMENT) * memory.ALIGNMENT + phase
    data = bytes((seed * 31 + n * 7 + n // 251) % 256 for n in range(min(size, 4096)))
    ctypes.memmove(address, (data * (size // max(len(data), 1) + 1))[:size], size)
    return memory.HostMemory(address, size, room)


def laid(sources: Sequence[memory.HostMemory], begin: int = 0) -> tuple[FileLayout, bytes]:
    extents, offset, content = [], 0, b""
    header = memory.BytesSource(b"h" * begin)
    if begin:
        extents.append(Extent(0, header))
        offset, content = begin, header.data
    for one in sources:
        extents.append(Extent(offset, one))
        offset += one.nbytes
        content += ctypes.string_at(one.address, one.nbytes)
    return FileLayout("f", offset, tuple(extents)), content


SIZES = [
    [1 << 20],
    [200 * KB, 100, 300 * KB],
    [512 * KB, 512 * KB],
    [70 * KB - 1, 90 * KB, 0, 130 * KB + 13],
    [1],
    [0, 4096, 64 * KB],
]


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("phase", [0, 16, 64, 512])
@pytest.mark.parametrize("begin", [0, 64, 4096 + 64])
@pytest.mark.parametrize("sectors", [False, True])
def test_pieces_are_the_bytes_in_order_and_lie_on_sectors(
    sizes: list[int], phase: int, begin: int, sectors: bool
) -> None:
    layout, content = laid([source(size, phase, n) for n, size in enumerate(sizes)], begin)
    starts = [extent.offset for extent in layout.extents]
    chunk = 128 * KB
    buffer = memory.PageBuffer(chunk)
    for position in range(0, layout.size, chunk):
        count = min(chunk, layout.size - position)
        views = segments.gather(
            layout.extents, starts, position, count, buffer, in_place=True, sectors=sectors
        )
        assert b"".join(views) == content[position : position + count]
        if sectors:
            padded = segments.pad(views, position, count, buffer)
            assert sum(map(len, padded)) % memory.ALIGNMENT == 0
            assert b"".join(padded)[:count] == content[position : position + count]
            for view in padded:
                assert ctypes.addressof(ctypes.c_char.from_buffer(view)) % segments.SECTOR == 0
                assert len(view) % segments.SECTOR == 0


def test_large_tensors_as_torch_allocates_them_are_not_copied() -> None:
    entries = [TensorEntry(f"t{n}", "U8", (1 << 20,), source(1 << 20, 64, n)) for n in range(4)]
    layout = safetensors.layout("f", entries)
    starts = [extent.offset for extent in layout.extents]
    buffer = memory.PageBuffer(writer.CHUNK)
    views = segments.gather(
        layout.extents, starts, 0, min(writer.CHUNK, layout.size), buffer, in_place=True, sectors=True
    )
    copied = sum(len(view) for view in views if view.obj is buffer.view.obj)
    assert copied <= 4096 + 5 * segments.SECTOR


class WholePages(storage.Files):
    """A disk that takes pages only, as one with sectors of 4096 bytes does."""

    def pwrite(self, fd: int, views: Sequence[memoryview], offset: int, flags: int = 0) -> int:
        if any(
            len(view) % 4096 or ctypes.addressof(ctypes.c_char.from_buffer(view)) % 4096 for view in views
        ):
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return super().pwrite(fd, views, offset, flags)


def test_a_disk_that_wants_whole_pages_gets_them(tmp_path: Path) -> None:
    entries = [TensorEntry(f"t{n}", "U8", (3 << 20,), source(3 << 20, 64, n)) for n in range(3)]
    layout = safetensors.layout("f", entries)
    engine = writer.Engine(2, WholePages())
    try:
        records = []
        for files, name in ((WholePages(), "pages"), (storage.Files(), "sectors")):
            fd, direct = writer.open_direct(files, tmp_path / name, os.O_RDWR | os.O_CREAT)
            output = writer.Output(layout, fd, direct)
            (engine if name == "pages" else writer.Engine(1)).write([output])
            os.ftruncate(fd, layout.size)
            os.close(fd)
            assert output.record is not None
            records.append(output.record.chunks)
        assert records[0] == records[1]
        assert (tmp_path / "pages").read_bytes() == (tmp_path / "sectors").read_bytes()
    finally:
        engine.close()
