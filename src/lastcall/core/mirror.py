"""The second place of a run's checkpoints: an object store, or a folder of another file system.

Local first. A checkpoint is committed in the directory as ever; then it is copied, its record last, so that nobody takes a copy that is
not whole for a checkpoint. Training does not wait for it, but a process that was told to stop does, for as long as it may live. On start
the newest one is fetched where the directory has none that is as new: a directory that dies with its machine is enough.

    exp1/checkpoint-40/lastcall.json    ... the same names as in the directory
    exp1/.lastcall/leaving.json         somebody was told to stop and may still be copying: whoever comes after it waits for that
    exp1/.lastcall/run.json             which incarnation was the last one

Only one rank copies: the lowest one that is alive, since all of them write into one directory.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

from lastcall import clock as clocks
from lastcall import errors, settings
from lastcall.core import catalog as catalogs
from lastcall.core import record as records
from lastcall.core import restore
from lastcall.core.catalog import MIRRORING, PRIVATE, Catalog, Entry, Keep
from lastcall.core.liveness import Process
from lastcall.core.record import Record
from lastcall.core.writer import Engine
from lastcall.events import EventLog
from lastcall.storage import files as storage
from lastcall.storage import objects
from lastcall.storage.objects import Objects

log = logging.getLogger("lastcall")
_RECORD = re.compile(rf"(checkpoint-\d+(?:\.replaced-\d+)?)/{re.escape(records.NAME)}")
_LEAVING = f"{PRIVATE}/leaving.json"
_RUN = f"{PRIVATE}/run.json"
_LARGEST = 512 * 1024 * 1024  # of a record
_SMALL = 64 * 1024
_AT_ONCE = 4  # files on their way; a large one goes in parts besides
_TRIES = 5
_PAUSE = 2.0  # seconds before the second attempt, doubled before each later one
_AFTERWARDS = 10.0  # seconds after its deadline at which whoever should be gone counts as gone
_LOOK = 1.0
_TELL = 10.0  # seconds between two lines about a copy that takes long
_SAFETY = 1.3


class _Dropped(Exception):
    """A newer checkpoint is to be copied first, or nobody waits any more."""


class _Told(Exception):
    """A notice came while a checkpoint was being fetched."""


@dataclass(frozen=True)
class _Held:
    """A checkpoint that waits to be copied: its files by names of their own, so that rotation does not take them away."""

    entry: Entry
    folder: Path


class Mirror:
    def __init__(
        self, url: str, catalog: Catalog, clock: clocks.Clock, events: EventLog, keep: Callable[[], Keep], keys: str | None = None
    ) -> None:
        """`keys`: a folder with the credentials."""
        self.url = url
        self._keys = keys
        self._catalog = catalog
        self._clock = clock
        self._events = events
        self._keep = keep
        self._place: Objects | None = None
        self._there: dict[str, Record] | None = None  # what is known to be in the place
        self._changed = threading.Condition()
        self._waiting: _Held | None = None
        self._sending: _Held | None = None
        self._thread: threading.Thread | None = None
        self._saying: threading.Thread | None = None
        self._drop = False  # what is on its way is not wanted any more
        self._moved = 0
        self._speed: float | None = None  # bytes a second
        self._lost = ""  # why the newest checkpoint is not in the place

    @property
    def place(self) -> Objects:
        if self._place is None:
            self._place = objects.opened(self.url, self._keys)
        return self._place

    # ---- start -----------------------------------------------------------------------------------------------------------------

    def take_over(self, told: Callable[[], bool]) -> bool:
        """Before the directory is looked at: wait for an incarnation that still copies, and fetch what the directory lacks. False if
        a notice came meanwhile."""
        try:
            if not self._wait_for_the_one_before(told):
                return False
            self._there = self._records()
            self._fetch_newest(told)
            if not (self._catalog.private / "run.json").exists() and (known := self.place.read(_RUN, _SMALL)) is not None:
                (self._catalog.private / "run.json").write_bytes(known)
            return True
        except _Told:
            return False
        except errors.StorageRefused as error:
            settings.fail(f"LASTCALL_MIRROR: {error}")

    def note(self, run: str, incarnation: int) -> None:
        """Which incarnation this is. Also finds out now, and not at the first checkpoint, whether anything can be written there."""
        try:
            self.place.write(_RUN, json.dumps({"run": run, "incarnations": incarnation}).encode())
        except errors.StorageRefused as error:
            settings.fail(f"LASTCALL_MIRROR: {error}")

    def _wait_for_the_one_before(self, told: Callable[[], bool]) -> bool:
        until: float | None = None
        began = self._clock.now()
        while (data := self.place.read(_LEAVING, _SMALL)) is not None:
            leaver = _leaver(data)
            if leaver is None or leaver.process.gone(Process.own().host):
                break
            if until is None:
                until = began + leaver.seconds - (self.place.age(_LEAVING) or 0.0) + _AFTERWARDS
                if until > began:
                    log.warning(
                        "Waiting for process %d on %s, which was told to stop (%s) and may still be copying to %s: for at most %.0f s",
                        leaver.process.pid, leaver.machine, leaver.reason, self.url, until - began,
                    )  # fmt: skip
            if self._clock.now() >= until:
                break
            if told():
                return False
            self._clock.sleep(_LOOK)
        if data is not None:
            self.place.remove([_LEAVING])
        return True

    def _records(self) -> dict[str, Record]:
        found = {}
        for name in self.place.names("checkpoint-"):
            if (match := _RECORD.fullmatch(name)) is not None and (data := self.place.read(name, _LARGEST)) is not None:
                try:
                    found[match[1]] = records.parse(data)
                except errors.UncheckedError as error:
                    raise errors.UncheckedError(f"{self.url}/{match[1]}: {error}") from error
                except errors.CheckpointError as error:
                    log.warning("%s/%s is passed over: %s", self.url, match[1], error)
        return found

    def _fetch_newest(self, told: Callable[[], bool]) -> None:
        here = self._catalog.entries()
        newest = _order(here[0].record) if here else (-1, -1)
        theirs = [(name, record) for name, record in (self._there or {}).items() if self._ours(record) and _order(record) > newest]
        for name, record in sorted(theirs, key=lambda found: (found[1].complete, _order(found[1])), reverse=True):
            try:
                self._fetch(name, record, told)
                return
            except errors.CheckpointError as error:
                log.warning("%s/%s is damaged, and passed over: %s", self.url, name, error)
                del (self._there or {})[name]

    def _ours(self, record: Record) -> bool:
        return not self._catalog.run or record.run == self._catalog.run

    def bring(self, name: str) -> None:
        """An older checkpoint that somebody refers to, if it is there and not here. What fails is said, and no more."""
        record = (self._there or {}).get(name)
        if record is None or not self._ours(record) or (self._catalog.root / name).exists():
            return
        try:
            self._fetch(name, record, lambda: False)
        except (errors.LastcallError, OSError) as error:
            log.warning("%s/%s could not be fetched: %s", self.url, name, error)

    def _fetch(self, name: str, record: Record, told: Callable[[], bool]) -> None:
        catalog, began = self._catalog, self._clock.now()
        log.info("Fetching %s from %s (%.0f MB)", name, self.url, record.size / 1e6)
        if catalog.files.free_bytes(catalog.root) < record.size:
            raise errors.NoSpaceError(f"{catalog.root} has no room for {name} of {self.url}: {record.size / 1e6:.0f} MB")
        folder = catalog.staging / f"fetched-{name}"
        if os.path.lexists(folder):
            storage.remove_tree(catalog.files, folder)
        folder.mkdir(parents=True)
        tell = _Telling(f"Fetching {name}", record.size, self._clock)

        def moved(count: int) -> None:
            if told():
                raise _Told
            tell.more(count)

        try:
            for file in record.files:
                (folder / file.name).parent.mkdir(parents=True, exist_ok=True)
            with ThreadPoolExecutor(_AT_ONCE) as pool:
                list(pool.map(lambda file: self.place.fetch(f"{name}/{file.name}", folder / file.name, moved), record.files))
            storage.write_small(catalog.files, folder / records.NAME, record.to_json())
            engine = Engine(files=catalog.files)
            try:
                restore.verify(Entry(folder, record), engine)
            finally:
                engine.close()
            for path in {(folder / file.name).parent for file in record.files} | {folder}:
                catalog.files.sync_directory(path)
            catalog.publish(folder, record.step)
        except BaseException:
            with contextlib.suppress(OSError):
                storage.remove_tree(catalog.files, folder)
            raise
        seconds = self._clock.now() - began
        log.info("Fetched %s in %.1fs; its digests hold", name, seconds)
        self._events.emit("fetched", path=name, step=record.step, bytes=record.size, seconds=seconds, place=self.url)

    # ---- after a commit --------------------------------------------------------------------------------------------------------

    def seconds(self, nbytes: int) -> float:
        """What copying so many bytes is expected to take, as far as earlier copies tell."""
        return _SAFETY * nbytes / self._speed if self._speed else 0.0

    def has(self, record: Record) -> bool:
        return record in (self._there or {}).values()

    def push(self, entry: Entry, *, urgent: bool = False) -> None:
        """Have a checkpoint copied; returns at once. One that still waits gives way to it, and so does one on its way if it is urgent."""
        held = self._hold(entry)
        with self._changed:
            if self._waiting is not None:
                self._let_go(self._waiting)
            self._waiting = held
            self._drop = urgent and self._sending is not None
            if self._thread is None or not self._thread.is_alive():
                self._thread = threading.Thread(target=self._work, name="lastcall-mirror", daemon=True)
                self._thread.start()
            self._changed.notify_all()

    def leaving(self, reason: str, seconds: float) -> None:
        """A notice has come: let the next incarnation, which may be there before we are gone, wait for what is still copied."""
        leaver = _Leaver(reason, seconds, Process.own(), os.uname().nodename)
        self._saying = threading.Thread(target=self._say, args=(leaver,), name="lastcall-mirror-leaving", daemon=True)
        self._saying.start()

    def _say(self, leaver: _Leaver) -> None:
        try:
            self.place.write(_LEAVING, json.dumps(asdict(leaver)).encode())
        except errors.LastcallError as error:
            log.warning("The next incarnation will not wait for this one: %s", error)

    def settle(self, until: float | None) -> bool:
        """Wait until everything is copied, but not longer than `until`. Nothing is copied afterwards."""
        tell = _Telling(f"Copying to {self.url}", 0, self._clock)
        with self._changed:
            while self._busy() and (until is None or self._clock.now() < until):
                left = _LOOK if until is None else min(_LOOK, until - self._clock.now())
                self._changed.wait(max(0.01, left))
                tell.at(self._moved)
            late, self._drop = self._busy(), True
            if self._waiting is not None:
                self._let_go(self._waiting)
                self._waiting = None
            lost = self._lost or ("there was no time left" if late else "")
        if lost:
            log.error("The newest checkpoint is in %s only, and not in %s: %s", self._catalog.root, self.url, lost)
        if self._saying is not None:
            self._saying.join(5.0)
            with contextlib.suppress(errors.LastcallError):
                self.place.remove([_LEAVING])
            self._saying = None
        return not lost

    def _busy(self) -> bool:
        return self._waiting is not None or self._sending is not None

    def _hold(self, entry: Entry) -> _Held:
        """Links cost nothing, and a file with two names is never recycled. Where there are none, rotation may win."""
        folder = self._catalog.private / MIRRORING / f"{entry.path.name}-{entry.record.sequence}"
        try:
            if folder.exists():
                storage.remove_tree(self._catalog.files, folder)
            for name in (*(file.name for file in entry.record.files), records.NAME):
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                self._catalog.files.link(entry.path / name, folder / name)
        except OSError as error:
            log.debug("%s cannot be held by links: %s", entry.path.name, error)
            with contextlib.suppress(OSError):
                storage.remove_tree(self._catalog.files, folder)
            return _Held(entry, entry.path)
        return _Held(entry, folder)

    def _let_go(self, held: _Held) -> None:
        if held.folder != held.entry.path:
            with contextlib.suppress(OSError):
                storage.remove_tree(self._catalog.files, held.folder)

    def _work(self) -> None:
        while True:
            with self._changed:
                if self._waiting is None:
                    self._thread = None
                    return
                held, self._waiting = self._waiting, None
                self._sending, self._drop, self._moved = held, False, 0
            lost = "a fault in lastcall"
            try:
                lost = self._try(held)
            except Exception:
                log.exception("A fault in lastcall: %s is not copied to %s", held.entry.path.name, self.url)
            finally:
                self._let_go(held)
                with self._changed:
                    self._sending, self._lost = None, lost
                    self._changed.notify_all()

    def _try(self, held: _Held) -> str:
        """Empty if it is there now; else why it is not."""
        for attempt in range(1, _TRIES + 1):
            try:
                self._send(held)
                return ""
            except _Dropped:
                return "it was given up for a newer one"
            except (errors.LastcallError, OSError) as error:
                final = attempt == _TRIES or isinstance(error, errors.StorageRefused)
                log.log(
                    logging.ERROR if final else logging.WARNING, "%s could not be copied (%s)%s",
                    held.entry.path.name, error, "" if final else "; it is tried again",
                )  # fmt: skip
                if final or not self._pause(_PAUSE * 2 ** (attempt - 1)):
                    return str(error)
        raise AssertionError("unreachable")

    def _pause(self, seconds: float) -> bool:
        """False if something newer waits, or nobody does any more."""
        with self._changed:
            self._changed.wait_for(lambda: self._drop or self._waiting is not None, seconds)
            return not self._drop and self._waiting is None

    def _send(self, held: _Held) -> None:
        if self._there is None:
            self._there = self._records()
        record, began, self._moved = held.entry.record, self._clock.now(), 0
        name = self._free_name(held.entry)
        same = {(file.digest, file.size, there.algorithm): f"{other}/{file.name}" for other, there in self._there.items()
                for file in there.files}  # fmt: skip

        def send(file: records.FileRecord) -> int:
            known = same.get((file.digest, file.size, record.algorithm))
            if known is not None:
                with contextlib.suppress(errors.StorageError):  # somebody has removed it
                    self.place.copy(known, f"{name}/{file.name}")
                    return 0
            self.place.send(held.folder / file.name, f"{name}/{file.name}", self._more)
            return file.size

        with ThreadPoolExecutor(_AT_ONCE) as pool:
            sent = sum(pool.map(send, sorted(record.files, key=lambda file: file.size, reverse=True)))
        self._more(0)
        self.place.write(f"{name}/{records.NAME}", (held.folder / records.NAME).read_bytes())
        self._there[name] = record
        seconds = self._clock.now() - began
        if sent >= _SAFETY * 1e6 and seconds > 0:
            self._speed = sent / seconds
        log.info("Copied %s to %s in %.1fs (%.0f MB)", held.entry.path.name, self.url, seconds, sent / 1e6)
        self._events.emit("copied", path=held.entry.path.name, step=record.step, bytes=sent, seconds=seconds, place=self.url)
        self._prune()

    def _more(self, count: int) -> None:
        if self._drop:
            raise _Dropped
        self._moved += count

    def _free_name(self, entry: Entry) -> str:
        """Files of a checkpoint that is there are never overwritten: until the new one is whole, the old one is all that there is."""
        there = self._there or {}
        name = f"checkpoint-{entry.record.step}"
        if name not in there or there[name] == entry.record:
            return name
        return next(other for n in range(10_000) if (other := f"{name}.replaced-{n}") not in there)

    def _prune(self) -> None:
        there = self._there or {}
        entries = sorted(
            (Entry(Path(name), record) for name, record in there.items() if self._ours(record)),
            key=lambda entry: _order(entry.record), reverse=True,
        )  # fmt: skip
        for entry in catalogs.superfluous(entries, self._keep()):
            try:
                self.place.remove([f"{entry.path.name}/{records.NAME}"])  # first: what is left is no checkpoint
                del there[entry.path.name]
                self.place.remove(sorted(self.place.names(f"{entry.path.name}/")))
            except errors.StorageError as error:
                log.warning("%s/%s could not be removed: %s", self.url, entry.path.name, error)

    # ---- end -------------------------------------------------------------------------------------------------------------------

    def copy_rest(self) -> None:
        """Training is over, and so is the script: what it has written beside the checkpoints (`final/`, a model card) goes there too.
        Called when the interpreter ends: no thread can be started any more."""
        root = self._catalog.root
        try:
            for path in sorted(_beside(root)):
                self.place.send(path, path.relative_to(root).as_posix(), threads=False)
                log.info("Copied %s to %s", path.relative_to(root), self.url)
        except (errors.LastcallError, OSError) as error:
            log.error("Not everything in %s is copied to %s: %s", root, self.url, error)


@dataclass(frozen=True)
class _Leaver:
    reason: str
    seconds: float
    process: Process
    machine: str


def _leaver(data: bytes) -> _Leaver | None:
    try:
        body = json.loads(data)
        return _Leaver(str(body["reason"]), float(body["seconds"]), Process(**body["process"]), str(body["machine"]))
    except (ValueError, TypeError, KeyError):
        return None


class _Telling:
    """A line now and then about work that takes long."""

    def __init__(self, what: str, size: int, clock: clocks.Clock) -> None:
        self._what = what
        self._size = size
        self._clock = clock
        self._next = clock.now() + _TELL
        self._done = 0
        self._lock = threading.Lock()

    def more(self, count: int) -> None:
        with self._lock:
            self._done += count
            self.at(self._done)

    def at(self, done: int) -> None:
        if self._clock.now() >= self._next:
            self._next = self._clock.now() + _TELL
            of = f" of {self._size / 1e6:.0f}" if self._size else ""
            log.info("%s: %.0f%s MB so far", self._what, done / 1e6, of)


def _order(record: Record) -> tuple[int, int]:
    return record.sequence, record.step


def _beside(root: Path) -> list[Path]:
    """The plain files below the directory that are no part of a checkpoint, nor ours."""
    found: list[Path] = []
    for folder, folders, files in os.walk(root):
        if Path(folder) == root:
            folders[:] = [name for name in folders if name != PRIVATE and not re.match(r"checkpoint-\d+", name)]
        found += [path for name in files if not (path := Path(folder, name)).is_symlink()]
    return found
