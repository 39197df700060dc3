"""Checkpoints that do not fit the live state, and documents made to do harm: refused, and nothing live has
changed."""

from __future__ import annotations

import copy
import json
import logging
from typing import Any

import pytest
import torch
from torch.optim import lr_scheduler

from helpers.models.roundtrip import FakeTracker, Saved
from lastcall import errors
from lastcall.adapters.torch.state.entries import StateSet
from lastcall.formats.safetensors import Stored

# ---- what does not fit ----


def _snapshot(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return copy.deepcopy(dict(model.state_dict()))


@pytest.mark.parametrize(
    ("other", "said"),
    [
        (
            lambda: torch.nn.Linear(4, 3),
            r"model\.weight: its shape is \(2, 4\) in the checkpoint and \(3, "
            r"4\) now",
        ),
        (
            lambda: torch.nn.Linear(4, 2, dtype=torch.bfloat16),
            r"model\.weight: its dtype is "
            r"torch.float32.*bfloat16",
        ),
        (lambda: torch.nn.Linear(4, 2, bias=False), r"1 only in the checkpoint \(bias\)"),
        (
            lambda: torch.nn.Sequential(torch.nn.Linear(4, 2)),
            r"2 that the checkpoint does not have \(0\.bias, 0\.weight\)",
        ),
        (lambda: {"a": 1}, r"model: the checkpoint holds the state of an nn.Module, and there is a dict now"),
        (
            lambda: torch.optim.SGD([torch.ones(1)]),
            r"holds the state of an nn.Module, and there is a SGD now",
        ),
    ],
)
def test_another_model_is_refused_before_anything_is_changed(other: Any, said: str) -> None:
    saved = Saved(StateSet({"first": torch.nn.Linear(3, 3), "model": torch.nn.Linear(4, 2)}))
    first = torch.nn.Linear(3, 3)
    before = _snapshot(first)
    with pytest.raises(errors.MismatchError, match=said):
        saved.restore(StateSet({"first": first, "model": other()}))
    assert all(torch.equal(first.state_dict()[name], value) for name, value in before.items())


def test_a_value_where_an_object_is_now_is_refused() -> None:
    saved = Saved(StateSet({"x": {"a": 1}}))
    with pytest.raises(errors.MismatchError, match=r"x: there is an nn.Module now.*holds a dict"):
        saved.restore(StateSet({"x": torch.nn.Linear(1, 1)}))


def test_another_optimizer_is_refused() -> None:
    model = torch.nn.Linear(4, 2)
    saved = Saved(StateSet({"optimizer": torch.optim.SGD(model.parameters())}))
    with pytest.raises(errors.MismatchError, match="state of a SGD, and it is a AdamW now"):
        saved.restore(StateSet({"optimizer": torch.optim.AdamW(model.parameters())}))
    with pytest.raises(errors.MismatchError, match=r"parameter groups of \[1\] now, and of \[2\]"):
        saved.restore(StateSet({"optimizer": torch.optim.SGD([model.weight])}))


def test_parameters_given_to_the_optimizer_in_another_order_are_noticed() -> None:
    model = torch.nn.Linear(4, 2)
    optimizer = torch.optim.SGD([model.weight, model.bias], momentum=0.9)
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    saved = Saved(StateSet({"optimizer": optimizer}))
    with pytest.raises(errors.MismatchError, match="another order"):
        saved.restore(StateSet({"optimizer": torch.optim.SGD([model.bias, model.weight], momentum=0.9)}))


def test_another_scheduler_is_refused() -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))])
    saved = Saved(StateSet({"scheduler": lr_scheduler.StepLR(optimizer, 3)}))
    with pytest.raises(errors.MismatchError, match="StepLR, and it is a LinearLR now"):
        saved.restore(StateSet({"scheduler": lr_scheduler.LinearLR(optimizer)}))


def test_an_object_that_will_not_load_says_which_it_was() -> None:
    class Picky:
        def state_dict(self) -> dict[str, int]:
            return {"a": 1}

        def load_state_dict(self, state: dict[str, int]) -> None:
            raise KeyError("b")

    saved = Saved(StateSet({"extra": {"picky": Picky()}}))
    with pytest.raises(
        errors.MismatchError,
        match=r"extra\['picky'\] does not take the saved state: "
        r"KeyError: 'b'",
    ):
        saved.restore(StateSet({"extra": {"picky": Picky()}}))


