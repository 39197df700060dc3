"""A position that is noted at every batch, and told only later: the one that state() gave then."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Sampler

from helpers.data.loaders import Augmented, Stream
from lastcall.adapters.torch.data.loaders import track_own


class Lazy(Sampler[int]):
    """Draws at every sample, from a generator of its own."""

    def __init__(self, generator: Any) -> None:
        self.generator = generator

    def __iter__(self) -> Iterator[int]:
        for _ in range(11):
            drawn = (
                torch.randint(11, (), generator=self.generator)
                if isinstance(self.generator, torch.Generator)
                else self.generator.random()
            )
            yield int(float(drawn) * 10) % 11

    def __len__(self) -> int:
        return 11


LOADERS: dict[str, Callable[[], Any]] = {
    "in order": lambda: DataLoader(Augmented(), batch_size=2),
    "shuffled with a generator of its own": lambda: DataLoader(
        Augmented(), batch_size=2, shuffle=True, generator=torch.Generator()
    ),
    "a sampler that draws all the time": lambda: DataLoader(
        Augmented(), batch_size=2, sampler=Lazy(torch.Generator())
    ),
    "a sampler that draws from python's": lambda: DataLoader(
        Augmented(), batch_size=2, sampler=Lazy(random.Random(3))
    ),
    "a sampler that draws from numpy's": lambda: DataLoader(
        Augmented(), batch_size=2, sampler=Lazy(np.random.default_rng(3))
    ),
    "a stream": lambda: DataLoader(Stream(), batch_size=2),
    "workers": lambda: DataLoader(Augmented(), batch_size=2, num_workers=2),
    "persistent workers": lambda: DataLoader(
        Augmented(), batch_size=2, num_workers=1, persistent_workers=True
    ),
    "a stream with workers": lambda: DataLoader(Stream(), batch_size=2, num_workers=2),
}


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
@pytest.mark.parametrize("kind", LOADERS)
def test_a_note_is_told_as_the_position_of_its_moment(kind: str) -> None:
    tracker = track_own(LOADERS[kind]())
    tracker.attach()
    seen = [(tracker.note(), tracker.state())]
    for epoch in range(2):
        for number, _ in enumerate(tracker.iterate()):
            seen.append((tracker.note(), tracker.state()))
            random.random(), np.random.rand(), torch.rand(())
            if epoch and number == 2:
                break
        seen.append((tracker.note(), tracker.state()))
    loaded = track_own(LOADERS[kind]())
    loaded.load(seen[3][1])
    seen.append((loaded.note(), loaded.state()))
    assert len(seen) > 8
    for number, (noted, wanted) in enumerate(seen):
        assert tracker.state_of(noted) == wanted, f"note {number}"
    tracker.detach()
