"""The state of the last guarded boundary in shared memory, so that it outlives the process: two `slots`.

The training thread stands at a boundary, shuts the gate and hands its capture over; a thread copies it into
the older slot while forward and backward continue, sets the slot's commit word, and opens the gate. The
guardian in `lastcall run`, or the next incarnation, finds the process dead, takes the newest committed slot
and saves it as an ordinary checkpoint: see `recovery`.

Discarded: a single slot with a dirty flag (killed while copying, it has nothing left: 26 of 40 trials); the
engine's threads for the copy (a periodic save would hold them, and the gate with them); anonymous memory (it
dies with the process).
"""

from __future__ import annotations

import json
import logging
import os
import re
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lastcall import errors, memory
from lastcall.core.checkpoint import record as records
from lastcall.core.engine import digest
from lastcall.core.engine.snapshot import available_memory
from lastcall.core.guard.slots import PAGE, Slots, whole_pages
from lastcall.core.process import throughput
from lastcall.core.sync.gate import Gate
from lastcall.formats import safetensors
from lastcall.storage import files as storage
from lastcall.types import Capture, Group, TensorEntry

log = logging.getLogger("lastcall")
MAGIC = b"lastcall guard 1"
POINTER = "guard.json"  # in the run's private folder: where the area is
NAME = re.compile(r"lastcall-\d+-\d+-[0-9a-f]+", re.ASCII)  # of an area: user, process, moment
_LARGEST = 64 * 1024  # bytes of a pointer
_SHARE = 100.0  # a copy may cost one part in so many of the time
_OFTEN = 2  # copies that were changed while being made: after that training waits for them
_SLACK = 1024 * 1024  # room for a document that grows


class TooSmall(errors.SaveError):
    """The state has outgrown its area."""


class Area(Slots):
    """A slot is the tensors' bytes and, behind them, a JSON text that says which is which. The owner's word:
    the bytes of tensors that a slot holds; of each slot: the length of its text."""

    WHAT, MAGIC, COUNT, WORDS = "a guarded state", MAGIC, 2, 2

    @classmethod
    def create(cls, path: Path, data: int, text: int) -> Area:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            return cls.made(path, fd, whole_pages(data) + whole_pages(text), whole_pages(data))
        except OSError:
            os.unlink(path)
            raise
        finally:
            os.close(fd)

    @classmethod
    def attach(cls, path: Path) -> Area:
        if not is_area(path):
            raise errors.CheckpointError(f"{path} cannot be mapped: it is no file of ours")
        area = super().attach(path)
        if area.data > area.room:
            raise errors.CheckpointError(f"{path} is not {cls.WHAT}")
        return area

    @property
    def data(self) -> int:
        """Bytes of tensors that a slot holds."""
        return int(self._words[3])

    def write(self, copies: Callable[[int], bool], text: bytes) -> bool:
        """Put a snapshot into the older slot. `copies` gets the address of the slot's data; where it says
        that the state changed meanwhile, the slot stays empty, and the other one remains valid."""
        commits = self.commits()
        slot, newest = commits.index(min(commits)), max(commits)
        if self.data + len(text) > self.room:
            raise TooSmall(f"the guarded state's description has grown to {len(text)} bytes")
        begin = self.unmark(slot)
        if not copies(self._base + begin):
            return False
        self._view[begin + self.data : begin + self.data + len(text)] = text
        self.mark(slot, newest + 1, len(text))
        return True

    def newest(self) -> tuple[int, bytes] | None:
        """Address and text of the newest snapshot, if there is one."""
        commits = self.commits()
        slot = commits.index(max(commits))
        if commits[slot] == 0:
            return None
        begin, (_, length) = self.begin(slot), self.marked(slot)
        if self.data + length > self.room:
            raise errors.CheckpointError(f"{self.path} says {length} bytes of text, more than a slot holds")
        return self._base + begin, bytes(self._view[begin + self.data : begin + self.data + length])

    def remove(self) -> None:
        self.path.unlink(missing_ok=True)


