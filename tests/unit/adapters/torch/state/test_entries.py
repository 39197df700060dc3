from __future__ import annotations

import gc
import random
import threading
from typing import Any

import numpy as np
import pytest
import torch

from helpers.models import samples as training
from helpers.models.roundtrip import Saved, read
from lastcall import errors
from lastcall.adapters.torch.state import copies
from lastcall.adapters.torch.state.entries import StateSet
from lastcall.adapters.torch.tensors import strided


class NoLoad:
    def state_dict(self) -> dict[str, int]:
        return {}


class Holder:
    """An object whose state_dict() holds whatever it is given."""

    def __init__(self, **state: Any) -> None:
        self.state = state

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = state


class Meta(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin = torch.nn.Linear(2, 2, device="meta")


class FnExtra(torch.nn.Module):
    def get_extra_state(self) -> Any:
        return {"fn": len}


@pytest.mark.parametrize(
    ("state", "said"),
    [
        ({"extra": {"fn": lambda: 1}}, r"extra\['fn'\]: a function cannot be saved"),
        ({"extra": [1, {"x": object()}]}, r"extra\[1\]\['x'\]: .*state_dict\(\) and load_state_dict\(\)"),
        ({"thing": torch.nn.Linear}, r"thing: a class cannot be saved"),
        ({"scheduler": Holder(lambdas=[len])}, r"scheduler.state_dict\(\)\['lambdas'\]\[0\]: a function"),
        ({"thing": NoLoad()}, r"thing: a NoLoad has state_dict\(\) but no load_state_dict\(\)"),
        ({"model": Meta()}, r"model.state_dict\(\)\['lin.weight'\]: a tensor on the meta device"),
        (
            {"model": torch.nn.Sequential(FnExtra())},
            r"model.state_dict\(\)\['0._extra_state'\]\['fn'\]: a "
            r"function",
        ),
        ({"t": torch.eye(2).to_sparse()}, r"t: a sparse tensor"),
        ({"a": np.array([object()])}, r"a: a numpy array of Python objects"),
        ({"rng": random.SystemRandom()}, r"rng: a random.SystemRandom"),
        ({"grads": 1}, r"'grads' is used by lastcall itself"),
        ({"../x": 1}, r"'../x' names a file"),
        ({"": 1}, r"names a file"),
        ({"ä": 1}, r"names a file"),
        ({"data": iter([1])}, r"data: an iterator"),
    ],
)
def test_what_cannot_be_saved_is_refused_at_once_by_its_path(state: dict[str, Any], said: str) -> None:
    with pytest.raises(errors.StateError, match=said):
        StateSet(state)


def test_all_problems_are_named_together() -> None:
    with pytest.raises(errors.StateError, match=r"(?s)a: a function.*\n.*b: a function"):
        StateSet({"a": len, "b": print, "c": 1})


def test_a_state_that_contains_itself_is_refused() -> None:
    loop: list[Any] = []
    loop.append(loop)
    with pytest.raises(errors.StateError, match="contains itself"):
        StateSet({"extra": loop})
    holder = Holder()
    holder.state["me"] = holder
    with pytest.raises(errors.StateError):
        StateSet({"holder": holder})


def groups_of(state: StateSet, small: object = None) -> dict[str, Any]:
    return {group.name: group for group in state.capture(small)[1]}


def test_groups_ranks_and_names() -> None:
    model = training.model()
    optimizer = torch.optim.SGD(model.parameters(), momentum=0.9)
    state = {
        "model": model,
        "optimizer": optimizer,
        "extra": {"ema": torch.nn.Linear(2, 2), "t": [torch.ones(1)]},
    }
    training.step({"model": model, "optimizer": optimizer})
    found = groups_of(StateSet({**state, "one": torch.ones(2)}))
    assert {name: group.rank for name, group in found.items()} == {
        "model": 0,
        "optimizer": 2,
        "extra": 0,
        "one": 1,
    }
    assert [entry.name for entry in found["extra"].entries] == ["ema.weight", "ema.bias", "t.0"]
    assert [entry.name for entry in found["one"].entries] == ["value"]
    assert {entry.name for entry in found["model"].entries} == set(model.state_dict())
    assert found["optimizer"].entries[0].name == "state.0.momentum_buffer"


def test_names_are_unique_whatever_the_keys_are() -> None:
    state = StateSet(
        {"x": {"a.b": torch.ones(1), "a": {"b": torch.ones(2), 0: torch.ones(3), "0": torch.ones(4)}}}
    )
    saved = Saved(state)
    assert len(saved.names("x")) == 4
    fresh = StateSet({"x": {}})
    saved.restore(fresh)
    found: Any = fresh.values["x"]
    assert [len(t) for t in (found["a.b"], *found["a"].values())] == [1, 2, 3, 4]


def test_frozen_weights_get_a_file_of_their_own() -> None:
    model = training.model()
    model[0].requires_grad_(False)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad])
    found = groups_of(StateSet({"model": model, "optimizer": optimizer}))
    assert found["model.frozen"].frozen and {e.name for e in found["model.frozen"].entries} == {
        "0.weight",
        "0.bias",
    }
    assert not found["model"].frozen and "4.weight" in {entry.name for entry in found["model"].entries}


