"""A data position in a world of another size: the same samples of the epoch where that is possible, and a
loud word where it is not."""

from __future__ import annotations

import itertools
import logging
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    Sampler,
    TensorDataset,
)

from lastcall.adapters.torch.data import loaders as data
from lastcall.adapters.torch.data.rescaling import rescaled
from lastcall.formats import tree

SAMPLES = 48


class Numbers(Dataset[int]):
    def __init__(self, size: int = SAMPLES) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> int:
        return index


def loader(
    rank: int,
    world: int,
    batch: int,
    *,
    size: int = SAMPLES,
    batched: bool = False,
    workers: int = 0,
    **more: Any,
) -> Any:
    numbers = Numbers(size)
    sampler: Any = DistributedSampler(numbers, world, rank, **{"seed": 3, **more})
    sampler.set_epoch(2)
    if batched:
        return DataLoader(numbers, batch_sampler=BatchSampler(sampler, batch, drop_last=False))
    return DataLoader(numbers, batch_size=batch, sampler=sampler, num_workers=workers)


def taken(made: Any, batches: int) -> tuple[list[int], dict[str, Any]]:
    """The samples of the first batches, and the position behind them, as it comes back from a checkpoint."""
    tracker = data.track(made)
    tracker.attach()
    running = iter(made)  # a pass whose iterator is gone was left
    used = [index for batch in itertools.islice(running, batches) for index in batch.tolist()]
    document = tree.encode(tracker.state(), "data", tree.refuse)
    tracker.detach()
    found: Any = tree.decode(document, tree.refuse_tag)
    return used, found


def rest(made: Any, state: dict[str, Any], worlds: tuple[int, int]) -> list[int]:
    tracker = data.track(made)
    tracker.attach()
    tracker.worlds = worlds
    tracker.load(state)
    left = [index for batch in made for index in batch.tolist()]
    tracker.detach()
    return left


def across(
    old: int, batch: int, batches: int, new: int, batch_now: int, **more: Any
) -> tuple[Counter[int], list[str]]:
    """How often each sample of the epoch is used when the world changes in the middle of it, and what is
    told."""
    used: Counter[int] = Counter()
    states = []
    for rank in range(old):
        samples, state = taken(loader(rank, old, batch, **more), batches)
        used.update(samples)
        states.append(state)
    told = []
    for rank in range(new):
        made = loader(rank, new, batch_now, **more)
        state = states[rank] if rank < old else states[0]
        told.append(rescaled(state, made, old, new)[1])
        used.update(rest(made, state, (old, new)))
    return used, told


@pytest.mark.parametrize("batched", [False, True])
@pytest.mark.parametrize(
    ("old", "batch", "batches", "new", "batch_now"),
    [(2, 4, 3, 1, 4), (1, 4, 4, 4, 4), (4, 2, 3, 2, 4), (2, 4, 3, 3, 2), (4, 3, 1, 2, 6)],
)
def test_every_sample_of_the_epoch_is_used_once_where_whole_batches_fit(
    old: int, batch: int, batches: int, new: int, batch_now: int, batched: bool
) -> None:
    used, told = across(old, batch, batches, new, batch_now, batched=batched)
    assert used == Counter(range(SAMPLES))
    assert set(told) == {""}


def test_it_works_with_worker_processes() -> None:
    made = loader(0, 2, 4, workers=1)
    _, state = taken(made, 3)
    assert rest(loader(0, 1, 4, workers=1), state, (2, 1)) == rest(loader(0, 1, 4), state, (2, 1))


@pytest.mark.parametrize("more", [{"shuffle": False}, {"drop_last": True}])
def test_the_other_settings_of_the_sampler_do_not_matter_when_they_stay(more: dict[str, Any]) -> None:
    used, told = across(2, 4, 3, 4, 2, **more)
    assert used == Counter(range(SAMPLES))
    assert set(told) == {""}


def test_a_position_between_whole_batches_is_rounded_down_and_told(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "lastcall"):
        used, told = across(2, 5, 1, 1, 4)
    assert set(used) == set(range(SAMPLES))
    assert sorted(used.values()) == [1] * (SAMPLES - 2) + [2] * 2
    assert "used 10 samples" in told[0]
    assert "no multiple of 1 ranks x batch_size=4" in told[0]
    assert "the 2 samples from there on are repeated" in told[0]
    assert told[0] in caplog.text


