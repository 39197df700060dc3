"""A chunk of a file as pieces of memory that can be written as they are: straight from the tensors where that
is possible.

O_DIRECT wants file offsets and addresses on sectors. torch puts large tensors 64 bytes behind a page, so
safetensors.layout begins the data 64 bytes behind one as well: then offset and address agree for whole
tensors, and only the sectors where two tensors meet, and what is small or not in host memory, are gathered in
the thread's buffer. That saves a pass over the memory: on two cores the copy was what kept the writer from
the speed of the disk.
"""

from __future__ import annotations

import bisect
import ctypes
from collections.abc import Sequence

from lastcall import memory
from lastcall.types import Extent

SECTOR = 512
_WORTH = 64 * 1024  # shorter pieces are copied faster than they are handed over one by one


def gather(
    extents: Sequence[Extent],
    starts: Sequence[int],
    begin: int,
    count: int,
    buffer: memory.Buffer,
    *,
    in_place: bool,
    sectors: bool,
) -> list[memoryview]:
    """The bytes [begin, begin + count) of a file, in order. `in_place`: large host memory is not copied.
    `sectors`: every piece begins and ends on a sector of the file and of memory, but for the very end."""
    end = begin + count
    views: list[memoryview] = []
    gathered_from = begin  # what lies behind this in the buffer is not among the views yet
    index = bisect.bisect_right(starts, begin) - 1
    position = begin
    while position < end:
        extent = extents[index]
        index += 1
        source = extent.source
        first, last = position, min(extent.offset + source.nbytes, end)
        if last <= first:
            continue
        position = last
        if in_place and isinstance(source, memory.HostMemory):
            shift = source.address - extent.offset
            low, high = _whole_sectors(first, last, shift) if sectors else (first, last)
            if high - low >= _WORTH:
                base = buffer.address - begin
                source.read_into(base + first, first - extent.offset, low - first)
                source.read_into(base + high, high - extent.offset, last - high)
                if low > gathered_from:
                    views.append(buffer.view[gathered_from - begin : low - begin])
                views.append(memory.view(shift + low, high - low))
                gathered_from = high
                continue
        source.read_into(buffer.address + first - begin, first - extent.offset, last - first)
    if end > gathered_from:
        views.append(buffer.view[gathered_from - begin : count])
    return views


def pad(views: list[memoryview], begin: int, count: int, buffer: memory.Buffer) -> list[memoryview]:
    """The last chunk of a file ends anywhere, O_DIRECT on a block: zeros follow, and are cut off by truncate
    afterwards."""
    whole = -(-count // memory.ALIGNMENT) * memory.ALIGNMENT
    if whole == count:
        return views
    size = sum(len(view) for view in views)
    assert size == count
    tail = len(views[-1])
    inside = views[-1].obj is buffer.view.obj
    ctypes.memset(buffer.address + count, 0, whole - count)
    if inside:
        return [*views[:-1], buffer.view[count - tail : whole]]
    # the piece in place ended on a sector, which is where the zeros begin
    return [*views, buffer.view[count:whole]]


def _whole_sectors(first: int, last: int, shift: int) -> tuple[int, int]:
    if shift % SECTOR:
        return first, first
    return -(-first // SECTOR) * SECTOR, last // SECTOR * SECTOR
