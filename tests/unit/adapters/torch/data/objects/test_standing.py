"""What samplers held when a pass began stands in until the pass is over."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset, WeightedRandomSampler

from lastcall.adapters.torch.data import loaders
from lastcall.adapters.torch.data.objects import graph, leaves, standing

COUNT = 16


class Holder:
    value: Any
    weights: Any
    level: Any
    epoch: int

    def __init__(self, **values: Any) -> None:
        self.__dict__.update(values)

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch


def held(sampler: Any) -> Any:
    return {path: leaves.freeze(leaf.value) for path, leaf in found(sampler).items()}


def found(sampler: Any) -> dict[graph.Path, graph.Leaf]:
    return graph.walk({"sampler": sampler})[0]


def put(before: Any, sampler: Any) -> standing.Undo:
    return standing.put(standing.of(held(before)).items(), found(sampler))


@pytest.mark.parametrize(
    ("before", "now"),
    [(0.5, 0.7), (3, 4), ([1.0, 2.0], [1.0, 3.0]), ({"easy": 0.1}, {"easy": 0.2})],
    ids=["float", "int", "list", "dict"],
)
def test_numbers_stand_in_and_are_given_back(before: Any, now: Any) -> None:
    sampler = Holder(value=now)
    undo = put(Holder(value=before), sampler)
    assert sampler.value == before
    undo()
    assert sampler.value is now


def test_a_tensor_that_the_script_holds_too_is_not_written_to() -> None:
    weights = torch.ones(3)
    sampler = Holder(weights=weights)
    undo = put(Holder(weights=torch.zeros(3)), sampler)
    assert sampler.weights.tolist() == [0, 0, 0] and weights.tolist() == [1, 1, 1]
    undo()
    assert sampler.weights is weights


@pytest.mark.parametrize("value", ["/tmp/a", True, None, ["a", 1], b"x"], ids=repr)
def test_texts_and_switches_are_left_alone(value: Any) -> None:
    assert not standing.of(held(Holder(value=value)))


def test_what_a_dataset_holds_is_left_alone() -> None:
    assert not standing.of({("dataset", ".level"): leaves.freeze(0.5)})


def test_globals_and_classes_are_left_alone() -> None:
    frozen = leaves.freeze(0.5)
    paths = [("sampler", ".__class__(Own)", ".level"), ("sampler", ".draw", "<level>")]
    assert not standing.of(dict.fromkeys(paths, frozen))


def test_an_epoch_that_is_told_and_another_kind_of_value_are_left_alone() -> None:
    sampler = Holder(epoch=4, value=[1.0])
    put(Holder(epoch=3, value=2.0), sampler)
    assert sampler.epoch == 4 and sampler.value == [1.0]


def test_what_is_set_during_the_pass_is_not_given_back() -> None:
    sampler = Holder(level=0.7)
    undo = put(Holder(level=0.5), sampler)
    sampler.level = 0.9
    undo()
    assert sampler.level == 0.9


def weighted(weights: torch.Tensor, batch_size: int = 4) -> Any:
    sampler = WeightedRandomSampler(weights, COUNT, generator=torch.Generator().manual_seed(1))  # type: ignore[arg-type]
    return DataLoader(TensorDataset(torch.arange(COUNT)), batch_size, sampler=sampler)


def follow(loader: Any, state: Any = None, worlds: tuple[int, int] = (1, 1)) -> Any:
    tracker = loaders.track(loader)
    tracker.worlds = worlds
    tracker.attach()
    if state is not None:
        tracker.load(state)
    return tracker


def interrupted() -> tuple[Any, Any]:
    """The position behind two batches, and the rest."""
    tracker = follow(weighted(torch.ones(COUNT)))
    batches = iter(tracker.loader)
    next(batches), next(batches)
    state = tracker.state()
    return state, [batch[0].tolist() for batch in batches]


def test_the_interrupted_pass_is_drawn_with_its_own_weights(caplog: pytest.LogCaptureFixture) -> None:
    state, rest = interrupted()
    newer = torch.arange(1.0, COUNT + 1)
    loader = weighted(newer)
    with caplog.at_level(logging.INFO, "lastcall"):
        tracker = follow(loader, state)
        assert [batch[0].tolist() for batch in loader] == rest
    assert "`sampler.weights` differs" in caplog.text and not tracker.doubts
    assert loader.sampler.weights.tolist() == newer.tolist()  # the next pass is the script's


@pytest.mark.parametrize(("batch_size", "worlds"), [(8, (1, 1)), (4, (1, 2))])
def test_another_batch_size_or_world_has_the_script_s(batch_size: int, worlds: tuple[int, int]) -> None:
    loader = weighted(torch.arange(1.0, COUNT + 1), batch_size)
    follow(loader, interrupted()[0], worlds)
    batches = iter(loader)
    next(batches, None)
    assert loader.sampler.weights.tolist() == list(range(1, COUNT + 1))