def test_a_frozen_weight_that_an_optimizer_holds_is_not_frozen() -> None:
    model = torch.nn.Linear(2, 2)
    model.weight.requires_grad_(False)
    assert "model.frozen" not in groups_of(
        StateSet({"model": model, "optimizer": torch.optim.SGD(model.parameters())})
    )


def test_weights_that_thaw_move_to_the_other_file() -> None:
    model = torch.nn.Linear(2, 2)
    model.requires_grad_(False)
    state = StateSet({"model": model})
    assert set(groups_of(state)) == {"model.frozen"}
    model.bias.requires_grad_(True)
    assert [e.name for e in groups_of(state)["model"].entries] == ["bias"]


def test_the_same_tensor_under_two_names_is_stored_once() -> None:
    model = torch.nn.Linear(3, 3)
    saved = Saved(StateSet({"extra": {"w": model.weight}, "model": model}))
    assert saved.names("extra") == [] and saved.names("model") == ["bias", "weight"]
    assert saved.document["state"]["extra"]["w"]["g"] == "model"


def test_overlapping_views_are_stored_separately() -> None:
    base = torch.arange(6.0)
    saved = Saved(StateSet({"x": [base, base[:3], base[3:]]}))
    assert saved.names("x") == ["0", "1", "2"]


# ---- captures are cached, and never stale ----


def _change_data(model: Any) -> None:
    model[0].weight.data = torch.full((8, 6), 3.0)


def _change_parameter(model: Any) -> None:
    model[0].weight = torch.nn.Parameter(torch.full((8, 6), 4.0))


def _change_buffer(model: Any) -> None:
    model[1].running_mean = torch.full((8,), 5.0)


def _change_module(model: Any) -> None:
    model[4] = torch.nn.Linear(8, 9)


def _add_module(model: Any) -> None:
    model.append(torch.nn.Linear(3, 1))


def _add_buffer(model: Any) -> None:
    model[0].register_buffer("new", torch.ones(1))


def _transpose(model: Any) -> None:
    model[0].weight.data = torch.randn(6, 8).t()


@pytest.mark.parametrize(
    "change",
    [_change_data, _change_parameter, _change_buffer, _change_module, _add_module, _add_buffer, _transpose],
)
def test_a_capture_sees_every_change_of_a_module(change: Any) -> None:
    model = training.model()
    state = StateSet({"model": model})
    Saved(state)
    change(model)
    saved = Saved(state)
    assert set(saved.names("model")) == set(model.state_dict())
    for name, tensor in model.state_dict().items():
        assert saved.data["model"][name] == tensor.contiguous().numpy().tobytes(), name


