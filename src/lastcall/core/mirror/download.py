"""Download from the mirror into the directory: every byte is checked before the copy gets the name of a
checkpoint."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from lastcall import clock as clocks
from lastcall import errors
from lastcall.core.checkpoint import commit
from lastcall.core.checkpoint.catalog import Catalog
from lastcall.core.checkpoint.record import Entry, Record
from lastcall.core.engine.writer import Engine
from lastcall.core.mirror.remote_catalog import RemoteCatalog
from lastcall.core.process import throughput
from lastcall.core.process.throughput import ThroughputLog
from lastcall.core.restore import restore
from lastcall.core.sync.stopped import Stopped
from lastcall.events import EventLog
from lastcall.storage import daemons
from lastcall.types import FileRecord

log = logging.getLogger("lastcall")
T = TypeVar("T")
_AT_ONCE = 4  # files at a time; a large one is also fetched in parts


def never() -> bool:
    return False


def interruptible(
    work: Callable[[Callable[[], bool]], T],
    stop_requested: Callable[[], bool],
    left: Callable[[], bool] = never,
    waiting: Callable[[], None] = lambda: None,
) -> T:
    """Run the work on a thread and return its result. Stopped if a notice comes meanwhile: an unresponsive
    mirror blocks that thread only, not the process. `left`: whether a notice has come to another rank; asked
    now and then. The work gets a function that says whether the caller has gone. `waiting` is called now and
    then."""
    over = threading.Event()

    def check() -> None:
        if stop_requested() or left():
            raise Stopped
        waiting()

    try:
        return daemons.at_once(lambda _: work(lambda: over.is_set() or stop_requested()), [None], 1, check)[0]
    finally:
        over.set()


class Downloader:
    def __init__(
        self, remote: RemoteCatalog, catalog: Catalog, clock: clocks.Clock, events: EventLog
    ) -> None:
        self._remote = remote
        self._catalog = catalog
        self._clock = clock
        self._events = events

    def newest(self, stop_requested: Callable[[], bool]) -> None:
        """The newest one that is whole, if the directory has none that is as new. Stopped if a notice comes
        meanwhile."""
        here, remote = self._catalog.entries(), self._remote
        newest = here[0].record.recency if here else (-1, -1, -1)
        theirs = [
            (name, record)
            for name, record in remote.records.items()
            if remote.ours(record) and record.recency > newest
        ]
        for name, record in sorted(
            theirs, key=lambda found: (found[1].complete, found[1].recency), reverse=True
        ):
            try:
                self._fetch(name, record, stop_requested)
                return
            except errors.UncheckedError as error:
                raise type(error)(f"{remote.url}/{name}: {error}") from error
            except errors.CheckpointError as error:
                log.warning("%s/%s is damaged and was skipped: %s", remote.url, name, error)
                del remote.records[name]

    def bring(self, name: str, stop_requested: Callable[[], bool] = never) -> None:
        """An older checkpoint that something refers to, if it is in the mirror and not here. A failure is
        only logged."""
        try:
            interruptible(
                lambda over: self._bring(name, over), stop_requested, waiting=self._remote.say_silence
            )
        except (errors.LastcallError, OSError, Stopped) as error:
            log.warning(
                "%s/%s could not be fetched: %s", self._remote.url, name, str(error) or "a notice came"
            )

    def _bring(self, name: str, stop_requested: Callable[[], bool]) -> None:
        self._remote.look_once()
        record = self._remote.records.get(name)
        if record is not None and self._remote.ours(record) and not (self._catalog.root / name).exists():
            self._fetch(name, record, stop_requested)

    def same(self, fingerprint: str, stop_requested: Callable[[], bool]) -> bool:
        """The checkpoint whose record this is; False where it is not there. Stopped if a notice comes
        meanwhile."""
        return interruptible(
            lambda over: self._same(fingerprint, over), stop_requested, waiting=self._remote.say_silence
        )

    def _same(self, fingerprint: str, stop_requested: Callable[[], bool]) -> bool:
        self._remote.look()
        for name, record in self._remote.records.items():
            if record.fingerprint == fingerprint:
                self._fetch(name, record, stop_requested)
                return True
        return False

    def _fetch(self, name: str, record: Record, stop_requested: Callable[[], bool]) -> None:
        catalog, began = self._catalog, self._clock.now()
        self._remote.check_whole(name)
        if catalog.files.free_bytes(catalog.root) < record.size:
            raise errors.NoSpaceError(
                f"{catalog.root} has no room for {name} of {self._remote.url}: "
                f"{throughput.amount(record.size)}"
            )
        log.info("Fetching %s from %s (%s)", name, self._remote.url, throughput.amount(record.size))
        with catalog.arriving(name) as folder:
            self._bring_files(name, record, folder, stop_requested)
            self._check(Entry(folder, record))
            catalog.publish(folder, record.step)
        seconds = self._clock.now() - began
        log.info("Fetched %s in %.1fs; its digests hold", name, seconds)
        self._events.emit(
            "fetched", path=name, step=record.step, bytes=record.size, seconds=seconds, place=self._remote.url
        )

    def _bring_files(
        self, name: str, record: Record, folder: Path, stop_requested: Callable[[], bool]
    ) -> None:
        tell = ThroughputLog(f"Fetching {name}", self._clock, record.size)
        over = False

        def check() -> None:
            if over or stop_requested():
                raise Stopped

        def bring(file: FileRecord) -> None:
            left = file.size

            def moved(count: int) -> None:
                nonlocal left
                check()
                left -= count
                if left < 0:  # whatever the mirror sends: it must not fill the disk
                    raise errors.CheckpointError(
                        f"{file.name} has more than the {file.size} bytes that were recorded"
                    )
                tell.more(count)

            self._remote.place.fetch(f"{name}/{file.name}", folder / file.name, moved)

        for file in record.files:
            (folder / file.name).parent.mkdir(parents=True, exist_ok=True)
        try:
            daemons.at_once(bring, record.files, _AT_ONCE, check)
        finally:
            over = True  # those in progress must end, too

    def _check(self, fetched: Entry) -> None:
        """Its digests, and that it is durable."""
        files = self._catalog.files
        engine = Engine(files=files)
        try:
            restore.verify(fetched, engine)
        finally:
            engine.close()
        for path in {(fetched.path / file.name).parent for file in fetched.record.files} - {fetched.path}:
            files.sync_directory(path)
        commit.seal(files, fetched.path, fetched.record)
