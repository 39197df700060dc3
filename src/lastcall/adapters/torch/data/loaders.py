"""The exact position inside a DataLoader, saved and brought back bit for bit.

A loader is followed by swapping its instance's class for a subclass, so that every way of iterating over it
counts: `for batch in loader`, `iter(loader)`, a generator of the user's, or `run.batches(loader)`. Batches
and the consumption of random numbers are the same as without it. The state that comes back: the order of the
samples, the number of batches delivered, the generators of the loader and its samplers, and those of the
worker processes. What a dataset or a collate function keeps in its own attributes is not part of it.

With an IterableDataset there are no indices to skip: the delivered batches are made again and thrown away,
which is exact if the dataset is deterministic given the seeds. With in_order=False the order depends on time,
and no position can be exact.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import torch
from torch.utils import data as torch_data

from lastcall import errors
from lastcall.adapters.torch.data import iterator_start, iterators, loader_facts, position, rescaling
from lastcall.adapters.torch.data import subclassing as data_classes
from lastcall.adapters.torch.data.delivery import between, sites
from lastcall.adapters.torch.data.objects import generators as rng
from lastcall.adapters.torch.data.stateful import StatefulTracker, is_stateful
from lastcall.core.checkpoint.doubts import Doubts

__all__ = [
    "Followed",
    "FollowedLoader",
    "LoaderTracker",
    "Noting",
    "StatefulTracker",
    "Tracker",
    "is_foreign",
    "is_loader",
    "register",
    "track",
    "track_own",
]

log = logging.getLogger("lastcall")


class FollowedLoader(torch_data.DataLoader[Any]):
    """Stands right above DataLoader in the hierarchy, so that what a user's subclass overrides still comes
    first."""

    _lc_ledger: position.Ledger

    def _get_iterator(self) -> Any:
        if self.num_workers > 0:
            self.check_worker_number_rationality()
        return iterator_start.open_iterator(self, self._lc_ledger)

    def __iter__(self) -> Any:
        ledger = self._lc_ledger
        ledger.opening = ledger.opening or sites.here()
        if ledger.resume_for(ledger.opening) is not None and self._iterator is not None:
            # persistent workers of a peek: theirs are not the generators that were saved
            self._iterator = None
        try:
            iterator = super().__iter__()
        finally:
            ledger.opening = ""
        if isinstance(iterator, iterators.FollowedMulti) and self.persistent_workers:
            return iterators.PassHandle(iterator)
        return iterator


class LoaderTracker:
    """Follows one torch.utils.data.DataLoader while attached.

    The position is that of the iterator begun last and not dropped since: with two iterators alive at once on
    one loader, the younger one counts, and it is the only one that a resume brings back. A pass that was left
    early (`break`) is over as soon as its iterator is gone, so `state()` belongs to the boundary: taken after
    an exception has left the loop, it says that the pass was left.

    A copy or a pickle of an attached loader is a plain loader that is not followed.
    """

    def __init__(self, loader: torch_data.DataLoader[Any]) -> None:
        self.loader = loader
        # ranks of the run that saved the position, and of this one
        self.worlds: tuple[int, int] | None = None
        self._ledger = position.Ledger()
        self._attached = False

    @property
    def doubts(self) -> Doubts:
        return self._ledger.doubts

    @doubts.setter
    def doubts(self, doubts: Doubts) -> None:
        self._ledger.doubts = doubts

    def attach(self) -> None:
        if self._attached:
            return
        if isinstance(self.loader, FollowedLoader):
            # another tracker follows it already: both report the same position
            self._ledger = self.loader._lc_ledger
        else:
            self._adopt_persistent_iterator()
            object.__setattr__(self.loader, "__class__", _followed_class(type(self.loader), self._ledger))
        self._ledger.generators = rng.find_generators(self.loader)
        self._ledger.source, self._ledger.name = (
            weakref.ref(self.loader),
            f"DataLoader({type(self.loader.dataset).__name__})",
        )
        self._ledger.followers += 1
        self._attached = True

    def detach(self) -> None:
        """Give the loader its own class back. Running iterators continue."""
        if not self._attached:
            return
        self._attached = False
        self._ledger.followers -= 1
        if self._ledger.followers == 0 and isinstance(self.loader, FollowedLoader):
            object.__setattr__(self.loader, "__class__", _own_class(type(self.loader)))

    def state(self) -> dict[str, Any]:
        """The position: as many batches as the training loop has used. Nothing in it changes afterwards."""
        if self._ledger.latest is not None:
            self._ledger.holding.glance(self._ledger.doubts)
        return self._ledger.position()

    def note(self) -> position.Noted:
        return self._ledger.note()

    def state_of(self, noted: position.Noted) -> dict[str, Any]:
        return position.state_of(noted)

    def load(self, state: dict[str, Any]) -> None:
        """The next iterator continues from `state`. The generators of the loader and its samplers are set at
        once."""
        position.check(state)
        state = rescaling.taken_up(state, self.loader, self.worlds)
        if state.get("held") and self.worlds is not None and self.worlds[0] != self.worlds[1]:
            # ranks, and their share, are among what samplers hold
            state = {**state, "held": {**state["held"], "stands": ()}}
        self._ledger.generators = rng.find_generators(self.loader)
        self._warn_of_changes(state)
        rng.put_generators(state["generators"], self._ledger.generators)
        self._ledger.holding.of(self.loader)
        if state.get("held") is not None:
            self._ledger.holding.resume(state["held"])
        self._ledger.begun = state["begun"]
        self._ledger.site = str(state.get("site", ""))
        self._ledger.pending = None if state["phase"] == position.FRESH else position.Resume(dict(state))
        self._ledger.latest = None
        if getattr(self.loader, "_iterator", None) is not None:
            # persistent workers of before: theirs are not the generators that were saved
            self.loader._iterator = None

    def iterate(self) -> Iterator[Any]:
        return self.through(self.loader)

    def through(self, source: Any) -> Iterator[Any]:
        """iterate(), over something that shows or hands on what the loader delivers."""
        self._ledger.opening = sites.BATCHES
        iterator: Iterator[Any] = iter(source)
        if source is not self.loader or isinstance(iterator, iterators.Followed | iterators.PassHandle):
            return iterator
        return self._counted(iterator)

    def _counted(self, iterator: Iterator[Any]) -> Iterator[Any]:
        """A subclass has put something between, which may read ahead on a thread of its own (DataLoaderX and
        the like)."""
        ledger = self._ledger
        ledger.used, ledger.noting = 0, ledger.step is not None
        try:
            for batch in iterator:
                ledger.used += 1
                if ledger.used == 1:
                    between.look_for_counts(iterator, ledger.name, ledger.doubts)
                yield batch
        finally:
            ledger.used = None

    def attend(self, step: Callable[[], int], taken: Callable[[], None], moved: Callable[[], None]) -> None:
        """A script's own loop draws from it, with boundaries."""
        self._ledger.attend(step, taken, moved)

    def loop_begins(self) -> None:
        self._ledger.lead.begin(self._ledger.latest)

    def epoch_over(self) -> None:
        self._ledger.epoch_over()

    def boundary(self) -> None:
        self._ledger.boundary()

    @property
    def ledger(self) -> position.Ledger:
        return self._ledger

    @property
    def delivered(self) -> int:
        """Batches delivered in the latest pass."""
        return int(self._where()[0])

    @property
    def exhausted(self) -> bool:
        """Whether the latest pass came to its end, and its end was seen. Asked at every step of a Trainer."""
        latest = self._ledger.latest
        if latest is not None and self._ledger.pending is None:
            return latest.phase == position.BETWEEN
        return self._where()[1] == position.BETWEEN

    def _where(self) -> tuple[int, str]:
        pending, latest = self._ledger.pending, self._ledger.latest
        if pending is not None:
            return (pending.state["delivered"], pending.phase)
        return (0, position.FRESH) if latest is None else (latest.delivered, latest.phase)

    def _adopt_persistent_iterator(self) -> None:
        iterator = getattr(self.loader, "_iterator", None)
        if isinstance(iterator, iterators.FollowedMulti):
            self._ledger = iterator._lc_ledger
        elif iterator is not None:
            log.warning(
                "The loader's persistent workers were started before lastcall followed it: they are "
                "restarted for the next pass."
            )
            self.loader._iterator = None

    def _warn_of_changes(self, state: dict[str, Any]) -> None:
        if state["facts"] is None:
            return
        workers, workers_now = state["facts"][2], self.loader.num_workers
        loader_facts.compare_batches(self.loader, state, self.doubts)
        inside = state["phase"] == position.INSIDE
        if len(state["generators"]) != len(self._ledger.generators):
            log.warning(
                "The loader and its samplers had %d random generators of their own and now have %d: the "
                "order of the samples will differ.",
                len(state["generators"]),
                len(self._ledger.generators),
            )
        if workers != workers_now and (inside or state["pool"] is not None):
            log.warning(
                "num_workers was %d and is now %d: the order of the samples stays the same, but the workers' "
                "random numbers cannot be carried over, so random augmentation will differ. Use "
                "num_workers=%d for an exact resume.",
                workers,
                workers_now,
                workers,
            )


