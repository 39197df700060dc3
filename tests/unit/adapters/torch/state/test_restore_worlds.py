"""A state that was saved by one kind of world, brought back in another: the same bytes, at the same places,
under the same names."""

from __future__ import annotations

import pytest
import torch

from helpers.models import pretended_ranks as pretend
from lastcall.adapters.torch.distributed import placement


@pytest.fixture(scope="module")
def alone() -> pretend.Checkpoint:
    """What one process would have saved."""
    return pretend.save("plain")


@pytest.mark.parametrize("layout", ["ddp", "fsdp2", "fsdp4", "hsdp", "tensor", "both"])
def test_the_ranks_save_together_what_one_process_would_have_saved(
    layout: str, alone: pretend.Checkpoint
) -> None:
    together = pretend.save(layout)
    assert together.tensors() == alone.tensors()
    for group in together.whole.values():
        for name, (_, _, holders) in group.items():
            assert holders.min() == holders.max() >= 1, f"{name} is not covered evenly"
    assert together.whole["model"]["0.weight"][2].min() == {"ddp": 2, "hsdp": 2}.get(layout, 1)


@pytest.mark.parametrize(
    ("then", "now"),
    [
        ("plain", "fsdp4"),
        ("fsdp4", "plain"),
        ("fsdp2", "hsdp"),
        ("hsdp", "ddp"),
        ("ddp", "fsdp2"),
        ("both", "fsdp4"),
        ("fsdp2", "both"),
    ],
)
def test_a_state_moves_from_one_world_to_another(then: str, now: str, alone: pretend.Checkpoint) -> None:
    saved = pretend.save(then)
    again = pretend.Checkpoint()
    for rank in range(pretend.WORLDS[now]):
        with pretend.rank_of(rank, pretend.WORLDS[now]):
            member = pretend.Member(now, seed=2)
            saved.restore(member.state, rank)
            _moments_lie_as_their_parameters(member.optimizer)
            again.add(member.state)
    assert again.tensors() == alone.tensors()


def _moments_lie_as_their_parameters(optimizer: torch.optim.Optimizer) -> None:
    for parameter, kept in optimizer.state.items():
        assert not placement.is_dtensor(kept["step"])
        for key in ("exp_avg", "exp_avg_sq"):
            assert placement.is_dtensor(kept[key]) == placement.is_dtensor(parameter)
            if placement.is_dtensor(parameter):
                assert (kept[key].placements, kept[key].device_mesh) == (
                    parameter.placements,
                    parameter.device_mesh,
                )
                assert placement.local(kept[key]).shape == placement.local(parameter).shape


def test_an_optimizer_that_has_stepped_already_is_read_in_place() -> None:
    saved = pretend.save("fsdp2")
    with pretend.rank_of(0, 2):
        member = pretend.Member("fsdp2", seed=2)
        member.train(1)
        before = {id(kept["exp_avg"]._local_tensor) for kept in member.optimizer.state.values()}
        saved.restore(member.state, 0)
        assert {id(kept["exp_avg"]._local_tensor) for kept in member.optimizer.state.values()} == before


def test_training_goes_on_where_it_was() -> None:
    """The third step after a restore is the third step without one."""
    saved, straight, resumed = pretend.save("fsdp2"), pretend.save("fsdp2", steps=3), pretend.Checkpoint()
    for rank in range(2):
        with pretend.rank_of(rank, 2):
            member = pretend.Member("fsdp2", seed=2)
            saved.restore(member.state, rank)
            member.train(1)
            resumed.add(member.state)
    assert resumed.tensors() == straight.tensors()
    assert resumed.documents == straight.documents
