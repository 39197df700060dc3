"""Tensors and arrays whose memory is not in C order (transposed, channels_last, slices), read and written in
C order.

A whole `.contiguous()` would double the memory of a tensor at the worst moment. Here a range of bytes is cut
into pieces of at most PIECE bytes, each a view, and only a piece is ever copied. The pieces are taken at
elements; where a range starts or ends inside one, that element is handled on its own under a lock, since two
threads may hold its halves.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator
from typing import Any

PIECE = 4 << 20

Move = Callable[[Any, int, int, int], None]  # (view, bytes to skip in it, bytes to move, host address)


def pieces(values: Any, itemsize: int, start: int, stop: int) -> Iterator[Any]:
    """Views that hold the elements [start, stop) in C order, none larger than PIECE bytes unless it is one
    element.

    `values` is a tensor or a numpy array; only slices are taken of it, since an index would make a numpy
    scalar.
    """
    if start >= stop:
        return
    if not values.shape:
        yield values
        return
    row = math.prod(values.shape[1:])
    whole = row == 1 or row * itemsize <= PIECE
    rows = max(1, PIECE // (row * itemsize)) if itemsize else stop
    while start < stop:
        at, inside = divmod(start, row)
        if whole and inside == 0 and stop - start >= row:
            count = min(rows, (stop - start) // row)
            yield values[at : at + count]
            start += count * row
        else:
            end = min(stop, (at + 1) * row)
            yield from pieces(values[at], itemsize, inside, inside + end - start)
            start = end


class Strided:
    """Walks byte ranges of a tensor or an array. `move` says how (a part of) a piece goes to the host, or
    back."""

    __slots__ = ("_itemsize", "_lock", "_values", "nbytes")

    def __init__(self, values: Any, itemsize: int) -> None:
        self._values = values
        self._itemsize = itemsize
        self._lock = threading.Lock()
        self.nbytes = math.prod(values.shape) * itemsize

    def each(self, address: int, offset: int, nbytes: int, move: Move) -> None:
        if nbytes == 0:
            return
        size = self._itemsize
        first, skip = divmod(offset, size)
        if skip:
            part = min(size - skip, nbytes)
            self._edge(first, skip, part, address, move)
            first, address, nbytes = first + 1, address + part, nbytes - part
        whole, rest = divmod(nbytes, size)
        for view in pieces(self._values, size, first, first + whole):
            length = math.prod(view.shape) * size
            move(view, 0, length, address)
            address += length
        if rest:
            self._edge(first + whole, 0, rest, address, move)

    def _edge(self, element: int, skip: int, nbytes: int, address: int, move: Move) -> None:
        with self._lock:
            for view in pieces(self._values, self._itemsize, element, element + 1):
                move(view, skip, nbytes, address)