def test_a_capture_sees_every_change_of_an_optimizer() -> None:
    model = training.model()
    optimizer = torch.optim.AdamW(model[0].parameters())
    live = {"model": model, "optimizer": optimizer}
    state = StateSet(live)
    assert Saved(state).names("optimizer") == []
    training.step(live)
    assert len(Saved(state).names("optimizer")) == 6
    optimizer.add_param_group({"params": model[4].parameters(), "lr": 0.5})
    training.step(live)
    saved = Saved(state)
    assert len(saved.names("optimizer")) == 12 and saved.document["state"]["optimizer"]["sizes"] == [2, 2]
    optimizer.state[model[0].weight]["exp_avg"] = torch.full((8, 6), 7.0)
    assert Saved(state).data["optimizer"]["state.0.exp_avg"] == torch.full((8, 6), 7.0).numpy().tobytes()
    optimizer.load_state_dict(optimizer.state_dict())
    training.step(live)
    wanted = optimizer.state[model[0].weight]["exp_avg"].numpy().tobytes()
    assert Saved(state).data["optimizer"]["state.0.exp_avg"] == wanted


def test_modules_that_come_and_go_in_containers_are_followed() -> None:
    extra: dict[str, Any] = {"a": torch.nn.Linear(1, 1)}
    state = StateSet({"extra": extra})
    assert Saved(state).names("extra") == ["a.bias", "a.weight"]
    extra["b"] = torch.nn.Linear(1, 1)
    assert Saved(state).names("extra") == ["a.bias", "a.weight", "b.bias", "b.weight"]
    del extra["a"]
    assert Saved(state).names("extra") == ["b.bias", "b.weight"]
    assert Saved(state).names("extra") == ["b.bias", "b.weight"]


def test_repeated_captures_use_the_same_entries() -> None:
    model = training.model()
    state = StateSet({"model": model})
    first, second = groups_of(state)["model"], groups_of(state)["model"]
    assert all(one is other for one, other in zip(first.entries, second.entries, strict=True))


def test_a_number_put_into_values_is_what_is_saved() -> None:
    state = StateSet({"best": 0.1})
    state.values["best"] = 0.9
    assert Saved(state).document["state"]["best"] == 0.9


def test_the_garbage_collector_is_left_as_it_was() -> None:
    state = StateSet({"x": 1})
    state.capture()
    assert gc.isenabled()
    gc.disable()
    try:
        state.capture()
        assert not gc.isenabled()
    finally:
        gc.enable()


# ---- boundary copies ----


def _everything() -> training.State:
    model = training.model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    return {
        "model": model,
        "optimizer": optimizer,
        "scheduler": torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5),
        "extra": {"n": 1, "t": torch.zeros(3), "a": np.zeros(3), "p": torch.nn.Parameter(torch.zeros(2))},
    }


def test_a_copy_holds_the_small_state_of_its_boundary_while_training_goes_on() -> None:
    torch.manual_seed(0)
    live = _everything()
    state = StateSet(live)
    training.step(live)
    wanted = Saved(state)
    copied = state.small()
    live["model"](torch.randn(5, 6))  # BatchNorm moves outside the optimizer
    live["scheduler"].step()
    live["extra"]["n"] = 2
    live["extra"]["t"] += 1
    live["extra"]["a"] += 1
    with torch.no_grad():
        live["extra"]["p"] += 1
    assert Saved(state).data["model"] != wanted.data["model"]
    rescued = Saved(state, copied)
    assert (rescued.text, rescued.data) == (wanted.text, wanted.data)


