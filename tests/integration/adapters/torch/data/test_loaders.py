"""A DataLoader interrupted anywhere gives the same batches and leaves the same generators as one that never
was."""

from __future__ import annotations

import functools
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import BatchSampler, RandomSampler, Sampler, SubsetRandomSampler, WeightedRandomSampler

from helpers.data.loaders import (
    Augmented,
    Cut,
    Make,
    Stream,
    cycled,
    interrupted,
    loader_of,
    reference,
)

pytestmark = [
    pytest.mark.filterwarnings("ignore:This DataLoader will create"),  # a machine with one core
    pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning"),
]

EPOCHS = 3
BATCHES = 4  # 11 samples, 3 in a batch


class EagerShuffle(Sampler[int]):
    """Draws from a global generator when its iterator is made, not when it is first drawn from."""

    def __init__(self, size: int, source: str) -> None:
        self.size = size
        self.source = source

    def __iter__(self) -> Iterator[int]:
        order = list(range(self.size))
        if self.source == "python":
            random.shuffle(order)
        else:
            np.random.shuffle(order)
        return iter(order)

    def __len__(self) -> int:
        return self.size


class OwnNumpyShuffle(Sampler[int]):
    def __init__(self, size: int) -> None:
        self.size = size
        self.source = np.random.default_rng(4)

    def __iter__(self) -> Iterator[int]:
        yield from self.source.permutation(self.size).tolist()

    def __len__(self) -> int:
        return self.size


class EagerBatches(Sampler[list[int]]):
    def __init__(self, size: int) -> None:
        self.size = size

    def __iter__(self) -> Iterator[list[int]]:
        order = torch.randperm(self.size).tolist()
        return iter([order[start : start + 3] for start in range(0, self.size, 3)])

    def __len__(self) -> int:
        return (self.size + 2) // 3


def noisy_collate(samples: list[Any]) -> list[Any]:
    return [*samples, torch.rand(()).item(), random.random()]


def seeded_worker(worker_id: int) -> None:
    random.seed(torch.initial_seed() + worker_id)


def sampled(kind: str, **options: Any) -> Any:
    dataset = Augmented()
    own = torch.Generator().manual_seed(17)
    samplers: dict[str, Any] = {
        "python": lambda: EagerShuffle(11, "python"),
        "numpy": lambda: EagerShuffle(11, "numpy"),
        "own numpy": lambda: OwnNumpyShuffle(11),
        "weighted": lambda: WeightedRandomSampler([1.0] * 11, 11),
        "subset": lambda: SubsetRandomSampler(list(range(11)), generator=own),
        "replacement": lambda: RandomSampler(dataset, replacement=True, num_samples=70, generator=own),
        "replacement, global": lambda: RandomSampler(dataset, replacement=True, num_samples=70),
    }
    if kind == "batches":
        return loader_of(
            dataset, batch_sampler=BatchSampler(SubsetRandomSampler(range(11)), 3, True), **options
        )
    if kind == "eager batches":
        return loader_of(dataset, batch_sampler=EagerBatches(11), **options)
    return loader_of(dataset, sampler=samplers[kind](), batch_size=None if kind == "python" else 3, **options)


def augmented(**options: Any) -> Make:
    return lambda: loader_of(Augmented(), **{"batch_size": 3, **options})


def stream(size: int = 11, **options: Any) -> Make:
    return lambda: loader_of(Stream(size), **{"batch_size": 2, **options})


@functools.cache
def uninterrupted(make: Make) -> list[str]:
    return reference(make, EPOCHS)


EVERYWHERE: list[Cut] = [
    ("before", 0),
    ("opened", 0),
    ("batch", 1),
    ("batch", 2),
    ("batch", BATCHES),
    ("between", 1),
    ("opened", 1),
    ("batch", BATCHES + 1),
    ("batch", 2 * BATCHES - 1),
    ("batch", 2 * BATCHES),
    ("between", 2),
    ("batch", 3 * BATCHES),
]
SOME: list[list[Cut]] = [
    [("before", 0), ("opened", 0)],
    [("batch", 1), ("batch", BATCHES), ("batch", BATCHES + 2)],
    [("batch", 3), ("between", 1), ("opened", 1)],
    [("between", 1), ("batch", 2 * BATCHES), ("between", 2)],
]

