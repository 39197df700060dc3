"""What a rank leaves behind when it is killed: its own small state, in shared memory, where the survivors on
that host find it.

A mailbox is a file of four `slots`. Four, because a rank may be ahead of the survivors by a step and into the
next one: then the record they need is the fourth newest. A record that a later one of the same step and phase
has replaced (gradient accumulation writes one for each backward) is the first to be overwritten.

The writer holds a lock on its file, which the kernel drops when the process dies: that is how a sweep
distinguishes leftovers from mail in use, also where containers share /dev/shm but not their process numbers.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import hashlib
import logging
import os
import re
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Literal, NamedTuple

from lastcall import errors
from lastcall.core.guard.slots import Slots, whole_pages

log = logging.getLogger("lastcall")
MAGIC = b"lastcall mail 1\0"
# at the boundary of the step | after its forward, when the first gradient of its backward was there
Phase = Literal["B", "F"]
Piece = bytes | memoryview | tuple[int, int]  # a tuple: address and number of bytes
_SMALLEST = 64 * 1024
_PHASES: tuple[Phase, Phase] = ("B", "F")


class Record(NamedTuple):
    step: int
    phase: Phase
    sequence: int  # a later record of the same step and phase counts instead of an earlier one
    data: bytes


class Mailbox:
    """One rank's mailbox. Failures of the writer switch it off with a warning: training continues."""

    def __init__(self, path: Path, ring: _Ring, fd: int) -> None:
        self.path = path
        self._ring: _Ring | None = ring
        self._fd = fd  # holds the lock
        self._pid = os.getpid()

    @classmethod
    def create(
        cls, folder: Path, run: str, incarnation: int, rank: int, size: int = _SMALLEST
    ) -> Mailbox | None:
        """A new, empty mailbox for records of `size` bytes at first; None, with a warning, where there is no
        room for one."""
        path = folder / _name(run, incarnation, rank)
        try:
            ring, fd = _made(path, size)
            os.replace(ring.path, path)
            return cls(path, ring, fd)
        except OSError as error:
            _warn(path, error)
            return None

    @classmethod
    def open(cls, path: Path) -> Mailbox:
        """Any rank's mailbox, to be read only. CheckpointError where it is none."""
        return cls(path, _Ring.attach(path), -1)

    def write(self, step: int, phase: Phase, pieces: Sequence[Piece]) -> bool:
        """Put a record into the ring. False where there is no mailbox any more, or one that is only read."""
        if self._ring is None or self._fd < 0:
            return False
        try:
            length = sum(piece[1] if type(piece) is tuple else len(piece) for piece in pieces)
            if length > self._ring.room:
                self._grow(length)
            self._ring.write(step, phase, pieces, length)
            return True
        except Exception as error:  # of any kind: training continues
            _warn(self.path, error)
            self.close()
            return False

    def records(self) -> list[Record]:
        """Oldest first."""
        return [] if self._ring is None else self._ring.records()

    def close(self) -> None:
        """The rank ends in order: its records are no longer needed."""
        self._ring = None
        if self._fd >= 0 and os.getpid() == self._pid:  # and not a forked child that unwinds our block
            with contextlib.suppress(OSError):
                self.path.unlink(missing_ok=True)
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def _grow(self, length: int) -> None:
        """A larger file takes the place of this one, with the records that are in it: killed meanwhile, the
        old one is there."""
        assert self._ring is not None
        ring, fd = _made(self.path, 2 * length)
        for record in self._ring.records():
            ring.write(record.step, record.phase, (record.data,), len(record.data))
        os.replace(ring.path, self.path)
        self._ring = ring
        former, self._fd = self._fd, fd
        os.close(former)


def find(folder: Path, run: str, incarnation: int, rank: int) -> Path | None:
    """The mailbox of a rank, dead or alive, if it is on this host."""
    path = folder / _name(run, incarnation, rank)
    return path if path.exists() else None


def read(folder: Path, run: str, incarnation: int, rank: int) -> list[Record]:
    """The records of a rank; none where it has left no mailbox here, or a damaged one."""
    path = find(folder, run, incarnation, rank)
    try:
        return [] if path is None else Mailbox.open(path).records()
    except errors.CheckpointError as error:
        log.warning("The last state of rank %d cannot be read: %s", rank, error)
        return []


