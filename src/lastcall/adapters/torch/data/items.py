"""run.batches() over anything that can be begun again: a range, a list, a prefetcher, a wrapper around a
loader, nodes of torchdata.

What the loop has used is counted, whatever was read ahead behind it. A resumed run begins the pass again as
it began the first time, with the generators and the loaders underneath as they were, and throws away as many
items as the loop had used: what lies between may hold anything (left-over samples, a counter), so nothing of
it is skipped. What training draws in between from the same generators is not drawn again: so what they were
before an item is kept, of the first and of the latest items that have moved them. With the latter, what was
read ahead is made again as it was; and a glimpse of the latest items shows whether it was.
"""

from __future__ import annotations

import re
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from lastcall import errors
from lastcall.adapters.torch.data import position
from lastcall.adapters.torch.data.delivery import replaying, seen
from lastcall.adapters.torch.data.objects import generators as rng
from lastcall.adapters.torch.data.objects import lazy
from lastcall.core.checkpoint.doubts import Doubts

VERSION = 1
KIND = "items"
_LATEST = 32  # items before which the generators are known, besides the first ones
Ledgers = Callable[[], list[position.Ledger]]


def unwrapped(source: Any) -> Any:
    """The iterable that a progress bar shows; anything else as it is."""
    kind = type(source)
    if kind.__module__.partition(".")[0] == "tqdm" and getattr(source, "iterable", None) is not None:
        return source.iterable
    return source


def through(tracker: Any, source: Any, done: int) -> Iterator[Any]:
    """What the tracker follows, as `source` hands it on: the thing itself, or a progress bar around it that
    has seen `done` of them."""
    if source is tracker.loader:
        batches: Iterator[Any] = tracker.iterate()
        return batches
    source.n = source.initial = done
    return tracker.through(source) if hasattr(tracker, "through") else iter(source)


