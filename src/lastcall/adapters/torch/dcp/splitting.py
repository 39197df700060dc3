"""Replicated tensors, split evenly over the ranks that hold them, so that all disks and links work.

DCP's planners give each such tensor to one rank. The writer may change the plans after that: every rank says
in its local plan what it holds, and the coordinator lays all tensors that the same ranks hold end to end and
cuts them into equal parts, at rows.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, WriteItem, WriteItemType


@dataclass(frozen=True)
class Held:
    """What a rank tells the coordinator: the tensors and shards that it could write."""

    indices: tuple[MetadataIndex, ...]


@dataclass
class Portion:
    """What a rank is to write. `wholes` are the items that its parts were cut from, by the index of the
    part."""

    items: list[WriteItem] = field(default_factory=list)
    wholes: dict[MetadataIndex, WriteItem] = field(default_factory=dict)


def held(plan: SavePlan) -> Held:
    return Held(tuple(item.index for item in plan.items if item.type is not WriteItemType.BYTE_IO))


def even(plans: Sequence[SavePlan]) -> list[Portion]:
    """The plans of all ranks, from which the planner has removed what is there twice, with the replicated
    tensors cut up."""
    holders: dict[MetadataIndex, list[int]] = {}
    for rank, plan in enumerate(plans):
        for index in plan.storage_data.indices if isinstance(plan.storage_data, Held) else ():
            holders.setdefault(index, []).append(rank)
    portions = [Portion() for _ in plans]
    shared: dict[tuple[int, ...], list[WriteItem]] = {}
    for rank, plan in enumerate(plans):
        for item in plan.items:
            ranks = tuple(holders.get(item.index, ()))
            if item.tensor_data is None or len(ranks) < 2:
                portions[rank].items.append(item)
            else:
                shared.setdefault(ranks, []).append(item)
    for ranks, items in shared.items():
        for writer, item, first, last in _cut(items, len(ranks)):
            _give(portions[ranks[writer]], item, first, last)
    return portions


def _rows(item: WriteItem) -> tuple[int, int]:
    """How many rows an item may be cut into, and the bytes of one."""
    assert item.tensor_data is not None
    sizes = item.tensor_data.chunk.sizes
    nbytes = math.prod(sizes) * item.tensor_data.properties.dtype.itemsize
    rows = sizes[0] if sizes and nbytes else 1
    return rows, nbytes // rows


def _cut(items: Sequence[WriteItem], writers: int) -> Iterator[tuple[int, WriteItem, int, int]]:
    """(writer, item, first row, row behind the last) of every part. The cuts are where the bytes are even,
    moved to the nearest row."""
    rows = [_rows(item) for item in items]
    total = sum(count * nbytes for count, nbytes in rows)
    begin = 0
    for item, (count, nbytes) in zip(items, rows, strict=True):
        end = begin + count * nbytes
        if not end - begin:
            yield 0, item, 0, count
            continue
        done = 0
        for writer in range(begin * writers // total, writers):
            cut = total * (writer + 1) // writers
            last = (
                count if writer == writers - 1 else min(max((cut - begin + nbytes // 2) // nbytes, 0), count)
            )
            if last > done:
                yield writer, item, done, last
                done = last
            if done == count:
                break
        begin = end


def _give(portion: Portion, item: WriteItem, first: int, last: int) -> None:
    data = item.tensor_data
    assert data is not None
    if (first, last) == (0, _rows(item)[0]):
        portion.items.append(item)
        return
    offsets, sizes = data.chunk.offsets, data.chunk.sizes
    chunk = ChunkStorageMetadata(
        torch.Size((offsets[0] + first, *offsets[1:])), torch.Size((last - first, *sizes[1:]))
    )
    index = MetadataIndex(item.index.fqn, chunk.offsets)
    part = dataclasses.replace(
        item, index=index, type=WriteItemType.SHARD, tensor_data=dataclasses.replace(data, chunk=chunk)
    )
    portion.items.append(part)
    portion.wholes[index] = item


def narrowed(
    tensor: torch.Tensor, part: WriteItem, wholes: Mapping[MetadataIndex, WriteItem]
) -> torch.Tensor:
    """The rows of a whole item's tensor that a part of it stands for."""
    whole = wholes.get(part.index)
    if whole is None:
        return tensor
    assert whole.tensor_data is not None and part.tensor_data is not None
    first = part.tensor_data.chunk.offsets[0] - whole.tensor_data.chunk.offsets[0]
    return tensor.narrow(0, first, part.tensor_data.chunk.sizes[0])
