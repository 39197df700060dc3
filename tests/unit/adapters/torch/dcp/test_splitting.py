from __future__ import annotations

import math
import random
from collections import defaultdict

import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType

from lastcall.adapters.torch.dcp import splitting


def item(name: str, *shape: int, at: int = 0) -> WriteItem:
    offset = torch.Size((at, *(0,) * (len(shape) - 1)) if shape else ())
    data = TensorWriteData(
        ChunkStorageMetadata(offset, torch.Size(shape)),
        TensorProperties(dtype=torch.float32),
        torch.Size(shape),
    )
    return WriteItem(MetadataIndex(name, offset), WriteItemType.TENSOR, tensor_data=data)


def plans(
    ranks: int, replicated: list[WriteItem], own: dict[int, list[WriteItem]] | None = None
) -> list[SavePlan]:
    """As they reach the writer: each rank says what it holds, and the planner has given all that is there
    twice to rank 0."""
    found = []
    for rank in range(ranks):
        mine = (own or {}).get(rank, [])
        held = splitting.held(SavePlan([*replicated, *mine]))
        found.append(SavePlan([*(replicated if rank == 0 else []), *mine], storage_data=held))
    return found


def nbytes(found: WriteItem) -> int:
    assert found.tensor_data is not None
    return math.prod(found.tensor_data.chunk.sizes) * 4


def covered(portions: list[splitting.Portion]) -> dict[str, list[tuple[int, int]]]:
    """The rows of each tensor that are written, in order."""
    rows = defaultdict(list)
    for portion in portions:
        for part in portion.items:
            assert part.tensor_data is not None
            chunk = part.tensor_data.chunk
            rows[part.index.fqn].append((chunk.offsets[0], chunk.sizes[0]) if chunk.sizes else (0, 1))
            assert part.index.offset == chunk.offsets
    return {name: sorted(found) for name, found in rows.items()}


def test_replicated_tensors_are_split_evenly_and_each_row_is_written_once() -> None:
    rng = random.Random(4)
    for ranks in (2, 3, 8):
        shapes = [tuple(rng.randint(1, 200) for _ in range(rng.randint(0, 3))) for _ in range(30)]
        items = [item(f"t{number}", *shape) for number, shape in enumerate(shapes)]
        portions = splitting.even(plans(ranks, items))
        for number, shape in enumerate(shapes):
            end = 0
            for begin, count in covered(portions)[f"t{number}"]:
                assert begin == end and count > 0
                end += count
            assert end == (shape[0] if shape else 1)
        sizes = [sum(map(nbytes, portion.items)) for portion in portions]
        largest_row = max(
            nbytes(one) // (one.tensor_data.chunk.sizes[0] if one.tensor_data.chunk.sizes else 1)
            for one in items
        )  # type: ignore[union-attr]
        assert max(sizes) - min(sizes) <= 2 * largest_row


def test_what_one_rank_alone_holds_stays_with_it() -> None:
    own = {rank: [item("w", 5, 2, at=5 * rank)] for rank in (0, 1)}
    portions = splitting.even(plans(2, [], own))
    assert [portion.items for portion in portions] == [own[0], own[1]]
    assert not portions[0].wholes and not portions[1].wholes


def test_only_the_ranks_that_hold_a_tensor_get_parts_of_it() -> None:
    shared = [item("w", 100, 3)]
    both = plans(2, shared)
    other = SavePlan([], storage_data=splitting.held(SavePlan([])))
    portions = splitting.even([both[0], other, both[1]])
    assert [len(portion.items) for portion in portions] == [1, 0, 1]
    assert [sum(map(nbytes, portion.items)) for portion in portions] == [600, 0, 600]


def test_a_shard_that_two_replicas_hold_is_cut_inside_its_own_rows() -> None:
    portions = splitting.even(plans(2, [item("w", 10, 2, at=20)]))
    assert covered(portions) == {"w": [(20, 5), (25, 5)]}
    whole = torch.arange(20).reshape(10, 2)
    (part,) = portions[1].items
    assert torch.equal(splitting.narrowed(whole, part, portions[1].wholes), whole[5:])


def test_plans_without_a_word_about_what_is_held_stay_as_they_are() -> None:
    given = [SavePlan([item("w", 10)]), SavePlan([item("v", 10)], storage_data="another planner's")]
    assert [portion.items for portion in splitting.even(given)] == [plan.items for plan in given]


def test_empty_tensors_are_given_to_somebody() -> None:
    portions = splitting.even(plans(2, [item("none", 0, 4), item("w", 4), item("also", 3, 0)]))
    assert sorted(part.index.fqn for portion in portions for part in portion.items) == [
        "also",
        "none",
        "w",
        "w",
    ]