def test_large_tensors_are_read_live_and_small_ones_from_the_copy() -> None:
    large, small = torch.zeros(copies.LARGE // 4), torch.zeros(10)
    state = StateSet({"x": [large, small]})
    copied = state.small()
    large += 1
    small += 1
    saved = Saved(state, copied)
    assert saved.data["x"]["0"] == large.numpy().tobytes() and saved.data["x"]["1"] == bytes(40)


def test_copies_of_large_buffers_stop_at_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    from lastcall.adapters.torch.state import modules

    monkeypatch.setattr(modules, "COPY_LIMIT", 100)
    model = torch.nn.Module()
    model.register_buffer("small", torch.zeros(10))
    model.register_buffer("large", torch.zeros(1000))
    state = StateSet({"model": model})
    copied = state.small()
    model.get_buffer("small").add_(1)
    model.get_buffer("large").add_(1)
    saved = Saved(state, copied)
    assert saved.data["model"]["small"] == bytes(40)
    assert saved.data["model"]["large"] == model.get_buffer("large").numpy().tobytes()


@pytest.mark.parametrize("count", [2, 20])
def test_a_copy_that_is_still_held_is_never_overwritten_by_later_ones(count: int) -> None:
    model = torch.nn.Sequential(*(torch.nn.BatchNorm1d(3) for _ in range(count)))
    state = StateSet({"model": model})
    for value in range(3):
        model[0].running_mean.fill_(float(value))
        state.small()
    groups = groups_of(state, state.small())
    entry = next(entry for entry in groups["model"].entries if entry.name == "0.running_mean")
    for value in range(3, 9):  # the copy itself is gone by now; only the entry refers to its memory
        model[0].running_mean.fill_(float(value))
        state.small()
    assert read(entry.source) == torch.full((3,), 2.0).numpy().tobytes()


def test_the_memory_of_copies_is_used_again() -> None:
    model = torch.nn.Sequential(*(torch.nn.BatchNorm1d(3) for _ in range(5)))
    state = StateSet({"model": model})
    addresses = set()
    for _ in range(6):
        held: Any = state.small()
        addresses.add(held["model"].copied.lease.tensors[0].data_ptr())
    assert len(addresses) <= 2


def test_a_buffer_that_was_exchanged_for_another_shape_is_copied_right() -> None:
    model = torch.nn.Module()
    model.register_buffer("grows", torch.ones(1))
    state = StateSet({"model": model})
    copied = state.small()
    state.small()
    model.grows = torch.full((3,), 2.0)
    later = state.small()
    assert Saved(state, later).data["model"]["grows"] == torch.full((3,), 2.0).numpy().tobytes()
    assert Saved(state, copied).data["model"]["grows"] == torch.ones(1).numpy().tobytes()


def test_a_capture_from_a_copy_may_run_on_another_thread() -> None:
    live = _everything()
    state = StateSet(live)
    training.step(live)
    copied, wanted, found = state.small(), Saved(state), []
    thread = threading.Thread(target=lambda: found.append(Saved(state, copied)))
    thread.start()
    thread.join()
    assert found[0].data == wanted.data and found[0].text == wanted.text


def test_expanded_tensors_stay_expanded_in_copies() -> None:
    tensor = torch.arange(3.0).reshape(3, 1).expand(3, 100_000)
    state = StateSet({"x": {"t": tensor, "few": torch.ones(1).expand(9)}})
    for small in (None, state.small()):
        saved = Saved(state, small)
        assert saved.stored["x"]["t"].shape == (3, 1) and saved.stored["x"]["few"].shape == (1,)
        fresh = StateSet({"x": {}})
        saved.restore(fresh)
        assert torch.equal(fresh.values["x"]["t"], tensor)  # type: ignore[index]


def test_tensors_names_what_a_rescue_reads_live() -> None:
    live = _everything()
    big = torch.zeros(copies.LARGE)
    state = StateSet({**live, "big": {"b": big}})
    training.step(live)
    found = {id(tensor) for tensor in state.tensors()}
    assert {id(p) for p in live["model"].parameters()} <= found and id(big) in found
    assert id(live["optimizer"].state[live["model"][0].weight]["exp_avg"]) in found
    assert id(live["model"][1].running_mean) not in found and id(live["extra"]["t"]) not in found


def test_a_strided_parameter_is_read_piece_by_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(strided, "PIECE", 128)
    model = torch.nn.Module()
    model.register_parameter("w", torch.nn.Parameter(torch.randn(30, 40).t()))
    saved = Saved(StateSet({"model": model}))
    assert saved.data["model"]["w"] == model.get_parameter("w").detach().contiguous().numpy().tobytes()
