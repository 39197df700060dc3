from __future__ import annotations

import ctypes
import itertools
import math
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from helpers.core.bare_core import block, content, noise
from helpers.ranks.states import Elsewhere
from lastcall import memory
from lastcall.core.restore import regions
from lastcall.types import Region, Target

WHOLE = (6, 5, 8)


def scatter(stored: regions.Box, region: regions.Box, itemsize: int, piece: int) -> None:
    """Bring a stored box to a region in pieces of so many bytes, and compare with what numpy makes of it."""
    whole = np.frombuffer(noise(math.prod(WHOLE) * itemsize, 1), np.uint8).reshape((*WHOLE, itemsize))
    here, there = (tuple(slice(a, a + n) for a, n in zip(*box, strict=True)) for box in (stored, region))
    data = whole[here].tobytes()
    known = np.zeros_like(whole)
    known[here] = whole[here]
    expected = known[there].tobytes()
    for elsewhere in (False, True):
        live = block(bytes(math.prod(region[1]) * itemsize))
        target: Target = Elsewhere(live) if elsewhere else live
        made = regions.Scatter(*stored, Region(*region, target), itemsize)
        assert made.nbytes == len(data)
        buffer = ctypes.create_string_buffer(data, len(data) + 1)
        for begin in range(0, len(data), piece):
            made.write_from(ctypes.addressof(buffer) + begin, begin, min(piece, len(data) - begin))
        assert content(live) == expected


BOXES = [
    ((0, 0, 0), WHOLE),
    ((2, 0, 0), (3, 5, 8)),
    ((0, 1, 0), (6, 2, 8)),
    ((0, 0, 3), (6, 5, 4)),
    ((1, 1, 1), (4, 3, 6)),
    ((5, 4, 7), (1, 1, 1)),
    ((0, 0, 0), (2, 5, 8)),
]


@pytest.mark.parametrize("piece", [1, 7, 64, 10_000])
@pytest.mark.parametrize(("stored", "region"), list(itertools.product(BOXES, BOXES)))
def test_the_bytes_of_a_region_arrive_however_they_are_cut(
    stored: regions.Box, region: regions.Box, piece: int
) -> None:
    scatter(stored, region, 4, piece)


def test_boxes_meet_in_a_box_or_not_at_all() -> None:
    assert regions.meet(((0, 0), (4, 4)), ((2, 3), (9, 9))) == ((2, 3), (2, 1))
    assert regions.meet(((0, 0), (4, 4)), ((4, 0), (4, 4))) is None
    assert regions.meet(((0, 0), (4, 0)), ((0, 0), (4, 4))) is None
    assert regions.meet(((), ()), ((), ())) == ((), ())


def test_a_scalar_is_one_run() -> None:
    live = block(bytes(8))
    made = regions.Scatter((), (), Region((), (), live), 8)
    source = block(b"12345678")
    made.write_from(source.address, 0, 8)
    assert content(live) == b"12345678" and made.span == (0, 8)


def test_what_does_not_meet_wants_nothing() -> None:
    live = block(bytes(16))
    made = regions.Scatter((0, 0), (2, 4), Region((2, 0), (2, 4), live), 2)
    assert made.span == (0, 0)
    made.write_from(block(noise(16, 1)).address, 0, 16)
    assert content(live) == bytes(16)


def test_rows_are_handed_on_in_one_call_and_only_their_bytes_are_wanted() -> None:
    live = Elsewhere(block(bytes(100 * 8 * 4)))
    made = regions.Scatter((0, 0), (1000, 8), Region((300, 0), (100, 8), live), 4)
    assert made.span == (300 * 32, 400 * 32)
    made.write_from(block(noise(made.nbytes, 1)).address, 0, made.nbytes)
    assert live.calls == 1


def test_columns_that_lie_together_in_the_target_are_handed_on_in_one_call() -> None:
    live = Elsewhere(block(bytes(1000 * 2 * 4)))
    made = regions.Scatter((0, 0), (1000, 8), Region((0, 4), (1000, 2), live), 4)
    made.write_from(block(noise(made.nbytes, 1)).address, 0, made.nbytes)
    assert live.calls == 1


def test_several_threads_bring_the_parts_of_one_piece() -> None:
    data = np.frombuffer(noise(512 * 96 * 2, 1), np.uint8).reshape(512, 96, 2)
    live, source = block(bytes(512 * 31 * 2)), block(data.tobytes())
    made = regions.Scatter((0, 0), (512, 96), Region((0, 33), (512, 31), live), 2)

    def bring(begin: int) -> None:
        made.write_from(source.address + begin, begin, min(1001, made.nbytes - begin))

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(bring, range(0, made.nbytes, 1001)))
    assert content(live) == data[:, 33:64].tobytes()


def test_several_targets_get_the_same_bytes() -> None:
    one, other = block(bytes(4)), block(bytes(4))
    both = regions.FanOut([one, other])
    both.write_from(block(b"ab").address, 1, 2)
    assert both.nbytes == 4
    assert content(one) == content(other) == b"\0ab\0"


@pytest.mark.parametrize(
    ("run", "step", "stride"), [(8, 24, 40), (1, 3, 5), (6, 10, 8), (4, 4, 12), (1000, 1024, 2000), (7, 7, 7)]
)
def test_rows_of_bytes_are_copied_however_long_they_are(run: int, step: int, stride: int) -> None:
    count = 37
    source, live = block(noise(count * stride, 1)), block(bytes(count * step))
    memory.copy_rows(live.address, step, source.address, stride, run, count)
    rows = [content(source)[n * stride : n * stride + run] for n in range(count)]
    assert content(live) == b"".join(row + bytes(step - run) for row in rows)