class Guard:
    """The training process's side. Failures switch it off with a warning: training continues unguarded."""

    def __init__(
        self,
        folder: Path,
        private: Path,
        gate: Gate,
        identity: dict[str, Any],
        *,
        steps: int | None,
        seconds: float | None,
    ) -> None:
        self._folder = folder
        self._pointer = private / POINTER
        self._gate = gate
        self._identity = identity
        self._steps = steps
        self._seconds = seconds
        self._area: Area | None = None
        self._former: list[str] = []  # areas that hold the newest snapshot until ours has one
        self._pid = os.getpid()
        self._lock = threading.Lock()  # between the end of the run and an area that is being made
        self._closed = False
        self._busy = threading.Lock()  # held while a copy is made
        self._copy_seconds = 0.0  # how long the last one took
        self._next_at = 0.0
        self._last_step = 0  # of the last boundary that was tried
        self._told = False  # whether it was logged that a boundary was not copied
        self._changed = 0  # copies during which training changed something
        self.on_area: Callable[[str], None] = lambda path: None

    # ---- preparation, off the training thread --------------------------------------------------------------

    def prepare(self, capture: Capture) -> None:
        """Allocate and touch an area for states like this one. If it does not fit, that is logged at the
        start."""
        groups, data, _ = lay_out(capture)
        text = 2 * len(json.dumps(describe(capture, groups))) + _SLACK
        needed = Area.size(whole_pages(data) + whole_pages(text))
        path = self._folder / f"lastcall-{os.getuid()}-{os.getpid()}-{time.time_ns():x}"
        try:
            free = os.statvfs(self._folder)
            # the rest is training's
            room = min(free.f_bavail * free.f_frsize, (available_memory() or 1 << 62) * 4 // 5)
            if needed > room:
                raise OSError(f"{room / 1e6:.0f} MB are free")
            # of a dead process whose state could not be saved, or the one that we outgrew
            self._former = areas(self._pointer)
            # before the area exists: killed in between, nothing would name it
            point(self._pointer, [str(path), *self._former])
            area = Area.create(path, data, text)
        except OSError as error:
            log.warning(
                "This run is not guarded: two copies of its state need %.0f MB of shared memory in %s (%s). "
                "Give it more "
                "(docker run --shm-size=%dm, or an emptyDir with medium Memory), or set "
                "LASTCALL_GUARD_FOLDER.",
                needed / 1e6,
                self._folder,
                error,
                needed // 1_000_000 + 1,
            )
            self._switch_off()
            return
        with self._lock:
            if self._closed:
                area.remove()
                return
            self._area = area
        self._next_at = 0.0
        self.on_area(str(area.path))
        log.info("Guarded: copies of the state go to %s (%s)", area.path, throughput.amount(needed))

    # ---- at boundaries -------------------------------------------------------------------------------------

    def due(self, step: int) -> bool:
        """Whether this boundary should be copied."""
        if self._area is None or self._busy.locked() or step == self._last_step:
            return False
        if self._steps is not None and step - self._last_step >= self._steps:
            return True
        if self._steps is not None and self._seconds is None:
            return False
        return time.monotonic() >= self._next_at

    def next_step(self) -> int | None:
        """The next step that is due by its number."""
        return None if self._steps is None or self._area is None else self._last_step + self._steps

    def take(self, capture: Callable[[], Capture], step: int) -> None:
        """On the training thread, at a boundary: keep the next mutation out, and let a thread copy."""
        began = time.monotonic()
        self._last_step = step
        self._busy.acquire()
        self._gate.shut()
        try:
            held = capture()
            if self._changed < _OFTEN:
                threading.Thread(
                    target=self._copy, args=(held, began), name="lastcall-guard", daemon=True
                ).start()
                return
        except Exception as error:  # an uncapturable state, or no thread: training must not notice
            self._gate.open()
            self._busy.release()
            self._next_at = time.monotonic() + _SHARE * (time.monotonic() - began)
            self._tell_once(step, str(error))
            return
        self._copy(held, began)

    def along(self, capture: Callable[[], Capture], step: int) -> None:
        """On the training thread, at a boundary that is about to be saved aside: a process that is killed
        before that is on the disk (out of memory, as likely as not: there are two more copies of the state
        now) has it here."""
        if self._area is not None and step != self._last_step:
            self.take(capture, step)

    def stage(self, capture: Capture, spare: float | None) -> None:
        """Copy now, on this thread: nothing changes the state meanwhile. The guardian writes what this
        process cannot in time. `spare`: seconds that the save can do without."""
        if self._area is None or (spare is not None and spare < 2 * self._copy_seconds):
            return
        if self._busy.acquire(timeout=-1 if spare is None else spare / 2):
            try:
                self._put(capture, time.monotonic())
            except TooSmall as error:
                log.info("Could not copy this step to shared memory: %s", error)
            finally:
                self._busy.release()

    def _copy(self, capture: Capture, began: float) -> None:
        outgrown = False
        try:
            self._put(capture, began)
        except TooSmall as error:
            log.info("Growing the guard's shared memory: %s", error)
            outgrown = True
        finally:
            self._gate.open()
            try:
                if outgrown:
                    self.prepare(capture)
            finally:
                self._busy.release()

    def _put(self, capture: Capture, began: float) -> None:
        area = self._area
        try:
            if area is None:
                return
            if not capture.exact:
                self._tell_once(capture.step, capture.because)
                return
            groups, size, copies = lay_out(capture)
            if size > area.data:
                raise TooSmall(f"the state has grown to {size / 1e6:.0f} MB")
            text = json.dumps({**self._identity, **describe(capture, groups)}).encode()
            if area.write(copies, digest.of(text).encode() + text):
                self._last_step = capture.step
                self._forget_former(area)
            else:
                self._changed += 1
                if self._changed == _OFTEN:
                    log.info(
                        "The state changes outside optimizer.step(): from now on training waits while "
                        "the guard copies it"
                    )
        except TooSmall:
            raise
        except Exception as error:  # of any kind: training continues
            log.warning("This run is no longer guarded: %s", error)
            self._switch_off()
        finally:
            now = time.monotonic()
            self._copy_seconds = now - began
            self._next_at = now + (self._seconds if self._seconds is not None else _SHARE * (now - began))

    def _forget_former(self, area: Area) -> None:
        if self._former:
            point(self._pointer, [str(area.path)])
            for path in self._former:
                Path(path).unlink(missing_ok=True)
            self._former = []

    def _tell_once(self, step: int, because: str) -> None:
        if not self._told:
            self._told = True
            log.info("Could not copy step %d to shared memory: %s", step, because)

    # ---- the end -------------------------------------------------------------------------------------------

    def close(self, *, keep: bool = False) -> None:
        """The process ends in order: nothing is left for a guardian, or (`keep`) what was not saved to
        disk."""
        if os.getpid() != self._pid:
            return  # a forked child that unwinds our block
        if self._busy.acquire(timeout=10.0):
            self._busy.release()
        with self._lock:
            self._closed = True
        if not keep:
            self._switch_off()

    def _switch_off(self) -> None:
        area, self._area = self._area, None
        if area is not None:
            area.remove()
        left = [path for path in areas(self._pointer) if os.path.exists(path) and path in self._former]
        if left:
            point(self._pointer, left)
        else:
            self._pointer.unlink(missing_ok=True)


def areas(pointer: Path) -> list[str]:
    """The areas that a run has left, newest first."""
    try:
        found = json.loads(storage.read_plain(pointer, _LARGEST))["areas"]
        return [path for path in found if isinstance(path, str) and is_area(Path(path))]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return []


def is_area(path: Path) -> bool:
    """Whether this is a file that a guard has made, for this user: the pointer is not trusted and may name
    any other. Only such files are opened, and only such are ever removed."""
    if not path.is_absolute() or not NAME.fullmatch(path.name):
        return False
    try:
        with storage.opened_plain(path) as (fd, info):
            mine = info.st_uid == os.geteuid() and info.st_nlink == 1
            return mine and info.st_size >= PAGE and os.pread(fd, len(MAGIC), 0) in (MAGIC, bytes(len(MAGIC)))
    except OSError:
        return False


def point(pointer: Path, paths: list[str]) -> None:
    storage.replace_small(pointer, json.dumps({"areas": paths}).encode(), 0o600)


def lay_out(capture: Capture) -> tuple[list[dict[str, Any]], int, Callable[[int], bool]]:
    """Where each tensor goes in a slot, the bytes they need, and the copy itself. Sources that groups share
    are copied once."""
    offsets: dict[int, int] = {}
    sources = []
    total = safetensors.PHASE
    groups = []
    for group in capture.groups:
        entries = []
        for entry in group.entries:
            if id(entry.source) not in offsets:
                offsets[id(entry.source)] = total
                sources.append((entry.source, total))
                total += -(-entry.source.nbytes // safetensors.SECTOR) * safetensors.SECTOR
            place = offsets[id(entry.source)]
            entries.append([entry.name, entry.dtype, list(entry.shape), place, entry.source.nbytes])
        groups.append({"name": group.name, "frozen": group.frozen, "rank": group.rank, "entries": entries})

    def copies(address: int) -> bool:
        for source, place in sources:
            source.read_into(address + place, 0, source.nbytes)
        return capture.still()

    return groups, total, copies


def describe(capture: Capture, groups: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "step": capture.step,
        "document": capture.document,
        "groups": groups,
        "metrics": capture.metrics,
        "doubt": capture.doubt,
        "at": time.time(),
    }


def read_slot(area: Area) -> tuple[Capture, dict[str, Any]] | None:
    """The newest committed snapshot as a capture whose bytes lie in the area. CheckpointError where it is
    damaged."""
    found = area.newest()
    if found is None:
        return None
    address, raw = found
    stated, text = raw[:32], raw[32:]
    if digest.of(text).encode() != stated:
        raise errors.CheckpointError(
            f"{area.path}: the description of its snapshot does not match its digest"
        )
    try:
        body = json.loads(text)
        _check(body)
        groups = tuple(
            Group(
                group["name"],
                tuple(_entry(item, address, area) for item in group["entries"]),
                group["frozen"],
                group["rank"],
            )
            for group in body["groups"]
        )
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise errors.CheckpointError(
            f"{area.path}: its snapshot cannot be read: {type(error).__name__}: {error!s:.200}"
        ) from error
    return Capture(
        body["step"], body["document"], groups, True, "", body["metrics"], doubt=str(body.get("doubt", ""))
    ), body


def _check(body: Any) -> None:
    """Checks every field that is used, before any of it is."""
    if type(body["step"]) is not int or body["step"] < 0 or not isinstance(body["document"], dict):
        raise ValueError("no step, or no document")
    if not isinstance(body["metrics"], dict) or not all(
        type(value) in (int, float) for value in body["metrics"].values()
    ):
        raise ValueError("metrics that are no numbers")
    if not isinstance(body.get("run", ""), str) or type(body.get("incarnation", 1)) is not int:
        raise ValueError("no run")
    for group in body["groups"]:
        if not isinstance(group["name"], str) or not records.is_plain(f"{group['name']}.safetensors"):
            raise ValueError("a group whose name is no file's")
        if type(group["frozen"]) is not bool or type(group["rank"]) is not int:
            raise ValueError(f"group {group['name']!r:.100}")


def _entry(item: list[Any], address: int, area: Area) -> TensorEntry:
    name, dtype, shape, place, nbytes = item
    if place < 0 or nbytes < 0 or place + nbytes > area.data:
        raise errors.CheckpointError(f"{area.path}: {name} lies outside of its slot")
    return TensorEntry(name, dtype, tuple(shape), memory.HostMemory(address + place, nbytes, area))
