"""What objects below a loader hold: seen when it changes, saved, put back; and passes that come out
differently."""

from __future__ import annotations

import collections
import io
import random
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler, Subset, random_split

from lastcall.adapters.torch.data import loaders as data
from lastcall.adapters.torch.data.objects import graph, held, leaves
from lastcall.core.checkpoint.doubts import Doubts


def follow(loader: Any, state: Any = None) -> Any:
    tracker = data.track(loader)
    tracker.attach()
    if state is not None:
        tracker.load(state)
    return tracker


def rest(iterator: Any) -> list[Any]:
    return [batch.tolist() for batch in iterator]


VALUES: list[Any] = [
    None,
    True,
    7,
    2**80,
    -1.5,
    "text",
    b"bytes",
    [1, 2, 3],
    (1, 2),
    [1, "a", [2.5, None]],
    {"a": 1, 2: [3]},
    {1, 2},
    frozenset({"x"}),
    collections.deque([1, 2], 3),
    torch.arange(6.0).reshape(2, 3),
    torch.tensor(3),
    np.arange(4),
    np.float32(2.5),
    [],
]


@pytest.mark.parametrize("value", VALUES, ids=repr)
def test_a_value_comes_back_as_it_was(value: Any) -> None:
    frozen = leaves.freeze(value)
    assert frozen is not None
    made = leaves.put(frozen, None)
    assert type(made) is type(value)
    assert leaves.freeze(made) == frozen


@pytest.mark.parametrize("current", [[9, 9], {"b": 2}, {5}, torch.zeros(3), np.zeros(3)], ids=repr)
def test_what_others_hold_too_is_changed_in_place(current: Any) -> None:
    wanted = {list: [1, 2, 3], dict: {"a": 1}, set: {4}, torch.Tensor: torch.ones(3), np.ndarray: np.ones(3)}[
        type(current)
    ]
    frozen = leaves.freeze(wanted)
    assert frozen is not None
    assert leaves.put(frozen, current) is current
    assert leaves.freeze(current) == frozen


@pytest.mark.parametrize(
    "make",
    [lambda: torch.Generator().manual_seed(3), lambda: random.Random(3), lambda: np.random.default_rng(3)],
)
def test_generators_and_open_files_go_on_where_they_were(make: Any) -> None:
    generator, other = make(), make()
    draw = {torch.Generator: lambda g: torch.rand((), generator=g).item()}.get(
        type(generator), lambda g: g.random()
    )
    draw(generator)
    frozen = leaves.freeze(generator)
    assert frozen is not None
    leaves.put(frozen, other)
    assert draw(generator) == draw(other)
    file = io.StringIO("one\ntwo\n")
    file.readline()
    at = leaves.freeze(file)
    assert at is not None
    again = io.StringIO("one\ntwo\n")
    leaves.put(at, again)
    assert again.readline() == "two\n"


@pytest.mark.parametrize("value", [object(), lambda: 0, torch.zeros(1 << 18), ["x"] * 10_000, [object()]])
def test_what_cannot_be_saved_is_none(value: Any) -> None:
    assert leaves.freeze(value) is None


def test_paths_are_what_a_user_would_write() -> None:
    assert graph.name_of(("dataset", ".transform", ".args", "[0]")) == "dataset.transform.args[0]"
    assert graph.name_of(("dataset", ".__class__(Own)", ".count")) == "Own.count"
    assert graph.name_of(("collate_fn", "<(calls)>")) == "calls"


class Numbers(Dataset[int]):
    def __init__(self, count: int = 16) -> None:
        self.count = count
        self.pid = 5

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> int:
        self.pid += 1
        return index


def test_only_what_changes_is_saved_and_numbers_of_the_process_never_are() -> None:
    loader = DataLoader(Numbers(), 4)
    tracker = follow(loader)
    passage = iter(loader)
    next(passage)
    assert tracker.state()["held"] is None


def test_g11_an_unseeded_random_split_goes_on_with_the_indices_of_the_interrupted_run() -> None:
    def make() -> Any:
        part, _ = random_split(Numbers(), [8, 8])
        return DataLoader(part, 2)

    torch.manual_seed(1)
    first = make()
    tracker = follow(first)
    passage = iter(first)
    next(passage)
    state = tracker.state()
    torch.manual_seed(2)
    second = make()
    assert list(second.dataset.indices) != list(first.dataset.indices)
    follow(second, state)
    assert rest(iter(second)) == rest(passage)