def sweep(folder: Path, run: str, incarnation: int) -> None:
    """Remove what earlier incarnations of this run have left here, and the files of runs of which no rank is
    alive."""
    found: dict[tuple[str, int], list[Path]] = {}
    own = _run_name(run)
    with contextlib.suppress(OSError):
        for path in folder.iterdir():
            match = _NAMES.fullmatch(path.name)
            if match and int(match[1]) == os.getuid():
                found.setdefault((match[2], int(match[3])), []).append(path)
    for (of_run, of_incarnation), paths in found.items():
        ours = of_run == own
        if (ours and of_incarnation < incarnation) or (not ours and not any(map(_held, paths))):
            for path in paths:
                with contextlib.suppress(OSError):
                    path.unlink()


class _Ring(Slots):
    """The words of a slot: step, phase, length, checksum of its record."""

    WHAT, MAGIC, COUNT, WORDS = "a mailbox", MAGIC, 4, 8

    def __init__(self, path: Path, fd: int, size: int) -> None:
        super().__init__(path, fd, size)
        self._sequence = 0
        # what the writer has committed: number, step, phase
        self._heads: list[tuple[int, int, Phase]] = [(0, 0, "B")] * self.COUNT

    def write(self, step: int, phase: Phase, pieces: Sequence[Piece], length: int) -> None:
        slot = self._victim()
        begin = place = self.unmark(slot)
        view = self._view
        for piece in pieces:
            if isinstance(piece, tuple):
                ctypes.memmove(self._base + place, piece[0], piece[1])
                place += piece[1]
            else:
                view[place : place + len(piece)] = piece
                place += len(piece)
        self._sequence += 1
        self.mark(slot, self._sequence, step, _PHASES.index(phase), length, zlib.crc32(view[begin:place]))
        self._heads[slot] = (self._sequence, step, phase)

    def _victim(self) -> int:
        """The slot that is overwritten: an empty one, one whose record was replaced by a later one, or the
        oldest."""
        newest: dict[tuple[int, Phase], int] = {}
        for commit, step, phase in self._heads:
            newest[step, phase] = max(commit, newest.get((step, phase), 0))
        ages = [
            commit and commit + (self._sequence + 1) * (newest[step, phase] == commit)
            for commit, step, phase in self._heads
        ]
        return ages.index(min(ages))

    def records(self) -> list[Record]:
        found = [record for slot in range(self.COUNT) if (record := self._record(slot)) is not None]
        return sorted(found, key=lambda record: record.sequence)

    def _record(self, slot: int) -> Record | None:
        commit, step, phase, length, checksum = self.marked(slot)[:5]
        if commit == 0 or length > self.room or phase >= len(_PHASES):
            return None
        data = bytes(self._view[self.begin(slot) : self.begin(slot) + length])
        # Of a rank that is frozen, not dead, the slot may be in the middle of a write; the word says so, the
        # sum proves it.
        if zlib.crc32(data) != checksum or self.marked(slot)[0] != commit:
            return None
        return Record(step, _PHASES[phase], commit, data)


def _made(path: Path, size: int) -> tuple[_Ring, int]:
    """A new ring under another name, and the descriptor that holds its lock."""
    under = path.with_name(f"{path.name}.tmp")
    # EPERM where it is another user's: then there is no mailbox, with a warning
    under.unlink(missing_ok=True)
    fd = os.open(under, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return _Ring.made(under, fd, whole_pages(max(size, _SMALLEST))), fd
    except OSError:
        os.unlink(under)
        os.close(fd)
        raise


def _held(path: Path) -> bool:
    """Whether the writer of this mailbox lives."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return False
    except OSError:
        return True
    finally:
        os.close(fd)


_NAMES = re.compile(r"lastcall-(\d+)-mail-([0-9a-f]{16})-(\d+)-(\d+)(?:\.tmp)?", re.ASCII)


def _run_name(run: str) -> str:
    return hashlib.blake2b(run.encode(), digest_size=8).hexdigest()  # always a valid file name


def _name(run: str, incarnation: int, rank: int) -> str:
    return f"lastcall-{os.getuid()}-mail-{_run_name(run)}-{incarnation}-{rank}"


def _warn(path: Path, error: Exception) -> None:
    log.warning(
        "No shared memory for the last state of this rank (%s: %s): if killed, randomness and data position "
        "come from others. Give "
        "%s more room (docker run --shm-size), or set LASTCALL_GUARD_FOLDER.",
        path.name,
        error,
        path.parent,
    )


def newest(records: Sequence[Record], step: int, phase: Phase) -> Record | None:
    """The record of a step that counts."""
    found = [record for record in records if (record.step, record.phase) == (step, phase)]
    return max(found, key=lambda record: record.sequence, default=None)