def test_names_that_came_and_went_are_said_and_left_alone(caplog: pytest.LogCaptureFixture) -> None:
    saved = Saved(StateSet({"old": 1, "kept": 2}))
    fresh = StateSet({"kept": 0, "new": 7})
    with caplog.at_level(logging.WARNING, "lastcall"):
        saved.restore(fresh)
    assert fresh.values == {"kept": 2, "new": 7}
    assert "'new'" in caplog.text and "'old'" in caplog.text


def test_an_object_in_a_container_that_the_checkpoint_does_not_know_stays() -> None:
    saved = Saved(StateSet({"extra": {"n": 1}}))
    module = torch.nn.Linear(1, 1)
    extra = {"n": 2, "module": module, "m": 3}
    saved.restore(StateSet({"extra": extra}), lenient=True)
    assert extra == {"n": 1, "module": module}


# ---- hostile documents ----

REF = {
    "$": "tensor",
    "g": "x",
    "n": "value",
    "dtype": "float32",
    "shape": [2],
    "device": "cpu",
    "kind": "torch",
}
STORED = {"x": {"value": Stored("F32", (2,), 0, 8)}}


@pytest.mark.parametrize(
    "document",
    [
        {},
        {"state": 7},
        {"state": {"x": {**REF, "n": "other"}}},
        {"state": {"x": {**REF, "g": "../x"}}},
        {"state": {"x": {**REF, "g": 1}}},
        {"state": {"x": {**REF, "shape": [1 << 40]}}},
        {"state": {"x": {**REF, "shape": [-2]}}},
        {"state": {"x": {**REF, "shape": "ab"}}},
        {"state": {"x": {**REF, "shape": [True, 2]}}},
        {"state": {"x": {**REF, "dtype": "float64"}}},
        {"state": {"x": {**REF, "dtype": "save"}}},
        {"state": {"x": {**REF, "dtype": {}}}},
        {"state": {"x": {**REF, "device": "no such device"}}},
        {"state": {"x": {**REF, "kind": "pickle"}}},
        {"state": {"x": {**REF, "shape": [4], "dense": [2]}}},
        {"state": {"x": {**REF, "kind": "numpy", "dtype": "|O"}}},
        {"state": {"x": {**REF, "kind": "numpy", "dtype": "<f8"}}},
        {"state": {"x": {"$": "tensor"}}},
        {"state": {"x": {"$": "numpy", "dtype": "<f8", "hex": "00"}}},
        {"state": {"x": {"$": "numpy", "dtype": "<f8", "hex": "zz"}}},
        {"state": {"x": {"$": "torch.Size", "v": [None]}}},
        {"state": {"x": {"$": "torch.device", "v": "?"}}},
        {"state": {"x": {"$": "eval", "v": "1"}}},
        {"state": {"m": {"$": "module"}}},
        {"state": {"m": {"$": "module", "tensors": [["weight", 5]], "others": [], "versions": []}}},
        {"state": {"m": {"$": "module", "tensors": [["weight"]], "others": [], "versions": []}}},
        {"state": {"m": {"$": "module", "tensors": [["w", REF], ["w", REF]], "others": [], "versions": []}}},
        {"state": {"m": {"$": "module", "tensors": [], "others": {"a": 1}, "versions": []}}},
        {
            "state": {
                "o": {"$": "optimizer", "class": "SGD", "sizes": [1], "groups": [{}], "state": [[9, []]]}
            }
        },
        {
            "state": {
                "o": {"$": "optimizer", "class": "SGD", "sizes": [1], "groups": [{}], "state": [["0", []]]}
            }
        },
        {"state": {"o": {"$": "optimizer", "class": "SGD", "sizes": [1], "groups": 7, "state": []}}},
        {"state": {"o": {"$": "optimizer", "class": "SGD", "sizes": [1], "groups": [], "state": []}}},
        {"state": {"l": {"$": "loader", "v": 1}}},
    ],
)
def test_hostile_documents_are_refused(document: dict[str, Any]) -> None:
    loader = object()
    live = {
        "x": torch.zeros(2),
        "m": torch.nn.Linear(1, 1),
        "o": torch.optim.SGD([torch.nn.Parameter(torch.ones(1))]),
        "l": loader,
    }
    wanted = document.get("state")
    kept = {name: value for name, value in live.items() if not isinstance(wanted, dict) or name in wanted}
    state = StateSet(kept, {id(loader): FakeTracker(0)})
    with pytest.raises(errors.CheckpointError):
        state.prepare(json.loads(json.dumps(document)), STORED).finish()
