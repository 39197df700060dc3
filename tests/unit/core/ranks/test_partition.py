from __future__ import annotations

import ctypes

import pytest

from helpers.core.bare_core import block, noise
from lastcall import memory
from lastcall.core.ranks import partition
from lastcall.types import Group, Share, TensorEntry


def replicated(name: str, shape: tuple[int, ...], holders: tuple[int, ...] = (0, 1, 2, 3)) -> TensorEntry:
    """A U8 tensor that these ranks hold as a whole."""
    nbytes = 1
    for size in shape:
        nbytes *= size
    return TensorEntry(
        name, "U8", shape, block(noise(nbytes, name)), Share(shape, (0,) * len(shape), holders)
    )


def own(name: str, nbytes: int = 10) -> TensorEntry:
    return TensorEntry(name, "U8", (nbytes,), block(noise(nbytes, name)))


def entries(groups: tuple[Group, ...]) -> list[TensorEntry]:
    return [entry for group in groups for entry in group.entries]


def sizes(groups: tuple[Group, ...], writers: tuple[int, ...]) -> list[int]:
    return [
        sum(entry.source.nbytes for entry in entries(partition.portion(groups, rank, writers)))
        for rank in writers
    ]


def read(source: object) -> bytes:
    data = ctypes.create_string_buffer(source.nbytes)  # type: ignore[attr-defined]
    source.read_into(ctypes.addressof(data), 0, source.nbytes)  # type: ignore[attr-defined]
    return data.raw


def test_a_rank_writes_what_is_its_own_and_nobody_else_does() -> None:
    groups = (Group("model", (own("bn"),), frozen=True, rank=0),)
    assert partition.portion(groups, 2, (0, 1, 2, 3)) == groups


def test_replicated_bytes_are_split_evenly_over_the_writers() -> None:
    groups = (
        Group("model", tuple(replicated(f"w{n}", (100, 7)) for n in range(5))),
        Group("optimizer", (replicated("m", (300, 10)),)),
    )
    assert sizes(groups, (0, 1, 2, 3)) == pytest.approx([1625] * 4, abs=10)
    assert sizes(groups, (1, 3)) == pytest.approx([3250] * 2, abs=10)
    assert sizes(groups, (2,)) == [6500]


def test_a_piece_has_the_rows_the_key_and_the_place_in_the_whole() -> None:
    whole = replicated("layer.weight", (8, 4))
    (group,) = partition.portion((Group("model", (whole,), frozen=True, rank=2),), 1, (0, 1))
    (piece,) = group.entries
    assert (group.name, group.frozen, group.rank) == ("model", True, 2)
    assert (piece.name, piece.dtype, piece.shape) == ("layer.weight@4,0", "U8", (4, 4))
    assert piece.share == Share((8, 4), (4, 0), (1,))
    assert read(piece.source) == noise(32, "layer.weight")[16:]


def test_host_memory_stays_host_memory_that_is_written_from_where_it_lies() -> None:
    whole = replicated("w", (8, 4))
    (piece,) = entries(partition.portion((Group("model", (whole,)),), 1, (0, 1)))
    assert isinstance(piece.source, memory.HostMemory) and isinstance(whole.source, memory.HostMemory)
    assert piece.source.address == whole.source.address + 16
    assert piece.source.owner is whole.source.owner


def test_memory_of_another_kind_is_read_row_by_row_through_its_own_source() -> None:
    whole = TensorEntry(
        "w", "U8", (8, 4), memory.BytesSource(bytes(range(32))), Share((8, 4), (0, 0), (0, 1))
    )
    (piece,) = entries(partition.portion((Group("model", (whole,)),), 1, (0, 1)))
    data = ctypes.create_string_buffer(3)
    piece.source.read_into(ctypes.addressof(data), 5, 3)
    assert data.raw == bytes([21, 22, 23])


def test_a_tensor_that_falls_into_one_part_keeps_its_name() -> None:
    groups = (Group("model", (replicated("a", (4, 4)), replicated("b", (4, 4)))),)
    assert [entry.name for entry in entries(partition.portion(groups, 0, (0, 1)))] == ["a"]
    assert [entry.name for entry in entries(partition.portion(groups, 1, (0, 1)))] == ["b"]


@pytest.mark.parametrize("shape", [(), (1, 900), (1,)])
def test_a_scalar_or_a_single_row_is_not_cut(shape: tuple[int, ...]) -> None:
    groups = (Group("model", (replicated("w", shape),)),)
    written = [entry for rank in range(4) for entry in entries(partition.portion(groups, rank, range(4)))]
    assert [(entry.name, entry.shape) for entry in written] == [("w", shape)]


def test_a_shard_is_cut_within_its_place() -> None:
    shard = TensorEntry("w", "U8", (4, 3), block(bytes(range(12))), Share((8, 6), (4, 3), (2, 5)))
    (first,) = entries(partition.portion((Group("model", (shard,)),), 2, (2, 5)))
    (second,) = entries(partition.portion((Group("model", (shard,)),), 5, (2, 5)))
    assert (first.name, first.shape) == ("w@4,3", (2, 3))
    assert (second.name, second.shape, second.share) == ("w@6,3", (2, 3), Share((8, 6), (6, 3), (5,)))
    assert read(first.source) + read(second.source) == bytes(range(12))


def test_large_tensors_are_cut_on_pages() -> None:
    groups = (Group("model", (replicated("w", (3_000_001,)),)),)
    cuts = [
        entry.share.offset[0]
        for rank in range(4)
        for entry in entries(partition.portion(groups, rank, range(4)))
        if entry.share
    ]
    assert len(cuts) == 4
    assert all(cut % memory.ALIGNMENT == 0 for cut in cuts)


def test_a_part_does_not_take_the_name_of_another_tensor() -> None:
    part = TensorEntry("w", "U8", (4,), block(bytes(4)), Share((8,), (4,), (0,)))
    groups = (Group("model", (part, own("w@4"), replicated("w@4#2", (2,), (0,)))),)
    names = [entry.name for entry in entries(partition.portion(groups, 0, (0,)))]
    assert names == ["w@4#3", "w@4", "w@4#2"]


def test_an_empty_shard_is_left_to_those_who_hold_rows() -> None:
    shard = TensorEntry("w", "U8", (0, 3), block(b""), Share((8, 3), (8, 0), (3,)))
    assert partition.portion((Group("model", (shard,)),), 3, range(4)) == ()
    assert partition.holdings((Group("model", (shard,)),)) == []


def test_a_tensor_without_elements_is_written_once() -> None:
    groups = (Group("model", (replicated("none", (0, 3)),)),)
    assert [len(entries(partition.portion(groups, rank, (1, 2)))) for rank in (0, 1, 2)] == [0, 1, 0]


def test_who_does_not_write_keeps_what_is_its_own() -> None:
    groups = (
        Group("model", (replicated("w", (8, 4)), own("bn"))),
        Group("optimizer", (replicated("m", (8, 4)),)),
    )
    (group,) = partition.portion(groups, 3, (0, 1))
    assert [entry.name for entry in group.entries] == ["bn"]


def test_the_holders_without_a_writer_are_named() -> None:
    holdings = {0: [(0, 2)], 1: [(1, 3)], 2: [(0, 2)], 3: [(1, 3), (3,)]}
    assert partition.missing(holdings, {0, 1}) == [(3,)]
    assert partition.missing(holdings, {0, 2}) == [(1, 3), (3,)]
    assert partition.missing(holdings, range(4)) == []
