"""A training-like loop over a loader, interrupted anywhere, and the datasets it is run with."""

from __future__ import annotations

import copy
import hashlib
import itertools
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, get_worker_info

from lastcall.adapters.torch.data import loaders as data

Make = Callable[[], Any]
# ("before", 0) | ("batch", total batches) | ("opened", epoch) | ("between", epochs ended)
Cut = tuple[str, int]


def noise() -> float:
    """Draws from all three generators, as augmentation does."""
    return (
        torch.rand(()).item()
        + random.random()
        + random.gauss(0, 1)
        + float(np.random.rand())
        + np.random.randn()
    )


class Augmented(Dataset[Any]):
    def __init__(self, size: int = 11) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> Any:
        return index, noise()


class Stream(IterableDataset[Any]):
    """Shards over the workers; shuffles at its start and draws a number for each sample."""

    def __init__(self, size: int = 11) -> None:
        self.size = size

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        own = list(range(self.size)) if info is None else list(range(info.id, self.size, info.num_workers))
        random.shuffle(own)
        for index in own:
            yield index, noise()


@dataclass
class Saved:
    state: dict[str, Any]
    rng: tuple[Any, Any, Any]
    epoch: int
    step: int


def seed() -> None:
    torch.manual_seed(5)
    random.seed(6)
    np.random.seed(7)


def main_rng() -> tuple[Any, Any, Any]:
    return torch.get_rng_state(), random.getstate(), np.random.get_state()


def put_main_rng(state: tuple[Any, Any, Any]) -> None:
    torch.set_rng_state(state[0])
    random.setstate(state[1])
    np.random.set_state(state[2])


def digest(value: Any) -> str:
    return hashlib.sha256(repr(value).encode()).hexdigest()[:12] + f" {value!r}"[:60]


def digest_rng(loader: Any) -> str:
    own = getattr(loader, "generator", None)
    words = [
        torch.get_rng_state().tolist(),
        random.getstate(),
        np.random.get_state(legacy=False)["state"]["key"].tolist(),
    ]
    return digest([words, None if own is None else own.get_state().tolist()])


def reference(make: Make, epochs: int) -> list[str]:
    """The loop over a loader that nobody follows."""
    seed()
    loader = make()
    seen: list[str] = []
    for _ in range(epochs):
        for batch in loader:
            seen.append(digest(batch))
            noise()
        noise()
    return [*seen, digest_rng(loader)]


def assert_plain(value: Any, path: str = "state") -> None:
    if isinstance(value, dict):
        for key, item in value.items():
            assert type(key) is str, path
            assert_plain(item, f"{path}.{key}")
    elif isinstance(value, list | tuple):
        assert type(value) in (list, tuple), path
        for number, item in enumerate(value):
            assert_plain(item, f"{path}[{number}]")
    else:
        assert value is None or type(value) in (int, bool, bytes, str), f"{path}: {type(value)}"


def save(tracker: Any, epoch: int, step: int) -> Saved:
    state = tracker.state()
    assert_plain(state)
    return Saved(copy.deepcopy(state), main_rng(), epoch, step)


def incarnation(
    make: Make, epochs: int, saved: Saved | None, cut: Cut | None, seen: list[str]
) -> Saved | None:
    seed()
    loader = make()
    tracker = data.track(loader)
    tracker.attach()
    epoch, step = 0, 0
    if saved is not None:
        tracker.load(saved.state)
        put_main_rng(saved.rng)
        epoch, step = saved.epoch, saved.step
    if cut == ("before", 0):
        return save(tracker, epoch, step)
    for number in range(epoch, epochs):
        passage = tracker.iterate() if number % 2 else iter(loader)
        if cut == ("opened", number):
            return save(tracker, number, step)
        for batch in passage:
            seen.append(digest(batch))
            noise()
            step += 1
            if cut == ("batch", step):
                return save(tracker, number, step)
        noise()
        del passage
        if cut == ("between", number + 1):
            return save(tracker, number + 1, step)
    seen.append(digest_rng(loader))
    return None


def interrupted(make: Make, epochs: int, cuts: Sequence[Cut]) -> list[str]:
    """The loop, thrown away and started again at each cut."""
    seen: list[str] = []
    saved = None
    for cut in cuts:
        saved = incarnation(make, epochs, saved, cut, seen)
        assert saved is not None, f"{cut} was never reached"
    assert incarnation(make, epochs, saved, None, seen) is None
    return seen


def cycle(loader: Any) -> Iterator[Any]:
    while True:
        yield from loader


def cycled(make: Make, steps: int, cuts: Sequence[int], follow: bool = True) -> list[str]:
    seen: list[str] = []
    saved: Saved | None = None
    for end in [*cuts, steps]:
        seed()
        loader = make()
        tracker = data.track(loader)
        if follow:
            tracker.attach()
        step = 0
        if saved is not None:
            tracker.load(saved.state)
            put_main_rng(saved.rng)
            step = saved.step
        for batch in itertools.islice(cycle(loader), end - step):
            seen.append(digest(batch))
            noise()
            step += 1
            # inside the loop: the generator, and with it the loader's iterator, is still alive
            if step == end:
                saved = save(tracker, 0, step)
                break
    return [*seen, digest_rng(loader)]


def loader_of(dataset: Any, **options: Any) -> DataLoader[Any]:
    if options.pop("seeded", False):
        options["generator"] = torch.Generator().manual_seed(99)
    return DataLoader(dataset, **options)
