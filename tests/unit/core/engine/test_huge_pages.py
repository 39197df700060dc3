"""Huge pages for the state: what is moved, what is left alone, and that the bytes stay the same."""

from __future__ import annotations

import ctypes
import mmap
import os
import re
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from lastcall import memory
from lastcall.core.engine import huge_pages


class SmallPages:
    """Memory as torch's allocator leaves it: in 4 KB pages, and not on a boundary of anything."""

    def __init__(self, nbytes: int) -> None:
        self.map = mmap.mmap(-1, nbytes + memory.HUGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self.map.madvise(mmap.MADV_NOHUGEPAGE)
        for offset in range(0, len(self.map), 4096):
            self.map[offset] = offset // 4096 % 251
        self.map.madvise(mmap.MADV_HUGEPAGE)  # what is there stays small
        address = ctypes.addressof(ctypes.c_char.from_buffer(self.map))
        self.region = memory.HostMemory(address + 64, nbytes, self.map)


def huge_kilobytes(address: int) -> int:
    """AnonHugePages of the mapping that holds this address."""
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if found := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            inside = int(found[1], 16) <= address < int(found[2], 16)
        elif inside and line.startswith("AnonHugePages:"):
            return int(line.split()[1])
    raise AssertionError("no such mapping")


def never(_rest: float) -> bool:
    return False


@pytest.fixture
def small() -> SmallPages:
    if not huge_pages._SWITCH.exists():
        pytest.skip("this kernel has no huge pages")
    return SmallPages(4 * memory.HUGE)


def test_whole_blocks_are_moved_and_keep_their_bytes(small: SmallPages) -> None:
    # the kernel may have joined it with a neighbour
    before, huge = bytes(small.map), huge_kilobytes(small.region.address)
    moved = huge_pages.gather([small.region], never)
    gained = (huge_kilobytes(small.region.address) - huge) * 1024
    assert moved >= gained >= 3 * memory.HUGE  # a block at the edge may have been huge before
    assert bytes(small.map) == before


def test_it_ends_when_told_and_rests_longer_than_it_works(small: SmallPages) -> None:
    rests: list[float] = []

    def after_two(rest: float) -> bool:
        rests.append(rest)
        return len(rests) == 2

    began = time.perf_counter()
    assert huge_pages.gather([small.region], after_two) == 2 * memory.HUGE
    worked = time.perf_counter() - began
    assert len(rests) == 2
    assert sum(rests) <= huge_pages._REST * worked


def test_memory_that_a_child_shares_is_left_alone(small: SmallPages) -> None:
    ready, parent = os.pipe()
    wait, child = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.write(parent, b"x")
        os.read(wait, 1)
        os._exit(0)
    try:
        os.read(ready, 1)
        assert huge_pages.gather([small.region], never) == 0
    finally:
        os.write(child, b"x")
        os.waitpid(pid, 0)
        for fd in (ready, parent, wait, child):
            os.close(fd)
    assert huge_pages.gather([small.region], never) >= 3 * memory.HUGE


@pytest.mark.parametrize(
    "switch",
    [lambda folder: _written(folder, "always madvise [never]\n"), lambda folder: folder / "missing"],
    ids=["never", "absent"],
)
def test_nothing_is_done_where_the_administrator_or_the_kernel_says_no(
    small: SmallPages, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, switch: Callable[[Path], Path]
) -> None:
    monkeypatch.setattr(huge_pages, "_SWITCH", switch(tmp_path))
    assert huge_pages.gather([small.region], never) == 0


def test_a_kernel_that_refuses_is_soon_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huge_pages, "_COLLAPSE", 9999)
    asked: list[float] = []
    large = SmallPages(2 * huge_pages._MOST_REFUSALS * memory.HUGE)
    assert huge_pages.gather([large.region], lambda rest: bool(asked.append(rest))) == 0
    assert len(asked) < huge_pages._MOST_REFUSALS


def test_a_block_that_holds_several_tensors_is_moved_once(small: SmallPages) -> None:
    start, size = small.region.address, 700_000
    pieces = [
        memory.HostMemory(start + n * size, size, small.map)
        for n in reversed(range(small.region.nbytes // size))
    ]
    huge = huge_kilobytes(start)
    moved = huge_pages.gather(pieces, never)
    assert moved >= (huge_kilobytes(start) - huge) * 1024 >= 3 * memory.HUGE


def test_a_block_with_pages_that_were_never_touched_stays_as_it_is(small: SmallPages) -> None:
    block = -(-small.region.address // memory.HUGE) * memory.HUGE
    offset = block - (small.region.address - 64) + 8192
    small.map.madvise(mmap.MADV_DONTNEED, offset, 4096)
    everything = huge_pages.gather([small.region], never)
    assert everything == huge_pages.gather([small.region], never) > 0
    assert 0 < everything < small.region.nbytes + memory.HUGE
    with open("/proc/self/pagemap", "rb") as pagemap:
        assert not huge_pages._ours_alone(pagemap.fileno(), block)


def _written(folder: Path, text: str) -> Path:
    path = folder / "enabled"
    path.write_text(text)
    return path
