from __future__ import annotations

import ctypes

import pytest

from helpers.core.bare_core import block, content
from lastcall import memory


def test_host_memory_is_read_and_written_piece_by_piece() -> None:
    live, room = block(bytes(range(10))), block(bytes(4))
    live.read_into(room.address, 3, 4)
    assert content(room) == bytes([3, 4, 5, 6])
    live.write_from(room.address, 6, 4)
    assert content(live) == bytes([0, 1, 2, 3, 4, 5, 3, 4, 5, 6])


def test_host_memory_keeps_its_owner_alive() -> None:
    owner = bytearray(b"alive")
    address = ctypes.addressof(ctypes.c_char.from_buffer(owner))
    assert memory.HostMemory(address, 5, owner).owner is owner


@pytest.mark.parametrize(("offset", "nbytes"), [(0, 6), (2, 3), (5, 1), (6, 0)])
def test_bytes_are_a_source_with_the_same_pieces(offset: int, nbytes: int) -> None:
    source, room = memory.BytesSource(b"\x00a\x00bcd"), block(b"......")
    source.read_into(room.address, offset, nbytes)
    assert source.nbytes == 6
    assert content(room) == b"\x00a\x00bcd"[offset : offset + nbytes] + b"......"[nbytes:]


@pytest.mark.parametrize("nbytes", [1, 4096, 10_000])
def test_a_page_buffer_is_aligned_empty_and_the_same_memory_from_both_sides(nbytes: int) -> None:
    buffer = memory.PageBuffer(nbytes)
    assert buffer.address % memory.ALIGNMENT == 0
    assert len(buffer.view) == nbytes
    assert bytes(buffer.view) == bytes(nbytes)
    buffer.view[nbytes - 1] = 7
    assert ctypes.string_at(buffer.address + nbytes - 1, 1) == b"\x07"


@pytest.mark.parametrize("nbytes", [0, 1, 512, 64 * 1024, 64 * 1024 + 1, 1 << 20])
def test_short_and_long_copies_are_the_same_bytes_and_no_more(nbytes: int) -> None:
    here, there = memory.PageBuffer(1 << 21), memory.PageBuffer(1 << 21)
    content = bytes(number % 251 for number in range(nbytes))
    here.view[100 : 100 + nbytes] = content
    memory.move(there.address + 50, here.address + 100, nbytes)
    assert there.view[50 : 50 + nbytes] == content
    assert there.view[50 + nbytes] == there.view[49] == 0


@pytest.mark.parametrize("nbytes", [0, 1, 4096])
def test_a_view_is_the_memory_itself(nbytes: int) -> None:
    buffer = memory.PageBuffer(8192)
    view = memory.view(buffer.address + 10, nbytes)
    assert (len(view), view.readonly, view.format) == (nbytes, False, "B")
    view[:] = b"x" * nbytes
    assert bytes(buffer.view[9 : 11 + nbytes]) == b"\0" + b"x" * nbytes + b"\0"
