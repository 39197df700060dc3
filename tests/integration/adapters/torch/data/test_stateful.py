"""torchdata's StatefulDataLoader through its own state."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset

from helpers.data.loaders import Cut, assert_plain, interrupted, noise, reference
from lastcall import errors
from lastcall.adapters.torch.data import loaders as data

stateful = pytest.importorskip("torchdata.stateful_dataloader")

pytestmark = [
    pytest.mark.filterwarnings("ignore:This DataLoader will create"),  # a machine with one core
    pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*set_vital.*deprecated"),  # torchdata 0.11 on torch 2.13
]


class Numbers(Dataset[Any]):
    """Draws from the generators of the process that loads it (G5), and from one of its own."""

    def __init__(self, draws: bool) -> None:
        self.draws = draws
        self.own = np.random.default_rng(4)

    def __len__(self) -> int:
        return 11

    def __getitem__(self, index: int) -> Any:
        return index, noise() + self.own.random() if self.draws else 0.0


def make(workers: int, persistent: bool = False, seeded: bool = False) -> Any:
    return stateful.StatefulDataLoader(
        Numbers(draws=True),
        batch_size=3,
        shuffle=True,
        num_workers=workers,
        persistent_workers=persistent,
        generator=torch.Generator().manual_seed(8) if seeded else None,
    )


CUTS: list[list[Cut]] = [
    [],
    [("before", 0), ("batch", 1), ("batch", 2)],
    [("batch", 4), ("batch", 6)],
    [("between", 1), ("batch", 8), ("between", 2)],
]


@pytest.mark.parametrize("cuts", CUTS, ids=str)
@pytest.mark.parametrize(
    ("workers", "persistent", "seeded"),
    [(0, False, False), (0, False, True), (2, False, False), (2, True, True)],
)
def test_interruptions_change_nothing(workers: int, persistent: bool, seeded: bool, cuts: list[Cut]) -> None:
    """G5: the workers' random numbers come back, too."""
    factory = functools.partial(make, workers, persistent, seeded)
    assert interrupted(factory, 3, cuts) == reference(factory, 3)


def test_asking_for_the_position_before_the_first_pass_starts_nothing() -> None:
    loader = make(workers=1)
    tracker = data.track(loader)
    tracker.attach()
    assert_plain(tracker.state())
    assert loader._iterator is None
    assert (tracker.delivered, tracker.exhausted) == (0, False)


def test_the_last_batch_is_not_the_end_until_the_end_is_seen() -> None:
    loader = make(workers=0)
    tracker = data.track(loader)
    tracker.attach()
    passage = iter(loader)
    for _ in range(4):
        next(passage)
    assert (tracker.delivered, tracker.exhausted) == (4, False)
    assert next(passage, None) is None
    assert tracker.exhausted
    again = data.track(make(workers=0))
    again.load(tracker.state())
    assert again.exhausted


def test_detaching_gives_the_class_back() -> None:
    loader = make(workers=0)
    tracker = data.track(loader)
    assert isinstance(tracker, data.StatefulTracker)
    assert data.is_loader(loader)
    tracker.attach()
    assert isinstance(loader, stateful.StatefulDataLoader)
    tracker.detach()
    assert type(loader) is stateful.StatefulDataLoader


def test_the_position_of_a_plain_loader_is_refused() -> None:
    plain = data.track(torch.utils.data.DataLoader(Numbers(draws=False)))
    with pytest.raises(errors.MismatchError, match="StatefulDataLoader needs"):
        data.track(make(workers=0)).load(plain.state())
