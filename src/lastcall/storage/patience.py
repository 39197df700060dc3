"""How long storage has not answered, so that a waiting process can log what it waits for."""

from __future__ import annotations

import contextlib
import itertools
import logging
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from lastcall import clock as clocks
from lastcall.storage.files import Moved, nothing
from lastcall.storage.objects import Objects

log = logging.getLogger("lastcall")
SILENT = 5.0  # seconds without an answer before the first log line, and between two lines


class Asked:
    """Requests in progress, and since when. Bytes that move count as an answer."""

    def __init__(self, clock: clocks.Clock) -> None:
        self._clock = clock
        self._numbers = itertools.count()
        self._under_way: dict[int, tuple[str, float]] = {}
        self._next = 0.0

    @contextlib.contextmanager
    def asking(self, what: str) -> Iterator[Callable[[], None]]:
        """The returned function is called when bytes have arrived."""
        number, now = next(self._numbers), self._clock.now

        def heard() -> None:
            self._under_way[number] = (what, now())

        heard()
        try:
            yield heard
        finally:
            self._under_way.pop(number, None)

    def silent(self) -> tuple[str, float] | None:
        """The request without an answer for the longest time, and for how long."""
        waiting = list(self._under_way.values())
        what, since = min(waiting, key=lambda each: each[1], default=("", 0.0))
        return (what, self._clock.now() - since) if waiting else None

    def say(self, url: str) -> None:
        """Called periodically by the waiting thread: logs a line every few seconds while there is no
        answer."""
        found = self.silent()
        if found is not None and found[1] >= SILENT and self._clock.now() >= self._next:
            self._next = self._clock.now() + SILENT
            log.warning(
                "Still waiting for %s: no answer to %s for %.0f s. Training starts when it is known what is "
                "saved "
                "there. Check that it can be reached; to start without it: unset LASTCALL_MIRROR",
                url,
                *found,
            )


class Patient:
    """Storage whose slow answers are logged. Opened at the first request, which may take long, too."""

    def __init__(self, url: str, opened: Callable[[], Objects], clock: clocks.Clock) -> None:
        self._url = url
        self._opened = opened
        self._found: Objects | None = None
        self.asked = Asked(clock)

    @property
    def url(self) -> str:
        return self._url if self._found is None else self._found.url

    def _place(self) -> Objects:
        if self._found is None:
            self._found = self._opened()
        return self._found

    def names(self, prefix: str = "") -> dict[str, int]:
        with self.asked.asking("what is there"):
            return self._place().names(prefix)

    def read(self, name: str, largest: int) -> bytes | None:
        with self.asked.asking(f"reading {name}"):
            return self._place().read(name, largest)

    def write(self, name: str, data: bytes) -> None:
        with self.asked.asking(f"writing {name}"):
            self._place().write(name, data)

    def send(self, path: Path, name: str, moved: Moved = nothing, *, threads: bool = True) -> None:
        with self.asked.asking(f"writing {name}") as heard:
            self._place().send(path, name, _both(heard, moved), threads=threads)

    def fetch(self, name: str, path: Path, moved: Moved = nothing) -> None:
        with self.asked.asking(f"reading {name}") as heard:
            self._place().fetch(name, path, _both(heard, moved))

    def copy(self, old: str, new: str) -> None:
        with self.asked.asking(f"copying {old}"):
            self._place().copy(old, new)

    def remove(self, names: Iterable[str]) -> None:
        with self.asked.asking("removing files"):
            self._place().remove(names)

    def age(self, name: str) -> float | None:
        with self.asked.asking(f"looking at {name}"):
            return self._place().age(name)


def _both(heard: Callable[[], None], moved: Moved) -> Moved:
    def more(count: int) -> None:
        heard()
        moved(count)

    return more
