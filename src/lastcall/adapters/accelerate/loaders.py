"""Where a loader that Accelerate has prepared stands.

A DataLoaderShard is always one batch ahead of the training loop: it must know whether the batch it hands out
is the last one. Its position at a boundary is therefore the one that the DataLoader underneath had before it
made that next batch, and so is the randomness that the batch was made with: a resumed run makes the batch
again with that, and continues with the randomness of the boundary.

Discarded: Accelerate's skip_first_batches, which draws all former batches of the epoch again, with other
random numbers.
"""

from __future__ import annotations

import itertools
import logging
import weakref
from collections.abc import Iterator
from typing import Any

import torch
from accelerate.data_loader import DataLoaderAdapter, DataLoaderDispatcher, SeedableRandomSampler  # type: ignore[import-untyped]

from lastcall import errors
from lastcall.adapters.torch.data import loaders as data
from lastcall.adapters.torch.data.objects import generators as rng
from lastcall.adapters.torch.randomness.rng import Captured, Noted, Randomness
from lastcall.core.checkpoint.doubts import Doubts

log = logging.getLogger("lastcall")
VERSION = 1
AHEAD, SKIPPED = "accelerate", "accelerate-skipped"


def is_prepared(loader: object) -> bool:
    """Whether Accelerate has made it. isinstance() would ask the loader, which says that it is a
    DataLoader."""
    return issubclass(type(loader), DataLoaderAdapter)


def track(loader: Any) -> data.Tracker:
    return SkippingTracker(loader) if issubclass(type(loader), DataLoaderDispatcher) else AheadTracker(loader)


def follow() -> None:
    """From now on run.batches() and protect() know these loaders."""
    data.register(is_prepared, track)


class AheadTracker:
    """The interface of LoaderTracker for a DataLoaderShard."""

    def __init__(self, loader: Any) -> None:
        self.loader = loader
        self._inner = data.track_own(loader.base_dataloader)
        self._stateful = isinstance(self._inner, data.StatefulTracker)
        self._randomness = Randomness()
        self._pass: weakref.ref[_DrawAhead] | None = None  # gone when the loader's own generator is
        self._loaded: dict[str, Any] | None = None
        self._synchronized: Any = None

    @property
    def worlds(self) -> tuple[int, int] | None:
        return self._inner.worlds

    @worlds.setter
    def worlds(self, worlds: tuple[int, int] | None) -> None:
        self._inner.worlds = worlds

    @property
    def doubts(self) -> Doubts:
        return self._inner.doubts

    @doubts.setter
    def doubts(self, doubts: Doubts) -> None:
        self._inner.doubts = doubts

    def attach(self) -> None:
        self._inner.attach()
        vars(self.loader.base_dataloader)["__iter__"] = self._open  # Accelerate calls it by this name

    def detach(self) -> None:
        vars(self.loader.base_dataloader).pop("__iter__", None)
        self._inner.detach()

    def state(self) -> dict[str, Any]:
        if self._loaded is not None:
            return self._loaded
        running = self._pass() if self._pass is not None else None
        # read once: the training thread may put another in its place
        before = running.before if running is not None else None
        return {
            "kind": AHEAD,
            "version": VERSION,
            "iteration": self.loader.iteration,
            "seeds": tuple(sampler.initial_seed for sampler in self._seedable()),
            "base": self._inner.state() if before is None else self._inner.state_of(before[0]),
            "began": running.began if running is not None else None,
            "randomness": None
            if before is None
            else self._randomness.to_document(self._randomness.captured(before[1])),
        }

    def load(self, state: dict[str, Any]) -> None:
        _check(state, AHEAD)
        for sampler, seed in zip(self._seedable(), state["seeds"], strict=False):
            sampler.initial_seed = seed
            if sampler.generator is None and state["base"]["generators"]:
                sampler.generator = torch.Generator()  # as it makes one itself when its first pass begins
        self._inner.load(state["base"])
        self.loader.iteration = state["iteration"]
        self._loaded = dict(state)
        if state["randomness"] is not None and self.loader.rng_types is not None:
            # The ranks' generators were brought into line when the pass began, and have gone their own ways
            # since.
            self._synchronized, self.loader.rng_types = self.loader.rng_types, None

    def iterate(self) -> Iterator[Any]:
        return iter(self.loader)

    @property
    def delivered(self) -> int:
        return self._inner.delivered

    @property
    def exhausted(self) -> bool:
        return self._inner.exhausted

    def _open(self) -> _DrawAhead:
        loaded, self._loaded = self._loaded, None
        if self._synchronized is not None:
            self.loader.rng_types, self._synchronized = self._synchronized, None
        made_with = None
        if loaded is not None and loaded["randomness"] is not None:
            made_with = self._randomness.from_document(loaded["randomness"])
        base = self.loader.base_dataloader
        began = loaded["began"] if loaded is not None and made_with is not None else None
        iterator, began = (
            self._iterator_of_torchdata(base, began) if self._stateful else (type(base).__iter__(base), None)
        )
        passage = _DrawAhead(self, iterator, began, made_with)
        self._pass = weakref.ref(passage)
        return passage

    def _iterator_of_torchdata(self, base: Any, began: rng.State | None) -> tuple[Any, rng.State]:
        """It draws the order of an interrupted pass again, so the generators must be where they were when it
        was drawn first: after the iterator was made, which draws too, or before where workers draw from the
        order at once."""
        generators = rng.find_generators(base)
        now = rng.take(generators)
        if began is None:
            iterator = type(base).__iter__(base)
            return iterator, now if base.num_workers else rng.take(generators)
        rng.put(began, generators)
        try:
            iterator = type(base).__iter__(base)
            _draw_order(iterator)
        finally:
            rng.put(now, generators)
        return iterator, began

    def _seedable(self) -> list[Any]:
        return [
            sampler
            for sampler in rng.samplers(self.loader.base_dataloader)
            if isinstance(sampler, SeedableRandomSampler)
        ]