class Followed(Protocol):
    """A place in the data that is saved and brought back. `worlds`: ranks of the run that saved the position,
    and of this one."""

    worlds: tuple[int, int] | None
    doubts: Doubts  # where to say what cannot be brought back

    def attach(self) -> None: ...

    def detach(self) -> None: ...

    def state(self) -> dict[str, Any]:
        """The position. Nothing in it changes afterwards."""

    def load(self, state: dict[str, Any]) -> None:
        """The next iterator continues from there."""

    @property
    def delivered(self) -> int: ...

    @property
    def exhausted(self) -> bool: ...


class Tracker(Followed, Protocol):
    """What follows a loader that a loop of ours goes through."""

    def iterate(self) -> Iterator[Any]: ...


class Noting(Tracker, Protocol):
    """One that others follow a loader with, who must know where it stood before each batch."""

    def note(self) -> Any:
        """This moment, as cheap as it can be: it is noted at every batch."""

    def state_of(self, noted: Any) -> dict[str, Any]:
        """What state() was at that moment."""


# loaders of other libraries, wrapped around ours
_kinds: list[tuple[Callable[[object], bool], Callable[[Any], Tracker]]] = []


def register(is_one: Callable[[object], bool], make: Callable[[Any], Tracker]) -> None:
    """Loaders of this kind are followed by what `make` returns."""
    if (is_one, make) not in _kinds:
        _kinds.append((is_one, make))


