"""Which ranks hold which piece. The shares are compared with what DCP computes, for every rank of many
meshes."""

from __future__ import annotations

import itertools
import logging
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.ddp_comm_hooks.debugging_hooks import noop_hook
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import _StridedShard
from torch.nn.parallel import DistributedDataParallel

from helpers.models import pretended_ranks as pretend
from lastcall import errors
from lastcall.adapters.torch.distributed import placement
from lastcall.types import Share

PLACEMENTS: list[tuple[tuple[int, ...], tuple[Any, ...]]] = [
    ((4,), (Shard(0),)),
    ((3,), (Shard(1),)),
    ((2, 2), (Replicate(), Shard(0))),
    ((2, 2), (Shard(0), Shard(1))),
    ((2, 3), (Shard(0), Shard(0))),
    ((2, 2), (_StridedShard(0, split_factor=2), Shard(0))),
    ((4, 2), (_StridedShard(0, split_factor=2), Shard(0))),
    ((2, 4), (_StridedShard(0, split_factor=4), Shard(0))),
    ((2, 2, 2), (Replicate(), _StridedShard(1, split_factor=2), Shard(1))),
]


@pytest.mark.parametrize("shape", [(8, 4), (7, 5), (3, 9), (1, 1), (10, 2), (0, 3)])
@pytest.mark.parametrize(("sizes", "placements"), PLACEMENTS)
def test_every_rank_has_the_box_that_dcp_computes(
    shape: tuple[int, ...], sizes: tuple[int, ...], placements: tuple[Any, ...]
) -> None:
    covered = torch.zeros(shape, dtype=torch.int64)
    cuts = tuple(
        (None if way.is_replicate() else way.dim, getattr(way, "split_factor", 1)) for way in placements
    )
    for coordinate in itertools.product(*map(range, sizes)):
        box = placement._box(shape, sizes, coordinate, cuts)
        local, offset = _compute_local_shape_and_global_offset(shape, sizes, list(coordinate), placements)
        assert box is not None and box[1] == local
        if 0 not in local:
            assert box[0] == offset
        covered[tuple(slice(begin, begin + length) for begin, length in zip(*box, strict=True))] += 1
    copies = [size for size, way in zip(sizes, placements, strict=True) if way.is_replicate()]
    assert (covered == (copies[0] if copies else 1)).all()


def test_rows_that_lie_apart_are_refused() -> None:
    """A _StridedShard without the Shard that goes with it: DCP would take rows 0, 1, 4, 5 for rows 0 to 3."""
    with pretend.rank_of(0, 2):
        apart = DTensor.from_local(
            torch.zeros(4, 2), pretend.mesh(2), [_StridedShard(0, split_factor=2)], run_check=False
        )
        with pytest.raises(errors.StateError, match="_StridedShard.*redistribute"):
            placement.share_of(apart)


def test_partial_sums_are_refused_with_a_remedy() -> None:
    with pretend.rank_of(0, 2):
        partial = DTensor.from_local(torch.zeros(4), pretend.mesh(2), [Partial()], run_check=False)
        with pytest.raises(
            errors.StateError,
            match=r"partial sums cannot be "
            r"saved.*redistribute\(placements=\[Replicate",
        ):
            placement.share_of(partial)


def test_a_tensor_that_is_not_as_large_as_it_says_is_refused() -> None:
    with pretend.rank_of(1, 2):
        wrong = DTensor.from_local(
            torch.zeros(2, 2), pretend.mesh(2), [Shard(0)], run_check=False, shape=(3, 2), stride=(2, 1)
        )
        with pytest.raises(errors.StateError, match=r"holds \(2, 2\) where its placements say \(1, 2\)"):
            placement.share_of(wrong)


def test_a_replica_of_a_shard_is_held_by_the_ranks_that_stand_where_it_stands() -> None:
    with pretend.rank_of(3, 4):
        net = pretend.spread(pretend.model(), "hsdp")
        weight: Any = net[0].weight  # type: ignore[index]
        assert placement.share_of(weight) == Share((10, 6), (5, 0), (1, 3))
        assert placement.mark_of(weight) == ""


def test_a_rank_without_rows_has_a_share_all_the_same() -> None:
    with pretend.rank_of(3, 4):
        weight: Any = pretend.spread(pretend.model(), "fsdp4")[2].weight  # type: ignore[index]
        assert tuple(placement.local(weight).shape) == (0, 10)
        assert placement.share_of(weight) == Share((3, 10), (3, 0), (3,))


def test_a_mesh_of_some_ranks_marks_the_names_of_its_tensors() -> None:
    """The ranks outside it may have another tensor of the same name, of another stage of a pipeline."""
    with pretend.rank_of(2, 4):
        grid = pretend.mesh(2, 2)
        assert grid.mesh_dim_names is not None
        net: Any = fully_shard(torch.nn.Linear(2, 4), mesh=grid[grid.mesh_dim_names[1]])
        assert placement.share_of(net.weight) == Share((4, 2), (0, 0), (2,))
        assert placement.mark_of(net.weight) == "~2"


# ---- DistributedDataParallel -------------------------------------------------------------------------------


def test_parameters_under_ddp_are_held_by_its_ranks_however_the_user_holds_them() -> None:
    with pretend.rank_of(0, 3):
        inner = torch.nn.Linear(2, 2)
        hidden = [DistributedDataParallel(torch.nn.Sequential(inner), init_sync=False)]
        other = torch.nn.Linear(2, 2)
        found = placement.replicas()
        assert [found.of(parameter) for parameter in inner.parameters()] == [(0, 1, 2)] * 2
        assert [found.of(parameter) for parameter in other.parameters()] == [None] * 2
        del hidden


def test_parameters_that_ddp_ignores_are_own() -> None:
    with pretend.rank_of(0, 2):
        net = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(net, ["0.weight"])
        wrapper = DistributedDataParallel(net, init_sync=False)
        found = placement.replicas()
        assert (found.of(net[0].weight), found.of(net[0].bias)) == (None, (0, 1))
        del wrapper


@pytest.mark.parametrize(
    ("hook", "averages"),
    [(default_hooks.fp16_compress_hook, True), (noop_hook, False), (lambda state, bucket: None, False)],
)
def test_ranks_that_may_drift_apart_hold_their_own(
    hook: Any, averages: bool, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "lastcall")
    with pretend.rank_of(0, 2):
        wrapper = DistributedDataParallel(torch.nn.Linear(2, 2), init_sync=False)
        wrapper._comm_hooks.append((hook, None))
        assert (placement.replicas().of(wrapper.module.weight) is not None) is averages
        assert ("ranks may diverge" in caplog.text) is not averages


def test_nothing_is_replicated_without_other_ranks() -> None:
    assert not placement.replicas().holders
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        wrapper = DistributedDataParallel(torch.nn.Linear(2, 2))
        assert not placement.replicas().holders
    finally:
        dist.destroy_process_group()
    assert wrapper is not None


def test_a_wrapper_of_a_group_that_is_gone_is_passed_over() -> None:
    with pretend.rank_of(0, 2):
        old = DistributedDataParallel(torch.nn.Linear(2, 2), init_sync=False)
    with pretend.rank_of(0, 2):
        assert placement.replicas().of(old.module.weight) is None