def _draw_order(iterator: Any) -> None:
    """torchdata skips in the order of the samples when the first batch is made: here it is made to skip at
    once."""
    waiting = getattr(iterator, "_sampler_iter", None)
    if isinstance(waiting, itertools.islice):
        iterator._sampler_iter = itertools.chain(list(itertools.islice(waiting, 1)), waiting)


class _DrawAhead:
    """The iterator of the DataLoader underneath, as Accelerate draws from it."""

    def __init__(
        self,
        tracker: AheadTracker,
        iterator: Iterator[Any],
        began: rng.State | None,
        made_with: Captured | None,
    ) -> None:
        self.began = began  # all generators, before the order of the samples was drawn; for torchdata only
        self.before: tuple[Any, Noted] | None = None  # the latest draw: position and randomness, noted
        self._tracker = tracker
        self._made_with = made_with  # the randomness for the first batch of a pass that was interrupted
        self._draw = iterator.__next__
        self._position, self._randomness = tracker._inner.note, tracker._randomness.note

    def __iter__(self) -> _DrawAhead:
        return self

    def __next__(self) -> Any:
        if self._made_with is not None:
            return self._make_again(self._made_with)
        self.before = (self._position(), self._randomness())
        return self._draw()

    def _make_again(self, made_with: Captured) -> Any:
        tracker = self._tracker
        randomness = tracker._randomness
        self._made_with = None
        now = randomness.capture()
        randomness.restore(made_with)
        self.before = (self._position(), made_with)
        try:
            return self._draw()
        except StopIteration:
            # all batches had been handed out: for Accelerate it looks like an empty pass
            tracker.loader.iteration += 1
            raise
        finally:
            randomness.restore(now)


class SkippingTracker:
    """For a DataLoaderDispatcher, where one rank reads for all: batches are counted as run.batches() hands
    them out, and Accelerate skips as many. Exact where the dataset is deterministic."""

    def __init__(self, loader: Any) -> None:
        self.loader = loader
        self.worlds: tuple[int, int] | None = None
        self.doubts = Doubts()
        self.delivered = 0
        self.exhausted = False
        self._skip = 0
        self._randomness = Randomness()

    def attach(self) -> None:
        pass

    def detach(self) -> None:
        pass

    def state(self) -> dict[str, Any]:
        return {
            "kind": SKIPPED,
            "version": VERSION,
            "iteration": self.loader.iteration,
            "delivered": self.delivered,
        }

    def load(self, state: dict[str, Any]) -> None:
        _check(state, SKIPPED)
        self.loader.iteration = state["iteration"]
        self.delivered = self._skip = state["delivered"]
        if self._skip:
            log.info("One rank reads for all: %d batches of the epoch are read again and skipped", self._skip)

    def iterate(self) -> Iterator[Any]:
        loader, usual = self.loader, self.loader.skip_batches
        loader.skip_batches = usual + self._skip
        # To open a pass draws a seed, which was drawn when the interrupted one began.
        before = self._randomness.capture() if self._skip else None
        self.delivered, self._skip = self._skip, 0
        try:
            for batch in loader:
                if before is not None:
                    self._randomness.restore(before)
                    before = None
                self.delivered += 1
                yield batch
            if before is not None:  # all of its batches had been handed out
                self._randomness.restore(before)
        finally:
            loader.skip_batches = usual
            self.delivered = 0


def _check(state: dict[str, Any], kind: str) -> None:
    if state.get("kind") != kind or state.get("version") != VERSION:
        raise errors.MismatchError(
            f"The saved data position is of kind {state.get('kind')!r}, version {state.get('version')!r}, "
            "but this loader needs kind "
            f"{kind!r}, version {VERSION}. Prepare the loader as it was, or begin in another directory."
        )
