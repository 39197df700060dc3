"""Boxes of tensors: where a stored piece and a live region overlap, and how the bytes get from one to the
other.

Both lie in C order, each in its own. The overlap is a box: runs of bytes that are next to each other in both,
at regular distances. Shards by rows overlap in one run; shards by columns in a run a row, which are moved
many at a time where the target can (`write_rows`).
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence

from lastcall import memory
from lastcall.types import Region, Target

Box = tuple[tuple[int, ...], tuple[int, ...]]  # offset, shape
_Axis = tuple[int, int, int]  # how many, bytes apart in the stored piece, bytes apart in the region


def meet(one: Box, other: Box) -> Box | None:
    """The box that lies in both, or None."""
    begin = tuple(map(max, one[0], other[0]))
    end = [min(a + n, b + m) for a, n, b, m in zip(*one, *other, strict=True)]
    shape = tuple(last - first for first, last in zip(begin, end, strict=True))
    return (begin, shape) if all(size > 0 for size in shape) else None


def strides(shape: Sequence[int], itemsize: int) -> tuple[int, ...]:
    """How many bytes apart the neighbours of each dimension lie in C order."""
    found = [itemsize] * len(shape)
    for dim in range(len(shape) - 2, -1, -1):
        found[dim] = found[dim + 1] * shape[dim + 1]
    return tuple(found)


class Scatter:
    """A Target that takes the bytes of a stored piece, any range of them, and hands on those that fall into a
    region."""

    __slots__ = ("_axes", "_extents", "_from", "_run", "_target", "_to", "nbytes", "span")

    def __init__(
        self, offset: tuple[int, ...], shape: tuple[int, ...], region: Region, itemsize: int
    ) -> None:
        self.nbytes = math.prod(shape) * itemsize
        self._target = region.target
        self._axes: list[_Axis] = []
        self._run = self._from = self._to = 0
        self.span = (0, 0)  # the bytes of the piece between which all that the region wants lies
        box = meet((offset, shape), (region.offset, region.shape))
        if box is None:
            return
        here, there = strides(shape, itemsize), strides(region.shape, itemsize)
        self._from = sum((at - base) * stride for at, base, stride in zip(box[0], offset, here, strict=True))
        self._to = sum(
            (at - base) * stride for at, base, stride in zip(box[0], region.offset, there, strict=True)
        )
        self._axes = _joined([*zip(box[1], here, there, strict=True), (itemsize, 1, 1)])
        self._run = self._axes.pop()[0]
        self._extents = [self._run]  # of what lies below each axis, the innermost last
        for count, stride, _ in reversed(self._axes[1:]):
            self._extents.insert(0, (count - 1) * stride + self._extents[0])
        outermost = self._axes[0] if self._axes else (1, 0, 0)
        self.span = (self._from, self._from + (outermost[0] - 1) * outermost[1] + self._extents[0])

    def write_from(self, address: int, offset: int, nbytes: int) -> None:
        low, high = max(offset, self.span[0]), min(offset + nbytes, self.span[1])
        if low < high:
            self._spread(0, self._from, self._to, address - offset, low, high)

    def _spread(self, depth: int, here: int, there: int, base: int, low: int, high: int) -> None:
        """Hand on what lies in [low, high) of the piece, from axis `depth` on. `base`: where byte 0 of the
        piece would be in memory."""
        if depth == len(self._axes):
            self._clipped(here, there, base, low, high)
            return
        count, stride, step = self._axes[depth]
        first = max(0, (low - here - self._extents[depth]) // stride + 1)
        last = min(count, -((here - high) // stride))
        if depth < len(self._axes) - 1:
            for number in range(first, last):
                self._spread(depth + 1, here + number * stride, there + number * step, base, low, high)
            return
        if first < last and here + first * stride < low:  # the range begins inside a run
            self._clipped(here + first * stride, there + first * step, base, low, high)
            first += 1
        if first < last and here + (last - 1) * stride + self._run > high:
            last -= 1
            self._clipped(here + last * stride, there + last * step, base, low, high)
        if first < last:
            self._rows(base + here + first * stride, stride, there + first * step, step, last - first)

    def _clipped(self, here: int, there: int, base: int, low: int, high: int) -> None:
        first, last = max(here, low), min(here + self._run, high)
        if first < last:
            self._target.write_from(base + first, there + first - here, last - first)

    def _rows(self, address: int, stride: int, offset: int, step: int, count: int) -> None:
        together = getattr(self._target, "write_rows", None)
        if count == 1:
            self._target.write_from(address, offset, self._run)
        elif step == self._run and not isinstance(self._target, memory.HostMemory):
            # next to each other in the target: one call
            packed = ctypes.create_string_buffer(count * self._run)
            memory.copy_rows(ctypes.addressof(packed), self._run, address, stride, self._run, count)
            self._target.write_from(ctypes.addressof(packed), offset, count * self._run)
        elif together is not None:
            together(address, stride, offset, step, self._run, count)
        else:
            for number in range(count):
                self._target.write_from(address + number * stride, offset + number * step, self._run)


class FanOut:
    """The bytes of one stored piece for several targets, each of which takes all of them."""

    __slots__ = ("_targets", "nbytes")

    def __init__(self, targets: Sequence[Target]) -> None:
        self._targets = tuple(targets)
        self.nbytes = targets[0].nbytes

    def write_from(self, address: int, offset: int, nbytes: int) -> None:
        for target in self._targets:
            target.write_from(address, offset, nbytes)


def _joined(axes: Sequence[_Axis]) -> list[_Axis]:
    """Fewer axes: those of one are left out, and an axis whose steps continue where the one inside it ends is
    merged with it."""
    joined = [axes[-1]]
    for count, stride, step in reversed(axes[:-1]):
        inner, near, far = joined[0]
        if count == 1:
            continue
        if stride == inner * near and step == inner * far:
            joined[0] = (inner * count, near, far)
        else:
            joined.insert(0, (count, stride, step))
    return joined
