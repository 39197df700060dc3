"""Streams and samplers that are seeded with the time or the process."""

from __future__ import annotations

import os
import random
import sys
import time
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset

from lastcall.adapters.torch.data import loaders


class Clocked(IterableDataset[float]):
    def __iter__(self) -> Iterator[float]:
        rng = random.Random(int(os.getpid() + time.time()))
        yield from (rng.random() for _ in range(4))


class Steps(IterableDataset[float]):
    """In several lines, as webdataset's ResampledShards."""

    def __iter__(self) -> Iterator[float]:
        seed = hash(
            (
                os.getpid(),
                time.time_ns(),
            )
        )
        yield from random.Random(seed).sample(range(100), 4)


class Timed(IterableDataset[float]):
    """What asks for the time otherwise is nobody's business."""

    def __iter__(self) -> Iterator[float]:
        began = time.time()
        rng = random.Random(3)
        for _ in range(4):
            yield rng.random() + (time.time() - began) * 0


def doubts_of(dataset: Any, **options: Any) -> str:
    loader: Any = DataLoader(dataset, 2, **options)
    tracker = loaders.track(loader)
    tracker.attach()
    assert len(list(loader)) == 2 and sys.getprofile() is None
    return tracker.doubts.because


def test_a_stream_that_is_seeded_with_the_time_is_named() -> None:
    """G7: webdataset's shuffle()."""
    assert "`Clocked.__iter__` (test_seeding.py:" in doubts_of(Clocked())
    assert "`Steps.__iter__` (test_seeding.py:" in doubts_of(Steps())


def test_in_a_worker_too() -> None:
    assert "`Clocked.__iter__` (test_seeding.py:" in doubts_of(Clocked(), num_workers=1)


def test_what_asks_for_the_time_otherwise_is_not() -> None:
    assert not doubts_of(Timed())


def test_nor_what_is_only_judged() -> None:
    with torch.no_grad():
        assert not doubts_of(Clocked())


def test_a_profiler_of_the_user_stays() -> None:
    def profile(*_: object) -> None:
        pass

    sys.setprofile(profile)
    try:
        tracker = loaders.track(loader := DataLoader(Clocked(), 2))
        tracker.attach()
        list(loader)
        assert sys.getprofile() is profile
    finally:
        sys.setprofile(None)
