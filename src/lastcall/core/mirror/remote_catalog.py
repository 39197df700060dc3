"""What is known to be in the mirror: whole checkpoints, by their records, and uploads that were never
finished (`checkpoint.commit`): those are removed after the next one. Folders that have neither a record nor a
sentinel are not ours."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from pathlib import Path

from lastcall import clock as clocks
from lastcall import errors
from lastcall.core.checkpoint import commit, retention
from lastcall.core.checkpoint import record as records
from lastcall.core.checkpoint.catalog import Catalog
from lastcall.core.checkpoint.record import Entry, Record
from lastcall.core.checkpoint.retention import Keep
from lastcall.storage import objects
from lastcall.storage.patience import Patient

log = logging.getLogger("lastcall")
_FOLDER = re.compile(
    rf"(checkpoint-\d+(?:\.replaced-\d+)?)/({re.escape(records.NAME)}|{re.escape(records.SENTINEL)})"
)
_SMALL = 64 * 1024


class RemoteCatalog:
    def __init__(
        self, url: str, catalog: Catalog, keys: str | None = None, clock: clocks.Clock | None = None
    ) -> None:
        """`keys`: a folder with the credentials."""
        self.url = url
        self._catalog = catalog
        self.place = Patient(url, lambda: objects.opened(url, keys), clock or clocks.Clock())
        self._sizes: dict[str, int] | None = None  # of all objects in it; None before the first listing
        self.records: dict[str, Record] = {}
        self._unfinished: set[str] = set()

    def say_silence(self) -> None:
        """Called now and then at the start, while waiting for the mirror."""
        self.place.asked.say(self.url)

    # ---- what is there -------------------------------------------------------------------------------------

    def look(self) -> None:
        sizes = self.place.names("checkpoint-")
        for gone in [name for name in self.records if f"{name}/{records.NAME}" not in sizes]:
            del self.records[gone]
        for folder, what in [
            match.groups() for name in sizes if (match := _FOLDER.fullmatch(name)) is not None
        ]:
            if what == records.NAME:
                self._read(folder)
            elif f"{folder}/{records.NAME}" not in sizes and self._began(folder):
                self._unfinished.add(folder)
        self._sizes = sizes

    def forget(self) -> None:
        """Another rank has uploaded meanwhile: the next reader lists the mirror again."""
        self._sizes = None

    def look_once(self) -> None:
        """For a rank that has downloaded nothing, and now uploads for the others."""
        if self._sizes is None:
            self.look()

    def _read(self, folder: str) -> None:
        data = self.place.read(f"{folder}/{records.NAME}", records.LARGEST)
        try:
            if data is not None:
                self.records[folder] = records.parse(data)
        except errors.UncheckedError as error:
            raise type(error)(f"{self.url}/{folder}: {error}") from error
        except errors.CheckpointError as error:
            log.warning("%s/%s is unusable and was skipped: %s", self.url, folder, error)

    def _began(self, folder: str) -> bool:
        """Whether an unfinished upload is one of ours."""
        run = self.place.read(f"{folder}/{records.SENTINEL}", _SMALL)
        return run is not None and (not self._catalog.run or run == self._catalog.run.encode())

    def ours(self, record: Record) -> bool:
        return not self._catalog.run or record.run == self._catalog.run

    def has(self, record: Record) -> bool:
        return record in list(self.records.values())

    def check_whole(self, name: str) -> None:
        """CheckpointError where a file is missing or has another size: then fetching the others is
        useless."""
        for file in self.records[name].files:
            size = (self._sizes or {}).get(f"{name}/{file.name}")
            if size != file.size:
                remote = "is missing" if size is None else f"has {size} bytes, {file.size} were recorded"
                raise errors.CheckpointError(f"{file.name} {remote}")

    # ---- one more ------------------------------------------------------------------------------------------

    def begin(self, entry: Entry) -> str:
        """The name of an upload that begins now. Files of a checkpoint in the mirror are never overwritten:
        until the new one is whole, the old one is the only one."""
        name = f"checkpoint-{entry.record.step}"
        if name in self.records and self.records[name] != entry.record:
            name = next(other for n in range(10_000) if (other := f"{name}.replaced-{n}") not in self.records)
        self._unfinished.add(name)
        commit.stage_upload(self.place, name, entry.record.run)
        return name

    def commit(self, name: str, record: Record) -> None:
        commit.commit_upload(self.place, name, record)
        self.records[name] = record
        self._unfinished.discard(name)

    # ---- fewer ---------------------------------------------------------------------------------------------

    def tidy(self, keep: Keep | None, enough: Callable[[], bool]) -> None:
        """Remove unfinished uploads and what rotation no longer needs, until `enough`. Without `keep` nothing
        is rotated."""
        try:
            for name in sorted(self._unfinished):
                if not enough():
                    self._remove(name)
            for name in self._superfluous(keep) if keep is not None else ():
                if not enough():
                    commit.withdraw_upload(self.place, name, self.records[name].run)
                    del self.records[name]
                    self._unfinished.add(name)
                    self._remove(name)
        except errors.StorageError as error:
            log.warning("Could not delete all expired checkpoints from %s: %s", self.url, error)

    def _superfluous(self, keep: Keep) -> list[str]:
        entries = [Entry(Path(name), record) for name, record in self.records.items() if self.ours(record)]
        entries.sort(key=lambda entry: entry.record.recency, reverse=True)
        return [entry.path.name for entry in retention.superfluous(entries, keep)]

    def _remove(self, name: str) -> None:
        commit.remove_upload(self.place, name)
        self._unfinished.discard(name)
