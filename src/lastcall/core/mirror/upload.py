"""Upload from the directory to the mirror, on a thread of its own: one checkpoint at a time, the newest that
waits.

A waiting checkpoint gives way to a newer one; so does an upload in progress once a notice has come. Waiting
ones are held by links, so that rotation cannot remove them, and a file that is already in the mirror, by its
digest, is not sent again.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import math
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from lastcall import clock as clocks
from lastcall import errors
from lastcall.core.checkpoint.catalog import MIRRORING, Catalog
from lastcall.core.checkpoint.record import Entry
from lastcall.core.checkpoint.retention import Keep
from lastcall.core.mirror.remote_catalog import RemoteCatalog
from lastcall.core.process import throughput
from lastcall.core.process.throughput import ThroughputLog
from lastcall.events import EventLog
from lastcall.storage import daemons
from lastcall.storage import files as storage
from lastcall.types import FileRecord

log = logging.getLogger("lastcall")
_AT_ONCE = 4  # files at a time; a large one is also sent in parts
_TRIES = 5  # while no process waits for it: the next checkpoint will be tried, too
_PAUSE = 2.0  # seconds before the second attempt, doubled before each later one
_LONGEST_PAUSE = 30.0
_LOOK = 1.0
_TIDY = 5.0  # seconds of its grace that a process may spend on removing expired checkpoints
_SAFETY = 1.3
_WORTH_MEASURING = 1_000_000  # bytes; fewer say more about latency than about speed

# infinite while there is all the time; a notice, or a second one, may bring it forward
Until = Callable[[], float]


def whenever() -> float:
    """For a process that has not been asked to stop."""
    return math.inf


def _limited(until: Until) -> bool:
    return until() < math.inf


class _Dropped(Exception):
    """A newer checkpoint is to be uploaded first, or the caller no longer waits."""


@dataclass
class _Held:
    """A checkpoint that waits to be uploaded, or is being uploaded."""

    entry: Entry
    folder: Path  # where its files are: under names of their own, so that rotation does not remove them
    rotate: bool  # whether older ones may be removed after it
    arrived: set[str] = field(default_factory=set)  # files that need not be sent again in the next attempt
    moved: int = 0  # bytes
    trouble: str = ""  # of the last attempt
    dropped: bool = False  # no longer wanted

    def more(self, count: int) -> None:
        if self.dropped:
            raise _Dropped
        self.moved += count


class Uploader:
    def __init__(
        self,
        remote: RemoteCatalog,
        catalog: Catalog,
        clock: clocks.Clock,
        events: EventLog,
        keep: Callable[[], Keep],
    ) -> None:
        self._remote = remote
        self._catalog = catalog
        self._clock = clock
        self._events = events
        self._keep = keep
        self._changed = threading.Condition()
        self._waiting: _Held | None = None
        self._sending: _Held | None = None
        self._tidying = False
        self._thread: threading.Thread | None = None
        self._until: Until = whenever  # a process waits, until then
        self._speed: float | None = None  # bytes a second
        self._lost = ""  # why the newest checkpoint is not in the mirror

    def seconds(self, nbytes: int) -> float:
        """How long uploading so many bytes is expected to take, measured by earlier uploads."""
        return _SAFETY * nbytes / self._speed if self._speed else 0.0

    def push(self, entry: Entry, *, urgent: bool = False, rotate: bool = True) -> None:
        """Have a checkpoint uploaded; returns at once. One that still waits gives way to it, and so does one
        in progress if this is urgent."""
        held = self._hold(entry, rotate)
        with self._changed:
            if self._waiting is not None:
                self._let_go(self._waiting)
            self._waiting = held
            if urgent and self._sending is not None:
                self._sending.dropped = True
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name="lastcall-mirror", daemon=True)
                self._thread.start()
            self._changed.notify_all()

    def settle(self, until: Until) -> str:
        """Wait until everything is uploaded, but not longer than `until`. Nothing is uploaded afterwards.
        Returns why the newest is not in the mirror; empty if it is."""
        with self._changed:
            self._until = until
            self._wait(self._copies, until)
            late = self._waiting or self._sending
            if late is None:
                self._wait_for_a_tidy_place(until)
            if self._sending is not None:
                self._sending.dropped = True
            if self._waiting is not None:
                self._let_go(self._waiting)
                self._waiting = None
            self._changed.notify_all()
            if late is not None:
                return "there was no time left" + (f" ({late.trouble})" if late.trouble else "")
            return self._lost

    def _wait(self, busy: Callable[[], bool], until: Until) -> None:
        tell = ThroughputLog(f"Uploading to {self._remote.url}", self._clock)
        while busy() and self._clock.now() < until():
            self._changed.wait(max(0.01, min(_LOOK, until() - self._clock.now())))
            tell.at(self._sending.moved if self._sending is not None else 0)

    def _wait_for_a_tidy_place(self, until: Until) -> None:
        """Otherwise a run that is preempted again and again would leave one more checkpoint behind each
        time."""
        enough = self._clock.now() + _TIDY
        self._wait(lambda: self._tidying, lambda: min(enough, until()) if _limited(until) else math.inf)

    def _copies(self) -> bool:
        return self._waiting is not None or self._sending is not None

    # ---- what waits ----------------------------------------------------------------------------------------

    def _hold(self, entry: Entry, rotate: bool) -> _Held:
        """Links cost nothing, and a file with two names is never recycled. Without links, rotation may remove
        it first."""
        folder = self._catalog.private / MIRRORING / f"{entry.path.name}-{entry.record.sequence}"
        try:
            if folder.exists():
                storage.remove_tree(self._catalog.files, folder)
            for file in entry.record.files:
                (folder / file.name).parent.mkdir(parents=True, exist_ok=True)
                self._catalog.files.link(entry.path / file.name, folder / file.name)
        except OSError as error:
            log.debug("Could not link the files of %s: %s", entry.path.name, error)
            with contextlib.suppress(OSError):
                storage.remove_tree(self._catalog.files, folder)
            return _Held(entry, entry.path, rotate)
        return _Held(entry, folder, rotate)

    def _let_go(self, held: _Held) -> None:
        if held.folder != held.entry.path:
            with contextlib.suppress(OSError):
                storage.remove_tree(self._catalog.files, held.folder)

    # ---- the thread ----------------------------------------------------------------------------------------

    def _work(self) -> None:
        while (held := self._next()) is not None:
            lost = "an internal error in lastcall"
            try:
                lost = self._try(held)
            except Exception:
                name = held.entry.path.name
                log.exception(
                    "Internal error in lastcall: %s was not uploaded to %s (please report this)",
                    name,
                    self._remote.url,
                )
            self._let_go(held)
            with self._changed:
                self._sending, self._lost, self._tidying = None, lost, not lost
                self._changed.notify_all()
            if not lost:
                self._tidy(held)

    def _tidy(self, held: _Held) -> None:
        try:
            self._remote.tidy(self._keep() if held.rotate else None, lambda: self._waiting is not None)
        except Exception:  # without this thread nothing would be uploaded any more
            log.exception(
                "Internal error in lastcall: could not clean up %s (please report this)", self._remote.url
            )

    def _next(self) -> _Held | None:
        with self._changed:
            self._tidying = False
            self._sending, self._waiting = self._waiting, None
            if self._sending is None:
                self._thread = None
            self._changed.notify_all()
            return self._sending

    def _try(self, held: _Held) -> str:
        """Empty if it is in the mirror now; else why it is not."""
        for attempt in itertools.count(1):
            try:
                self._send(held)
                return ""
            except _Dropped:
                return "it was dropped for a newer one"
            except (errors.LastcallError, OSError) as error:
                pause = min(_PAUSE * 2 ** (attempt - 1), _LONGEST_PAUSE)
                held.trouble = str(error)
                final = isinstance(error, errors.StorageRefused) or (
                    attempt >= _TRIES and not self._time_for(pause)
                )
                log.log(
                    logging.ERROR if final else logging.WARNING, "Could not upload %s (%s)%s",
                    held.entry.path.name, error, "" if final else "; retrying",
                )  # fmt: skip
                if final or not self._pause(held, pause):
                    break
        return held.trouble

    def _time_for(self, seconds: float) -> bool:
        """Whether a process waits, and still will: one that was asked to stop tries for as long as it may
        live."""
        return _limited(self._until) and self._clock.now() + seconds < self._until()

    def _pause(self, held: _Held, seconds: float) -> bool:
        """False if a newer one waits, or the caller no longer does."""
        with self._changed:
            self._changed.wait_for(lambda: held.dropped or self._waiting is not None, seconds)
            return not held.dropped and self._waiting is None

    def _send(self, held: _Held) -> None:
        entry, began, held.moved = held.entry, self._clock.now(), 0
        self._remote.look_once()
        name = self._remote.begin(entry)
        same = self._same()

        def send(file: FileRecord) -> int:
            held.more(0)
            if file.name in held.arrived:
                return 0
            known = same.get((file.digest, file.size, entry.record.algorithm))
            spared = known is not None and self._copied(known, f"{name}/{file.name}")
            if not spared:
                self._remote.place.send(held.folder / file.name, f"{name}/{file.name}", held.more)
            held.arrived.add(file.name)
            return 0 if spared else file.size

        largest_first = sorted(entry.record.files, key=lambda file: file.size, reverse=True)
        sent = sum(daemons.at_once(send, largest_first, _AT_ONCE, lambda: held.more(0)))
        held.more(0)
        self._remote.commit(name, entry.record)
        seconds = self._clock.now() - began
        if sent >= _WORTH_MEASURING and seconds > 0:
            self._speed = sent / seconds
        log.info(
            "Uploaded %s to %s in %.1fs (%s)",
            entry.path.name,
            self._remote.url,
            seconds,
            throughput.amount(sent),
        )
        self._events.emit(
            "copied",
            path=entry.path.name,
            step=entry.record.step,
            bytes=sent,
            seconds=seconds,
            place=self._remote.url,
        )

    def _same(self) -> dict[tuple[str, int, str], str]:
        """The files that are there, by what is in them."""
        return {
            (file.digest, file.size, record.algorithm): f"{name}/{file.name}"
            for name, record in self._remote.records.items()
            for file in record.files
        }

    def _copied(self, known: str, name: str) -> bool:
        """Whether the mirror could copy it on its side: it may have been removed there."""
        if known == name:
            return True
        try:
            self._remote.place.copy(known, name)
        except errors.StorageError as error:
            log.debug("Sending %s again: %s", name, error)
            return False
        return True
