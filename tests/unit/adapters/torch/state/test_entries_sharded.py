"""DTensors and replicated parameters in a capture: what is on the shelf, under which name, and when it is
looked for again."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.nn.parallel import DistributedDataParallel

from helpers.models import pretended_ranks as pretend
from helpers.models.roundtrip import read
from lastcall import errors, types
from lastcall.adapters.torch.distributed import placement
from lastcall.adapters.torch.state import structure
from lastcall.adapters.torch.state.entries import StateSet
from lastcall.adapters.torch.tensors import tensors


@pytest.fixture
def second() -> Iterator[None]:
    """The second rank of two."""
    with pretend.rank_of(1, 2):
        yield


def entries(state: StateSet, small: object = None) -> dict[str, types.TensorEntry]:
    _, groups = state.capture(small)
    return {f"{group.name}/{entry.name}": entry for group in groups for entry in group.entries}


def addresses(found: dict[str, types.TensorEntry]) -> dict[str, int]:
    return {name: entry.source.address for name, entry in found.items()}  # type: ignore[attr-defined]


# ---- fully_shard -------------------------------------------------------------------------------------------


def test_a_sharded_module_is_a_plain_one(second: None) -> None:
    """Before its first forward and after it, when it has all its hooks: state_dict() is never called for
    it."""
    member = pretend.Member("fsdp2", seed=1)
    for _ in range(2):
        found = structure.Structure(member.model)
        assert found.plain and found.loads_plainly
        member.model(torch.randn(4, 6)).sum().backward()
    document, _ = member.state.capture()
    assert document["state"]["model"]["class"] == "Sequential"  # type: ignore[index]


def test_a_capture_between_forward_and_backward_reads_the_shards(second: None) -> None:
    member = pretend.Member("fsdp2", seed=1)
    before = addresses(entries(member.state))
    index = member.state._index
    loss = member.model(torch.randn(4, 6)).sum()
    assert not placement.is_dtensor(next(member.model[2].parameters())), (
        "the root keeps what it has gathered until backward"
    )  # type: ignore[index]
    assert addresses(entries(member.state)) == before
    assert member.state._index is index, (
        "the index was made anew because the module held other tensors for a moment"
    )
    loss.backward()
    assert addresses(entries(member.state)) == before


def test_a_state_that_is_first_seen_between_forward_and_backward_is_the_sharded_one(second: None) -> None:
    member = pretend.Member("fsdp2", seed=1)
    before = addresses(entries(member.state))
    with torch.no_grad():
        member.model(torch.randn(4, 6))  # after an evaluation there is no backward that would shard it again
    late = StateSet({"model": member.model, "optimizer": member.optimizer})
    assert addresses(entries(late)) == before
    assert all(entry.share is not None for name, entry in entries(late).items() if "weight" in name)
    assert {id(tensor) for tensor in late.tensors()} == {id(tensor) for tensor in member.state.tensors()}


def test_a_module_whose_shards_belong_to_the_one_above_it_is_saved_as_shards(second: None) -> None:
    net: Any = pretend.spread(pretend.model(), "fsdp2")
    state = StateSet({"head": net[2]})
    before = addresses(entries(state))
    net(torch.randn(4, 6))
    assert addresses(entries(state)) == before
    assert addresses(entries(StateSet({"head": net[2]}))) == before


def test_a_parameter_that_was_replaced_is_looked_for_again(second: None) -> None:
    member = pretend.Member("fsdp2", seed=1)
    before = addresses(entries(member.state))
    member.model.double()
    now = entries(member.state)
    assert now["model/0.weight"].dtype == "F64" and addresses(now) != before


def test_tied_shards_have_one_name_on_a_rank_without_rows_too() -> None:
    class Tied(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = torch.nn.Linear(3, 3, bias=False), torch.nn.Linear(3, 3, bias=False)
            self.last.weight = self.first.weight
            self.other = torch.nn.Linear(3, 3, bias=False)

    names = []
    for rank in (0, 3):
        with pretend.rank_of(rank, 4):
            net = fully_shard(Tied(), mesh=pretend.mesh(4))
            names.append(list(entries(StateSet({"model": net}))))
    assert names == [["model/first.weight", "model/other.weight"]] * 2


def test_the_first_fsdp_is_refused_with_a_remedy() -> None:
    class FullyShardedDataParallel(torch.nn.Linear):
        pass

    with pytest.raises(errors.StateError, match=r"model: .*FSDP1.*fully_shard\(module\)"):
        StateSet({"model": torch.nn.Sequential(FullyShardedDataParallel(2, 2))})


def test_gradients_of_shards_are_shards_and_come_back(second: None) -> None:
    member, other = pretend.Member("fsdp2", seed=1), pretend.Member("fsdp2", seed=2)
    member.model(torch.randn(4, 6)).sum().backward()
    assert not member.state.hidden_gradients()
    group = member.state.gradients()
    assert group is not None and group.entries[0].name == "model.0.weight"
    assert group.entries[0].share == types.Share((10, 6), (5, 0), (1,))
    saved = pretend.Checkpoint()
    saved.add(member.state, grads=True)
    saved.restore(other.state, 0)
    for mine, theirs in zip(member.model.parameters(), other.model.parameters(), strict=True):
        assert mine.grad is not None and theirs.grad is not None and placement.is_dtensor(theirs.grad)
        assert torch.equal(placement.local(mine.grad), placement.local(theirs.grad))


def test_gradients_that_wait_inside_fully_shard_are_told_of(second: None) -> None:
    member = pretend.Member("fsdp2", seed=1)
    net: Any = member.model
    net.set_requires_gradient_sync(False)
    net(torch.randn(4, 6)).sum().backward()
    assert member.state.gradients() is None and member.state.hidden_gradients()


def test_partial_gradients_are_told_of(second: None) -> None:
    grid = pretend.mesh(2)
    weight = torch.nn.Parameter(DTensor.from_local(torch.ones(2), grid, [Replicate()], run_check=False))
    state = StateSet({"optimizer": torch.optim.SGD([weight], lr=0.1)})
    assert not state.hidden_gradients()
    weight.grad = DTensor.from_local(torch.ones(2), grid, [Partial()], run_check=False)
    assert state.hidden_gradients() and state.gradients() is None


# ---- DistributedDataParallel -------------------------------------------------------------------------------


def test_wrappers_do_not_show_in_names(second: None) -> None:
    net = pretend.model()
    wraps = [
        DistributedDataParallel(net, init_sync=False),
        torch.compile(DistributedDataParallel(net, init_sync=False), backend="eager"),
        DistributedDataParallel(torch.compile(net, backend="eager"), init_sync=False),  # type: ignore[arg-type]
    ]
    plain = json.dumps(StateSet({"model": net}).capture()[0])
    for wrapped in wraps:
        assert json.dumps(StateSet({"model": wrapped}).capture()[0]) == plain


def test_parameters_and_moments_are_shared_once_the_wrapper_is_found(second: None) -> None:
    member = pretend.Member("ddp", seed=1)
    member.train(1)
    member.state.replicated(placement.Replicas())
    assert member.state.holdings() == ()
    member.state.replicated(placement.replicas())
    assert member.state.holdings() == ((0, 1),)
    shared = {name for name, entry in entries(member.state).items() if entry.share is not None}
    assert {"model/0.weight", "optimizer/state.0.exp_avg"} <= shared
    assert not shared & {"model/1.running_mean", "optimizer/state.0.step"}, (
        "what may differ from rank to rank is own"
    )
    assert entries(member.state)["model/0.bias"].share == types.Share((10,), (0,), (0, 1))


def test_a_module_with_a_state_dict_of_its_own_is_shared_too(second: None) -> None:
    net = pretend.model()
    net.register_state_dict_post_hook(lambda module, state, prefix, metadata: None)
    wrapper = DistributedDataParallel(net, init_sync=False)
    state = StateSet({"model": wrapper})
    state.replicated(placement.replicas())
    found = entries(state)
    assert found["model/0.weight"].share == types.Share((10, 6), (0, 0), (0, 1))
    assert found["model/1.running_mean"].share is None


# ---- DTensors in other places ------------------------------------------------------------------------------


def test_copied_buffers_that_are_dtensors_keep_their_share(second: None) -> None:
    """Ten of them and plain ones: they are copied in one call, which does not take both."""
    grid = pretend.mesh(2)
    net = torch.nn.Module()
    for number in range(10):
        value = torch.full((4,), float(number))
        net.register_buffer(
            f"b{number}",
            DTensor.from_local(value, grid, [Replicate()], run_check=False) if number % 2 else value,
        )
    state = StateSet({"model": net})
    state.small()
    small = state.small()  # the second time, into the memory of the first
    for buffer in net.buffers():
        placement.local(buffer).fill_(-1)
    found = entries(state, small)
    assert found["model/b3"].share == types.Share((4,), (0,), (0, 1)) and found["model/b2"].share is None
    assert [read(found[f"model/b{n}"].source) for n in (2, 3)] == [
        torch.full((4,), float(n)).numpy().tobytes() for n in (2, 3)
    ]


def test_an_element_type_that_safetensors_lacks_is_shared_in_its_stored_shape(second: None) -> None:
    value = DTensor.from_local(
        torch.ones(2, 3, dtype=torch.complex128), pretend.mesh(2), [Shard(1)], run_check=False
    )
    entry = entries(StateSet({"extra": value}))["extra/value"]
    assert (entry.dtype, entry.shape, entry.share) == (
        "F64",
        (2, 3, 2),
        types.Share((2, 6, 2), (0, 3, 0), (1,)),
    )


def test_small_dtensors_in_containers_are_copied_at_a_boundary(second: None) -> None:
    value = DTensor.from_local(torch.ones(2), pretend.mesh(2), [Shard(0)], run_check=False)
    state = StateSet({"extra": {"ema": value}})
    small = state.small()
    placement.local(value).fill_(7)
    entry = entries(state, small)["extra/ema"]
    assert (
        entry.share == types.Share((4,), (2,), (1,)) and read(entry.source) == torch.ones(2).numpy().tobytes()
    )


def test_a_dtensor_that_cannot_be_saved_is_refused_by_name(second: None) -> None:
    value = DTensor.from_local(torch.ones(2), pretend.mesh(2), [Partial()], run_check=False)
    with pytest.raises(errors.StateError, match=r"extra\['sum'\]: a DTensor of partial sums cannot be saved"):
        StateSet({"extra": {"sum": value}})


def test_another_shape_of_the_whole_is_a_mismatch_even_where_the_piece_fits() -> None:
    with pretend.rank_of(0, 2):
        saved = pretend.Checkpoint()
        saved.add(StateSet({"model": fully_shard(torch.nn.Linear(2, 4), mesh=pretend.mesh(2))}))
    with pretend.rank_of(0, 4):
        other = StateSet({"model": fully_shard(torch.nn.Linear(2, 8), mesh=pretend.mesh(4))})
        with pytest.raises(
            errors.MismatchError,
            match=r"weight: its shape is \(4, 2\) in the checkpoint and "
            r"\(8, 2\) now",
        ):
            saved.restore(other, 0)


def test_factors_of_moments_come_back_as_dtensors(second: None) -> None:
    """Optimizers do not mix DTensors with plain tensors: what was one is one again, also where it has not the
    parameter's shape."""

    def build(value: float) -> tuple[StateSet, torch.optim.Optimizer]:
        net = fully_shard(torch.nn.Linear(3, 4, bias=False), mesh=pretend.mesh(2))
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        if value:
            mesh = net.weight.device_mesh  # type: ignore[union-attr]
            optimizer.state[net.weight]["row"] = DTensor.from_local(
                torch.full((4, 1), value), mesh, [Replicate()], run_check=False
            )
        return StateSet({"optimizer": optimizer}), optimizer

    saved = pretend.Checkpoint()
    saved.add(build(5.0)[0])
    state, optimizer = build(0.0)
    saved.restore(state, 0)
    (kept,) = optimizer.state.values()
    assert placement.is_dtensor(kept["row"]) and kept["row"].placements == (Replicate(),)
    assert torch.equal(placement.local(kept["row"]), torch.full((4, 1), 5.0))


def test_one_stored_tensor_may_go_to_several_pieces(second: None) -> None:
    grid = pretend.mesh(2)
    shared = DTensor.from_local(torch.ones(2), grid, [Shard(0)], run_check=False)
    saved = pretend.Checkpoint()
    saved.add(StateSet({"extra": [shared, shared, shared]}))
    lives = [DTensor.from_local(torch.zeros(2), grid, [Shard(0)], run_check=False) for _ in range(3)]
    loading = saved.restore(StateSet({"extra": lives}), 0)
    (target,) = loading.targets["extra"].values()
    assert isinstance(target, tensors.Several) and len(target.targets) == 3
    assert all(isinstance(one, types.Region) and one.offset == (2,) for one in target.targets)
    assert all(torch.equal(placement.local(live), torch.ones(2)) for live in lives)