def test_a_pass_whose_last_batch_was_delivered_stays_at_its_end() -> None:
    for old, new in ((2, 1), (1, 4)):
        _, state = taken(loader(0, old, 7), -(-SAMPLES // old // 7))
        assert state["phase"] == "inside"
        for rank in range(new):
            made = loader(rank, new, 7)
            assert rescaled(state, made, old, new)[1] == ""
            assert rest(made, state, (old, new)) == []


def test_a_position_may_change_its_world_twice() -> None:
    first, state = taken(loader(0, 2, 4), 3)
    other, _ = taken(loader(1, 2, 4), 3)
    made = loader(0, 1, 4)
    tracker = data.track(made)
    tracker.attach()
    tracker.worlds = (2, 1)
    tracker.load(state)
    unused = tracker.state()  # not taken up yet
    batches = iter(made)
    middle = [index for _ in range(2) for index in next(batches).tolist()]
    state = tracker.state()
    tracker.detach()
    assert (unused["delivered"], state["delivered"]) == (6, 8)
    last = [index for rank in range(4) for index in rest(loader(rank, 4, 4), state, (1, 4))]
    assert Counter(first + other + middle + last) == Counter(range(SAMPLES))


def test_without_a_distributed_sampler_the_position_stays() -> None:
    made = DataLoader(Numbers(), batch_size=4, shuffle=True, generator=torch.Generator().manual_seed(1))
    _, state = taken(made, 3)
    assert rescaled(state, made, 2, 4) == (state, "")


def test_between_two_passes_nothing_is_recomputed() -> None:
    made = loader(0, 2, 4)
    assert rescaled(data.track(made).state(), made, 2, 1)[1] == ""
    _, state = taken(made, 100)
    assert state["phase"] == "between"
    assert rescaled(state, loader(0, 1, 4), 2, 1) == (state, "")


def test_the_same_world_stays_as_it_is_unless_its_ranks_share_the_data_otherwise() -> None:
    _, state = taken(loader(0, 2, 4), 2)
    assert rescaled(state, data.track(loader(0, 2, 4)), 2, 2) == (state, "")
    # pairs of ranks share a model now, and take the same samples
    moved, told = rescaled(state, loader(0, 1, 4), 2, 2)
    assert (moved["delivered"], told) == (4, "")


@pytest.mark.parametrize("change", [{"seed": 4}, {"shuffle": False}, {"drop_last": True}, {"size": 47}])
def test_another_order_begins_the_epoch_again_and_is_told(change: dict[str, Any]) -> None:
    _, state = taken(loader(0, 2, 4), 3)
    made = loader(0, 1, 4, **change)
    moved, told = rescaled(state, made, 2, 1)
    assert (moved["delivered"], moved["failed"]) == (0, 0)
    assert "48 samples, seed=3, shuffle=True, drop_last=False" in told
    assert "the 3 batches that each rank was given" in told
    assert len(rest(made, state, (2, 1))) == change.get("size", SAMPLES)


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(SAMPLES))


class Own(Sampler[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(SAMPLES))

    def __len__(self) -> int:
        return SAMPLES


class Backwards(DistributedSampler[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(sorted(super().__iter__(), reverse=True))


@pytest.mark.parametrize(
    "made",
    [
        DataLoader(Stream(), batch_size=4),
        DataLoader(Numbers(), batch_size=4, sampler=Own()),
        DataLoader(Numbers(), batch_size=4, sampler=Backwards(Numbers(), 1, 0)),
    ],
    ids=["iterable", "sampler of the user's own", "distributed sampler with an order of its own"],
)
def test_what_is_not_known_begins_its_epoch_again_and_is_told(made: Any) -> None:
    used, state = taken(made, 3)
    _, told = rescaled(state, made, 4, 2)
    assert "The data position of 4 ranks cannot be resumed on 2" in told
    assert "3 batches" in told
    assert rest(made, state, (4, 2))[: len(used)] == used


def test_a_loader_that_has_lost_its_distributed_sampler_begins_again() -> None:
    _, state = taken(loader(0, 2, 4), 3)
    made = DataLoader(Numbers(), batch_size=4)
    assert "DistributedSampler" in rescaled(state, made, 2, 1)[1]
    assert rest(made, state, (2, 1)) == list(range(SAMPLES))


def test_a_position_saved_before_worlds_could_change_is_still_read() -> None:
    made = DataLoader(TensorDataset(torch.arange(8)), batch_size=2)
    tracker = data.track(made)
    tracker.attach()
    running = iter(made)
    next(running)
    state = {key: value for key, value in tracker.state().items() if key != "sampler"}
    tracker.load(state)
    assert tracker.delivered == 1
    assert rescaled(state, made, 1, 2) == (state, "")


def test_a_stateful_loader_begins_its_epoch_again_and_is_told() -> None:
    state = {
        "kind": "stateful-loader",
        "version": 1,
        "inner": {"_num_yielded": 5, "_iterator_finished": False},
        "generators": (),
    }
    moved, told = rescaled(state, object(), 2, 4)
    assert moved["inner"] is None
    assert "the 5 batches that each rank was given" in told
    assert rescaled(state, object(), 2, 2) == (state, "")
    finished = {**state, "inner": {"_iterator_finished": True}}
    assert rescaled(finished, object(), 2, 4) == (finished, "")