class ItemsTracker:
    """The interface of LoaderTracker for any iterable. `ledgers`: those of all loaders that are followed."""

    def __init__(self, source: Iterable[Any], ledgers: Ledgers) -> None:
        if not hasattr(type(source), "__iter__") and not hasattr(type(source), "__getitem__"):
            raise errors.StateError(
                f"run.batches() was given a {type(source).__qualname__}, which is nothing to iterate over"
            )
        self.loader = source
        self.worlds: tuple[int, int] | None = None
        self.doubts = Doubts()
        self.delivered = 0
        self.exhausted = False
        self._ledgers = ledgers
        self._begin: rng.Parts | None = None
        self._seconds = 0.0  # that the items of this pass took to make
        self._again = 0
        self._watch = lazy.Watch()
        # items that moved the process's generators, and what these were before
        self._moved: dict[int, rng.Parts] = {}
        self._latest: deque[tuple[int, rng.Parts]] = deque(maxlen=_LATEST)
        self._glimpses: deque[tuple[int, int]] = deque(maxlen=seen.KEPT)
        self._seen: seen.Marks = ()  # of the pass that is continued
        self._open: set[int] = set()  # ledgers with an iterator that was made before the pass began
        # of a pass that was left, until the next one: what was used of it, and where it began underneath
        self._left: tuple[int, list[tuple[position.Ledger, Any]]] | None = None

    def attach(self) -> None:
        pass

    def detach(self) -> None:
        pass

    def state(self) -> dict[str, Any]:
        inside = self.delivered > 0
        return {
            "kind": KIND,
            "version": VERSION,
            "delivered": self.delivered,
            "begin": self._begin if inside else None,
            "seconds": round(self._seconds, 3).hex() if inside else "",
            "moved": (*self._moved.items(), *self._latest) if inside else (),
            "seen": (seen.of_batches(self._glimpses, self.delivered) or self._seen) if inside else (),
        }

    def load(self, state: dict[str, Any]) -> None:
        if state.get("kind") != KIND or state.get("version") != VERSION:
            raise errors.MismatchError(
                f"The saved data position is of kind {state.get('kind')!r}, version "
                f"{state.get('version')!r}, but run.batches() is now "
                f"given a {type(self.loader).__qualname__}, which needs kind {KIND!r}, version {VERSION}. "
                "Give it what it was "
                "given when the position was saved, or begin in another directory."
            )
        self.delivered = self._again = state["delivered"]
        self._begin = state["begin"]
        self._seconds = float.fromhex(state["seconds"]) if state["seconds"] else 0.0
        self._moved, self._latest = {}, deque(maxlen=_LATEST)
        for number, parts in state.get("moved", ()):
            self._remember(number, parts)
        self._seen = tuple(state.get("seen", ()))

    def iterate(self) -> Iterator[Any]:
        return self.through(self.loader)

    def through(self, source: Any) -> Iterator[Any]:
        again, self._again, self._left = self._again, 0, None
        now = rng.take_parts()
        if again and self._begin is not None:
            rng.put_parts(self._begin)
        else:
            self._begin, self._seconds, self._moved, self._seen = now, 0.0, {}, ()
            self._latest.clear()
        self._glimpses.clear()
        self.delivered, self.exhausted = again, False
        self._release()
        self._open = {
            id(ledger) for ledger in self._ledgers() if ledger.latest is not None and ledger.latest.inside
        }
        threads = set(threading.enumerate())
        items = iter(source)
        if again:
            self._replay(items, again)
            rng.put_parts(now)
        while True:
            began = time.perf_counter()
            try:
                item = self._made(items, self.delivered)
            except StopIteration:
                break
            self._seconds += time.perf_counter() - began
            self.delivered += 1
            if self.delivered == 1:
                self._look_for_threads({*threading.enumerate()} - threads | _threads_of(source))
            try:
                yield item
            except GeneratorExit:
                self._leave()
                raise
        self._release()
        self.delivered, self.exhausted = 0, True

    def _leave(self) -> None:
        """By `break`, or by an exception: it looks the same from here."""
        self._left = self.delivered, [(ledger, ledger.anchor) for ledger in self._ledgers()]
        self._release()
        self.delivered = 0

    def take_back(self) -> None:
        """It was no `break`: the pass stands where it was interrupted."""
        if self._left is not None:
            self.delivered, anchors = self._left
            for ledger, anchor in anchors:
                ledger.anchor = anchor

    def _look_for_threads(self, started: set[threading.Thread]) -> None:
        """Those that draw by themselves: what they have drawn at a boundary, and with which random numbers,
        is a matter of time."""
        for thread in started:
            if thread is not threading.current_thread() and not _HARMLESS.search(
                f"{type(thread).__module__} {thread.name}"
            ):
                self.doubts.add(
                    f"run.batches({type(self.loader).__qualname__}) is filled by another thread, ahead of "
                    "the loop",
                    "Let the loader itself work ahead: DataLoader(..., num_workers=1), iterated in the "
                    "thread that trains.",
                )

    def _replay(self, items: Iterator[Any], count: int) -> None:
        what = f"run.batches({type(self.loader).__qualname__})"
        made_with = {**self._moved, **dict(self._latest)}
        numbers = iter(range(count))
        found = replaying.replay(
            what, count, self._seconds, lambda: self._made_again(items, next(numbers), made_with)
        )
        if not self.doubts:  # a thread that reads ahead draws when it comes to it
            # The first one is made while the loaders underneath begin, which puts the generators back behind
            # its back: its noise is another, and it is not trained on.
            before = [mark for mark in self._seen if mark[0] > 0]
            seen.compare(before, seen.of_batches(self._glimpses, count), what, self.doubts)
        if found < count:
            self.doubts.add(
                f"{what} ended after {found} items, though {count} of them had been used before the "
                "interruption",
                "What it is made from must be the same in every incarnation.",
            )

    def _made(self, items: Iterator[Any], number: int) -> Any:
        before = self._watch.before()
        item = self._next(items)
        if (parts := self._watch.moved(before)) is not None:
            self._remember(number, parts)
        self._glimpses.append((number, seen.glimpse(item)))
        return item

    def _made_again(self, items: Iterator[Any], number: int, made_with: dict[int, rng.Parts]) -> None:
        if (parts := made_with.get(number)) is not None:
            rng.put_parts(parts)
        self._glimpses.append((number, seen.glimpse(self._next(items))))

    def _remember(self, number: int, parts: rng.Parts) -> None:
        if len(self._moved) < lazy.MOST - _LATEST:
            self._moved[number] = parts
        else:
            self._latest.append((number, parts))

    def _next(self, items: Iterator[Any]) -> Any:
        """The loaders underneath are begun again with us: their own positions do not count."""
        before = {id(ledger): _mark(ledger) for ledger in self._ledgers()}
        try:
            return next(items)
        finally:
            for ledger in self._ledgers():
                if before.get(id(ledger)) != _mark(ledger):
                    ledger.anchor_here(id(ledger) in self._open)

    def _release(self) -> None:
        for ledger in self._ledgers():
            ledger.anchor = None


# Threads that draw nothing: those of torch's and Python's own queues, of progress bars, and ours.
_HARMLESS = re.compile(
    r"^(torch|multiprocessing|concurrent|tqdm)\b|QueueFeeder|pin_memory|lastcall|TMonitor|ThreadPool"
)


def _threads_of(source: object) -> set[threading.Thread]:
    """A prefetcher is a thread, or has one."""
    parts = (source, *getattr(source, "__dict__", {}).values())
    return {part for part in parts if isinstance(part, threading.Thread)}


def _mark(ledger: position.Ledger) -> tuple[Any, int]:
    latest = ledger.latest
    return (latest, 0 if latest is None else latest.delivered + (latest.phase == position.BETWEEN))
