"""Where a loader that Accelerate has prepared stands, and how it goes on from there."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from accelerate import Accelerator  # type: ignore[import-untyped]
from accelerate.utils import DataLoaderConfiguration  # type: ignore[import-untyped]
from torch.utils.data import DataLoader, Dataset

from lastcall import errors
from lastcall.adapters.accelerate import loaders
from lastcall.adapters.torch.data import loaders as data
from lastcall.adapters.torch.randomness.rng import Randomness

BATCHES = 5


class Changing(Dataset[torch.Tensor]):
    """Samples that are changed at random when they are read."""

    def __len__(self) -> int:
        return 4 * BATCHES

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([float(index), random.random(), float(np.random.rand()), float(torch.rand(()))])


def make(kind: str) -> Any:
    config = DataLoaderConfiguration(
        use_stateful_dataloader=kind == "stateful", use_seedable_sampler=kind == "seedable"
    )
    accelerator = Accelerator(cpu=True, dataloader_config=config)
    return accelerator.prepare(
        DataLoader(Changing(), batch_size=4, shuffle=True, num_workers=2 * (kind == "workers"))
    )


def seed(number: int) -> None:
    random.seed(number)
    np.random.seed(number)
    torch.manual_seed(number)


def drawn(tracker: data.Tracker, count: int, states: list[Any]) -> list[list[float]]:
    """So many batches over several epochs, with the position and the randomness before each of them."""
    found: list[list[float]] = []
    randomness = Randomness()
    while len(found) < count:
        for batch in tracker.iterate():
            found.append(batch.flatten().tolist())
            random.random(), np.random.rand(), torch.rand(())  # the loop draws, too
            states.append((tracker.state(), randomness.capture()))
            if len(found) == count:
                break
    return found


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning")
@pytest.mark.parametrize("kind", ["plain", "seedable", "stateful", "workers"])
def test_goes_on_at_every_batch_as_if_nothing_had_happened(kind: str) -> None:
    seed(1)
    tracker = loaders.track(make(kind))
    tracker.attach()
    states: list[Any] = []
    wanted = drawn(tracker, 3 * BATCHES, states)
    tracker.detach()
    places = (0, 1, BATCHES - 1, BATCHES, 2 * BATCHES - 2) if kind == "workers" else range(2 * BATCHES)
    for place in places:
        seed(100 + place)
        again = loaders.track(make(kind))
        again.attach()
        state, randomness = states[place]
        again.load(state)
        assert again.state() == state
        Randomness().restore(randomness)
        assert drawn(again, 3 * BATCHES - place - 1, []) == wanted[place + 1 :], f"after batch {place}"
        again.detach()


def test_a_detached_loader_is_what_it_was() -> None:
    loader = make("plain")
    before = dict(vars(loader.base_dataloader)), type(loader.base_dataloader)
    tracker = loaders.track(loader)
    tracker.attach()
    list(loader)
    tracker.detach()
    assert (dict(vars(loader.base_dataloader)), type(loader.base_dataloader)) == before


def test_a_position_of_another_kind_is_refused() -> None:
    tracker = loaders.track(make("plain"))
    with pytest.raises(errors.MismatchError, match="accelerate-skipped"):
        tracker.load({"kind": loaders.SKIPPED, "version": 1, "delivered": 3})


def test_protect_follows_what_accelerate_has_prepared_once_it_is_told() -> None:
    loaders.follow()
    loaders.follow()
    assert isinstance(data.track(make("plain")), loaders.AheadTracker)
    assert isinstance(data.track(DataLoader(Changing())), data.LoaderTracker)
