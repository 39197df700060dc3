from __future__ import annotations

import ctypes

import pytest

from helpers.world import block, content
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