def test_g11_a_shuffled_list_of_files_is_put_back_into_its_order() -> None:
    class Files(Numbers):
        def __init__(self, order: int) -> None:
            super().__init__()
            self.files = [f"{number}.png" for number in range(16)]
            random.Random(order).shuffle(self.files)

        def __getitem__(self, index: int) -> int:
            return int(self.files[index].removesuffix(".png"))

    first = DataLoader(Files(1), 4)
    tracker = follow(first)
    passage = iter(first)
    next(passage)
    second = DataLoader(Files(2), 4)
    follow(second, tracker.state())
    assert rest(iter(second)) == rest(passage)


class Told(Sampler[int]):
    """An order that the script makes, and that nothing here knows of."""

    __slots__ = ()

    def __iter__(self) -> Any:
        return iter(ORDERS[-1])

    def __len__(self) -> int:
        return 16


ORDERS = [list(range(16))]
Told.__module__ = "torch.utils.data.told"  # a library's: its globals are not looked at


@pytest.mark.parametrize("workers", [0, 1])
def test_a_pass_that_is_not_what_it_was_when_it_is_made_again_is_doubted(
    workers: int, caplog: pytest.LogCaptureFixture
) -> None:
    first = DataLoader(Numbers(), 2, sampler=Told(), num_workers=workers)
    tracker = follow(first)
    passage = iter(first)
    for _ in range(3):
        next(passage)
    state = tracker.state()
    same = DataLoader(Numbers(), 2, sampler=Told(), num_workers=workers)
    follower = follow(same, state)
    assert rest(iter(same)) == rest(passage)
    assert not follower.doubts
    ORDERS.append(list(reversed(range(16))))
    try:
        other = DataLoader(Numbers(), 2, sampler=Told(), num_workers=workers)
        follower = follow(other, state)
        next(iter(other))
    finally:
        ORDERS.pop()
    assert "the interrupted pass over `Numbers` was made again" in follower.doubts.because
    assert "from batch 0 on" in caplog.text


class Stream(IterableDataset[float]):
    def __init__(self, shift: float) -> None:
        self.shift = shift

    def __iter__(self) -> Any:
        return iter([number + self.shift for number in range(16)])


def test_a_stream_that_reads_something_else_is_doubted() -> None:
    first = DataLoader(Stream(0.0), 2)
    tracker = follow(first)
    passage = iter(first)
    for _ in range(5):
        next(passage)
    other = DataLoader(Stream(0.5), 2)
    follower = follow(other, tracker.state())
    next(iter(other))
    assert (
        "the interrupted pass over `Stream`" in follower.doubts.because
        and "batch 2" in follower.doubts.because
    )


def test_a_large_graph_costs_no_more_than_its_bounds() -> None:
    class Node:
        def __init__(self, depth: int) -> None:
            self.value = depth
            self.below = [Node(depth - 1) for _ in range(4)] if depth else []

    dataset = Numbers()
    dataset.tree = Node(6)  # type: ignore[attr-defined]
    found, holders = graph.walk(graph.roots(DataLoader(dataset)))
    assert len(found) + len(holders) <= 700


def test_an_object_that_takes_the_place_of_nothing_is_no_change() -> None:
    """A handle that is opened at its first use."""
    dataset: Any = Numbers()
    dataset.handle = None
    holding, doubts = held.Holding(), Doubts()
    holding.of(DataLoader(dataset))
    holding.begin(doubts)
    dataset.handle = object()
    holding.look(doubts)
    assert not holding.moving and not doubts
    dataset.count = 20
    holding.look(doubts)
    assert [graph.name_of(path) for path in holding.moving] == ["dataset.count"]


def test_a_subset_that_is_longer_now_is_left_alone() -> None:
    first = DataLoader(Subset(Numbers(), [3, 1, 2, 5]), 2)
    tracker = follow(first)
    next(iter(first))
    second = DataLoader(Subset(Numbers(), [3, 1, 2, 5, 7, 8]), 2)
    follow(second, tracker.state())
    assert list(second.dataset.indices) == [3, 1, 2, 5, 7, 8]  # type: ignore[attr-defined]
