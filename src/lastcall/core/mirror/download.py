"""From the place of the mirror into the directory: every byte is checked before the copy gets the name of a checkpoint."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from lastcall import clock as clocks
from lastcall import errors
from lastcall.core.checkpoint import record as records
from lastcall.core.checkpoint.catalog import Catalog
from lastcall.core.checkpoint.record import Entry, Record
from lastcall.core.engine.writer import Engine
from lastcall.core.mirror.remote_catalog import Mirrored
from lastcall.core.process import throughput
from lastcall.core.process.throughput import Telling
from lastcall.core.restore import restore
from lastcall.core.sync.stopped import Stopped
from lastcall.events import EventLog
from lastcall.storage import daemons
from lastcall.storage import files as storage
from lastcall.types import FileRecord

log = logging.getLogger("lastcall")
T = TypeVar("T")
_AT_ONCE = 4  # files on their way; a large one comes in parts besides


def never() -> bool:
    return False


def unless_told(
    work: Callable[[Callable[[], bool]], T],
    told: Callable[[], bool],
    left: Callable[[], bool] = never,
    waiting: Callable[[], None] = lambda: None,
) -> T:
    """What it returns. Stopped if a notice comes meanwhile: a place that has stopped answering holds a thread up, and not the process.
    `left`: whether one has come to another rank; asked now and then. The work is handed what tells it that nobody waits any more.
    `waiting` is called now and then."""
    over = threading.Event()

    def check() -> None:
        if told() or left():
            raise Stopped
        waiting()

    try:
        return daemons.at_once(lambda _: work(lambda: over.is_set() or told()), [None], 1, check)[0]
    finally:
        over.set()


class Fetching:
    def __init__(self, there: Mirrored, catalog: Catalog, clock: clocks.Clock, events: EventLog) -> None:
        self._there = there
        self._catalog = catalog
        self._clock = clock
        self._events = events

    def newest(self, told: Callable[[], bool]) -> None:
        """The newest one that is whole, if the directory has none that is as new. Stopped if a notice comes meanwhile."""
        here, there = self._catalog.entries(), self._there
        newest = here[0].record.recency if here else (-1, -1, -1)
        theirs = [(name, record) for name, record in there.records.items() if there.ours(record) and record.recency > newest]
        for name, record in sorted(theirs, key=lambda found: (found[1].complete, found[1].recency), reverse=True):
            try:
                self._fetch(name, record, told)
                return
            except errors.UncheckedError as error:
                raise type(error)(f"{there.url}/{name}: {error}") from error
            except errors.CheckpointError as error:
                log.warning("%s/%s is damaged, and passed over: %s", there.url, name, error)
                del there.records[name]

    def bring(self, name: str, told: Callable[[], bool] = never) -> None:
        """An older checkpoint that somebody refers to, if it is there and not here. What fails is said, and no more."""
        try:
            unless_told(lambda over: self._bring(name, over), told, waiting=self._there.say_silence)
        except (errors.LastcallError, OSError, Stopped) as error:
            log.warning("%s/%s could not be fetched: %s", self._there.url, name, str(error) or "a notice came")

    def _bring(self, name: str, told: Callable[[], bool]) -> None:
        self._there.look_once()
        record = self._there.records.get(name)
        if record is not None and self._there.ours(record) and not (self._catalog.root / name).exists():
            self._fetch(name, record, told)

    def same(self, fingerprint: str, told: Callable[[], bool]) -> bool:
        """The checkpoint whose record this is; False where it is not there. Stopped if a notice comes meanwhile."""
        return unless_told(lambda over: self._same(fingerprint, over), told, waiting=self._there.say_silence)

    def _same(self, fingerprint: str, told: Callable[[], bool]) -> bool:
        self._there.look()
        for name, record in self._there.records.items():
            if record.fingerprint == fingerprint:
                self._fetch(name, record, told)
                return True
        return False

    def _fetch(self, name: str, record: Record, told: Callable[[], bool]) -> None:
        catalog, began = self._catalog, self._clock.now()
        self._there.check_whole(name)
        if catalog.files.free_bytes(catalog.root) < record.size:
            raise errors.NoSpaceError(f"{catalog.root} has no room for {name} of {self._there.url}: {throughput.amount(record.size)}")
        log.info("Fetching %s from %s (%s)", name, self._there.url, throughput.amount(record.size))
        with catalog.arriving(name) as folder:
            self._bring_files(name, record, folder, told)
            self._check(Entry(folder, record))
            catalog.publish(folder, record.step)
        seconds = self._clock.now() - began
        log.info("Fetched %s in %.1fs; its digests hold", name, seconds)
        self._events.emit("fetched", path=name, step=record.step, bytes=record.size, seconds=seconds, place=self._there.url)

    def _bring_files(self, name: str, record: Record, folder: Path, told: Callable[[], bool]) -> None:
        tell = Telling(f"Fetching {name}", self._clock, record.size)
        over = False

        def check() -> None:
            if over or told():
                raise Stopped

        def bring(file: FileRecord) -> None:
            left = file.size

            def moved(count: int) -> None:
                nonlocal left
                check()
                left -= count
                if left < 0:  # whatever the place has there by now: no disk is filled with it
                    raise errors.CheckpointError(f"{file.name} has more than the {file.size} bytes that were recorded")
                tell.more(count)

            self._there.place.fetch(f"{name}/{file.name}", folder / file.name, moved)

        for file in record.files:
            (folder / file.name).parent.mkdir(parents=True, exist_ok=True)
        try:
            daemons.at_once(bring, record.files, _AT_ONCE, check)
        finally:
            over = True  # those that are still under way shall end, too

    def _check(self, fetched: Entry) -> None:
        """Its digests, and that it is durable."""
        files = self._catalog.files
        storage.write_small(files, fetched.path / records.NAME, fetched.record.to_json())
        engine = Engine(files=files)
        try:
            restore.verify(fetched, engine)
        finally:
            engine.close()
        for path in {(fetched.path / file.name).parent for file in fetched.record.files} | {fetched.path}:
            files.sync_directory(path)