PLAIN = {
    "in order": augmented(),
    "shuffled": augmented(shuffle=True),
    "shuffled, own generator": augmented(shuffle=True, seeded=True),
    "drop_last": augmented(shuffle=True, drop_last=True, batch_size=2),
    "single samples": augmented(shuffle=True, batch_size=None),
    "collate": augmented(shuffle=True, collate_fn=noisy_collate),
    "iterable": stream(batch_size=3),
}
WORKERS = {
    "shuffled": augmented(shuffle=True, num_workers=2),
    "own generator, persistent": augmented(shuffle=True, seeded=True, num_workers=2, persistent_workers=True),
    "persistent, collate": augmented(
        shuffle=True, num_workers=2, persistent_workers=True, collate_fn=noisy_collate
    ),
    "three workers, init": augmented(
        shuffle=True, num_workers=3, prefetch_factor=1, worker_init_fn=seeded_worker
    ),
    "iterable": stream(num_workers=2, batch_size=3),
    # 5 samples a worker: each draws for a fifth one that drop_last throws away, which the next epoch's draws
    # come after
    "iterable, persistent, drop_last": stream(
        10, num_workers=2, persistent_workers=True, drop_last=True, seeded=True
    ),
}


@pytest.mark.parametrize(
    "make", [*PLAIN.values(), *WORKERS.values()], ids=[*PLAIN, *(f"{name} (workers)" for name in WORKERS)]
)
def test_a_followed_loader_gives_what_an_unfollowed_one_gives(make: Make) -> None:
    assert interrupted(make, EPOCHS, []) == uninterrupted(make)


@pytest.mark.parametrize("cut", EVERYWHERE, ids=str)
@pytest.mark.parametrize("name", PLAIN)
def test_one_interruption_anywhere_changes_nothing(name: str, cut: Cut) -> None:
    assert interrupted(PLAIN[name], EPOCHS, [cut]) == uninterrupted(PLAIN[name])


@pytest.mark.parametrize("cuts", SOME, ids=str)
@pytest.mark.parametrize("name", WORKERS)
def test_interruptions_with_workers_change_nothing(name: str, cuts: list[Cut]) -> None:
    assert interrupted(WORKERS[name], EPOCHS, cuts) == uninterrupted(WORKERS[name])


@pytest.mark.parametrize(
    "kind",
    [
        "python",
        "numpy",
        "own numpy",
        "weighted",
        "subset",
        "replacement",
        "replacement, global",
        "batches",
        "eager batches",
    ],
)
@pytest.mark.parametrize("workers", [0, 2])
def test_every_kind_of_sampler_goes_on_where_it_was(kind: str, workers: int) -> None:
    make = functools.partial(sampled, kind, num_workers=workers)
    cuts: list[Cut] = [("batch", 2), ("between", 1), ("opened", 1), ("batch", 5 if kind != "python" else 14)]
    if kind.startswith("replacement"):
        cuts[-1] = ("batch", 24 + 20)
    assert interrupted(make, 2, cuts) == reference(make, 2)


def test_a_sampler_that_shuffles_at_once_goes_on_in_a_later_pass_of_persistent_workers() -> None:
    make = functools.partial(sampled, "eager batches", num_workers=2, persistent_workers=True)
    assert interrupted(make, 2, [("batch", 5)]) == reference(make, 2)


@pytest.mark.parametrize("workers", [0, 2])
def test_every_batch_may_be_followed_by_an_interruption(workers: int) -> None:
    make = augmented(shuffle=True, num_workers=workers, seeded=True)
    everywhere: list[Cut] = [("batch", step) for step in range(1, 2 * BATCHES + 1)]
    assert interrupted(make, 2, everywhere) == reference(make, 2)


@pytest.mark.parametrize("persistent", [False, True])
@pytest.mark.parametrize("workers", [0, 2])
def test_a_cycle_over_the_loader_goes_on_where_it_was(workers: int, persistent: bool) -> None:
    make = augmented(shuffle=True, num_workers=workers, persistent_workers=persistent and workers > 0)
    expected = cycled(make, 11, [], follow=False)
    assert cycled(make, 11, [2, BATCHES, BATCHES + 1, 10]) == expected


def test_workers_that_are_not_forked_come_back_too() -> None:
    make = augmented(shuffle=True, num_workers=1, persistent_workers=True, multiprocessing_context="spawn")
    assert interrupted(make, 2, [("batch", 5)]) == reference(make, 2)
