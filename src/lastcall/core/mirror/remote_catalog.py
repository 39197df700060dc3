"""What is known to be in the place of a mirror: whole checkpoints, by their records, and copies that were never finished.

A copy begins with the sentinel and ends with the record, which is its commit; the sentinel goes just before. So whatever somebody was
killed over, or gave up, is known for what it is and removed after the next copy. Folders that have neither are somebody else's.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from pathlib import Path

from lastcall import clock as clocks
from lastcall import errors
from lastcall.core.checkpoint import record as records
from lastcall.core.checkpoint import retention
from lastcall.core.checkpoint.catalog import Catalog
from lastcall.core.checkpoint.record import Entry, Record
from lastcall.core.checkpoint.retention import Keep
from lastcall.storage import objects
from lastcall.storage.patience import Patient

log = logging.getLogger("lastcall")
_FOLDER = re.compile(rf"(checkpoint-\d+(?:\.replaced-\d+)?)/({re.escape(records.NAME)}|{re.escape(records.SENTINEL)})")
_LARGEST = 512 * 1024 * 1024  # of a record
_SMALL = 64 * 1024


class Mirrored:
    def __init__(self, url: str, catalog: Catalog, keys: str | None = None, clock: clocks.Clock | None = None) -> None:
        """`keys`: a folder with the credentials."""
        self.url = url
        self._catalog = catalog
        self.place = Patient(url, lambda: objects.opened(url, keys), clock or clocks.Clock())
        self._sizes: dict[str, int] | None = None  # of all that is there; None before anybody has looked
        self.records: dict[str, Record] = {}
        self._unfinished: set[str] = set()

    def say_silence(self) -> None:
        """Called now and then at the start, while the place is waited for."""
        self.place.asked.say(self.url)

    # ---- what is there ---------------------------------------------------------------------------------------------------------

    def look(self) -> None:
        sizes = self.place.names("checkpoint-")
        for gone in [name for name in self.records if f"{name}/{records.NAME}" not in sizes]:
            del self.records[gone]
        for folder, what in [match.groups() for name in sizes if (match := _FOLDER.fullmatch(name)) is not None]:
            if what == records.NAME:
                self._read(folder)
            elif f"{folder}/{records.NAME}" not in sizes and self._began(folder):
                self._unfinished.add(folder)
        self._sizes = sizes

    def forget(self) -> None:
        """Another rank has copied meanwhile: whoever needs to know what is there looks again."""
        self._sizes = None

    def look_once(self) -> None:
        """For a rank that has not fetched anything, and now speaks for the others."""
        if self._sizes is None:
            self.look()

    def _read(self, folder: str) -> None:
        data = self.place.read(f"{folder}/{records.NAME}", _LARGEST)
        try:
            if data is not None:
                self.records[folder] = records.parse(data)
        except errors.UncheckedError as error:
            raise type(error)(f"{self.url}/{folder}: {error}") from error
        except errors.CheckpointError as error:
            log.warning("%s/%s is passed over: %s", self.url, folder, error)

    def _began(self, folder: str) -> bool:
        """Whether a copy that was never finished is one of ours."""
        run = self.place.read(f"{folder}/{records.SENTINEL}", _SMALL)
        return run is not None and (not self._catalog.run or run == self._catalog.run.encode())

    def ours(self, record: Record) -> bool:
        return not self._catalog.run or record.run == self._catalog.run

    def has(self, record: Record) -> bool:
        return record in list(self.records.values())

    def check_whole(self, name: str) -> None:
        """CheckpointError where a file is missing, or is not as long as it was: then there is no use in fetching the others."""
        for file in self.records[name].files:
            size = (self._sizes or {}).get(f"{name}/{file.name}")
            if size != file.size:
                there = "is missing" if size is None else f"has {size} bytes, {file.size} were recorded"
                raise errors.CheckpointError(f"{file.name} {there}")

    # ---- one more --------------------------------------------------------------------------------------------------------------

    def begin(self, entry: Entry) -> str:
        """The name of a copy that begins now. Files of a checkpoint that is there are never overwritten: until the new one is whole,
        the old one is all that there is."""
        name = f"checkpoint-{entry.record.step}"
        if name in self.records and self.records[name] != entry.record:
            name = next(other for n in range(10_000) if (other := f"{name}.replaced-{n}") not in self.records)
        self._unfinished.add(name)
        self.place.write(f"{name}/{records.SENTINEL}", entry.record.run.encode())
        return name

    def commit(self, name: str, record: Record) -> None:
        self.place.remove([f"{name}/{records.SENTINEL}"])
        self.place.write(f"{name}/{records.NAME}", record.to_json())
        self.records[name] = record
        self._unfinished.discard(name)

    # ---- fewer -----------------------------------------------------------------------------------------------------------------

    def tidy(self, keep: Keep | None, enough: Callable[[], bool]) -> None:
        """Remove what was never finished and what rotation no longer needs, until `enough`. Without `keep` nothing is rotated."""
        try:
            for name in sorted(self._unfinished):
                if not enough():
                    self._remove(name)
            for name in self._superfluous(keep) if keep is not None else ():
                if not enough():
                    # An end in the middle of it leaves something that the next one knows to be no checkpoint.
                    self.place.write(f"{name}/{records.SENTINEL}", self.records[name].run.encode())
                    self.place.remove([f"{name}/{records.NAME}"])
                    del self.records[name]
                    self._unfinished.add(name)
                    self._remove(name)
        except errors.StorageError as error:
            log.warning("Not all that is superfluous could be removed from %s: %s", self.url, error)

    def _superfluous(self, keep: Keep) -> list[str]:
        entries = [Entry(Path(name), record) for name, record in self.records.items() if self.ours(record)]
        entries.sort(key=lambda entry: entry.record.recency, reverse=True)
        return [entry.path.name for entry in retention.superfluous(entries, keep)]

    def _remove(self, name: str) -> None:
        sentinel = f"{name}/{records.SENTINEL}"
        self.place.remove(sorted(self.place.names(f"{name}/").keys() - {sentinel}))
        self.place.remove([sentinel])  # last: while it is there, the next one knows what the rest is
        self._unfinished.discard(name)
