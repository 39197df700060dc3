"""Loaders that were not handed over: while a run is open, every DataLoader that is iterated over is followed
from then on.

It is known by the place in the script where it was opened first, since the resumed script opens it there,
too. A loader that is recreated for each pass takes the place of the one before. An iterator that was made
before the block is adopted, if nothing was drawn from it yet and no worker has begun; otherwise its position
cannot be known, and that is said.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

from torch.utils import data as torch_data
from torch.utils.data import dataloader as torch_dataloader

from lastcall.adapters.torch.data import iterator_start, iterators, loaders
from lastcall.adapters.torch.data.delivery import sites
from lastcall.adapters.torch.data.objects import generators as rng
from lastcall.core.checkpoint.doubts import Doubts

_BEFORE = "before the block"
_Base: Any = getattr(torch_dataloader, "_BaseDataLoaderIter", None)


class Noticed:
    """The loaders that were noticed, by the place where they were opened. `follow` attaches a tracker."""

    def __init__(
        self, follow: Callable[[Any], loaders.Tracker], handed: dict[int, Any], doubts: Doubts
    ) -> None:
        self._follow = follow
        self._handed = handed  # trackers of what protect() and run.batches() know, by the loader's id
        self._doubts = doubts
        self._here: dict[str, loaders.Tracker] = {}
        self._resumed: dict[str, Any] = {}
        self._undo: list[Callable[[], None]] = []

    # ---- the block -----------------------------------------------------------------------------------------

    def install(self) -> None:
        self._wrap(torch_data.DataLoader, "__iter__", self._opened)
        stateful: Any = sys.modules.get("torchdata.stateful_dataloader.stateful_dataloader")
        if stateful is not None:
            self._wrap(stateful.StatefulDataLoader, "__iter__", self._opened_stateful)
        if _Base is not None:
            self._wrap(_Base, "__next__", self._drawn)

    def remove(self) -> None:
        while self._undo:
            self._undo.pop()()
        for tracker in self._here.values():
            tracker.detach()

    def _wrap(self, kind: Any, name: str, hook: Callable[[Any, Any], Any]) -> None:
        own = kind.__dict__[name]

        @functools.wraps(own)
        def wrapper(this: Any) -> Any:
            return hook(this, own)

        def undo() -> None:
            # somebody else's wrapper may lie over ours: it stays, and ours does nothing
            if kind.__dict__[name] is wrapper:
                setattr(kind, name, own)

        setattr(kind, name, wrapper)
        self._undo.append(undo)

    # ---- positions -----------------------------------------------------------------------------------------

    def trackers(self) -> list[loaders.Tracker]:
        return list(self._here.values())

    def positions(self) -> list[dict[str, Any]]:
        """One that this incarnation has not come to yet stands where the last one left it."""
        here = {place: tracker.state() for place, tracker in list(self._here.items())}
        return [{"noticed": place, "state": state} for place, state in {**self._resumed, **here}.items()]

    def resume(self, positions: list[Any]) -> list[Any]:
        """Take what positions() has given; returns the rest."""
        mine = [entry for entry in positions if isinstance(entry, dict) and "noticed" in entry]
        self._resumed = {entry["noticed"]: entry["state"] for entry in mine}
        return [entry for entry in positions if entry not in mine]

    def hand_over(self, loader: object) -> loaders.Tracker | None:
        """run.batches() is given a loader that was noticed before: it is followed as one of its loaders from
        now on."""
        for place, tracker in self._here.items():
            if getattr(tracker, "loader", None) is loader:
                del self._here[place]
                return tracker
        return None

    # ---- what is noticed -----------------------------------------------------------------------------------

    def _opened(self, loader: Any, own: Any) -> Any:
        if not self._undo or isinstance(loader, loaders.FollowedLoader) or loaders.is_foreign(loader):
            return own(loader)
        self._notice(loader)
        return loaders.FollowedLoader.__iter__(loader)

    def _opened_stateful(self, loader: Any, own: Any) -> Any:
        known = (getattr(tracker, "loader", None) for tracker in self._here.values())
        if self._undo and id(loader) not in self._handed and all(one is not loader for one in known):
            self._notice(loader)
        return own(loader)

    def _notice(self, loader: Any) -> None:
        place = site = f"{sites.here()} | {_kind(loader)}"
        number = 1
        while place in self._here and _busy(self._here[place]):
            number += 1
            place = f"{site} | {number}"
        if place in self._here:
            self._here.pop(place).detach()
        tracker = self._here[place] = self._follow(loader)
        if (state := self._resumed.pop(place, None)) is not None:
            tracker.load(state)

    def _drawn(self, iterator: Any, own: Any) -> Any:
        if not self._undo or isinstance(iterator, iterators.Followed) or not _of_torch(iterator):
            return own(iterator)
        if self._adopt(iterator):
            return iterator.__next__()
        self._doubts.add(
            f"an iterator over a DataLoader of `{type(iterator._dataset).__name__}` is not followed: it was "
            "made before the block",
            "Call iter(loader) inside `with lastcall.protect(...)`.",
        )
        return own(iterator)

    def _adopt(self, iterator: Any) -> bool:
        tracker = next((tracker for tracker in self._handed.values() if _made(tracker, iterator)), None)
        untouched = type(iterator) is iterators.Single and iterator._num_yielded == 0
        if tracker is None or not untouched or type(iterator._index_sampler) is not torch_data.BatchSampler:
            return False
        iterator_start.adopt(iterator, tracker.loader, tracker.ledger, _BEFORE)
        return True


def _of_torch(iterator: Any) -> bool:
    return type(iterator).__module__.startswith("torch.utils.data")


def _made(tracker: Any, iterator: Any) -> bool:
    loader = getattr(tracker, "loader", None)
    return isinstance(loader, loaders.FollowedLoader) and loader._index_sampler is iterator._index_sampler


def _busy(tracker: Any) -> bool:
    """Whether the script is in the middle of a pass over it."""
    latest = tracker.ledger.latest if isinstance(tracker, loaders.LoaderTracker) else None
    return latest is not None and latest.inside


def _kind(loader: Any) -> str:
    try:
        size: Any = len(loader.dataset)
    except (TypeError, NotImplementedError):
        size = "?"
    return (
        f"{type(loader.dataset).__name__}, {size} in batches of {loader.batch_size}, "
        f"{len(rng.find_generators(loader))}"
    )