def is_loader(obj: object) -> bool:
    """Whether `obj` is something that track() can follow."""
    return (
        isinstance(obj, torch_data.DataLoader) or is_stateful(obj) or any(is_one(obj) for is_one, _ in _kinds)
    )


def is_foreign(loader: object) -> bool:
    """Whether it is of another library's kind, wrapped around a loader of torch's."""
    return any(is_one(loader) for is_one, _ in _kinds)


def track(loader: object) -> Tracker:
    for is_one, make in _kinds:
        if is_one(loader):
            return make(loader)
    return track_own(loader)


def track_own(loader: object) -> Noting:
    """For a loader of torch's, or of torchdata's: what those of other libraries are wrapped around."""
    if is_stateful(loader):
        return StatefulTracker(loader)
    if isinstance(loader, torch_data.DataLoader):
        if missing := ", ".join(iterators.missing()):
            raise errors.StateError(
                f"The DataLoader of torch {torch.__version__} cannot be followed: its iterators have no "
                f"{missing}. "
                "lastcall knows those of torch 2.4 to 2.13; use one of them, or torchdata's "
                "StatefulDataLoader."
            )
        return LoaderTracker(loader)
    raise errors.StateError(
        f"{type(loader).__module__}.{type(loader).__qualname__} is not a data loader whose position can be "
        f"saved: it is neither a torch.utils.data.DataLoader nor a torchdata StatefulDataLoader. Pass the "
        f"DataLoader that is underneath it, or give it state_dict() and load_state_dict() and pass it as "
        f"ordinary state."
    )


def _followed_class(own: type[Any], ledger: position.Ledger) -> type[Any]:
    bases = (FollowedLoader,) if own is torch_data.DataLoader else (own, FollowedLoader)
    return data_classes.derive(own, bases, {"_lc_ledger": ledger, "_lc_own_class": own})


def _own_class(followed: type[Any]) -> type[Any]:
    own: type[Any] = followed._lc_own_class
    return own
