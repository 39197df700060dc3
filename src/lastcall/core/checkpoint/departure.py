"""A departure note: an incarnation that is shutting down says so in a file, for the next one, which may start
before this one has ended.

A Job's controller makes the replacement of a pod at the moment when that pod is asked to stop. The new
incarnation then starts while the old one still saves: if it continued from what is committed already, all
that the old one saves now would be lost. The lock says only that a process is there and not for how long, and
some network file systems have none, or one that other machines do not see. So every rank that has a notice
keeps a note, until it exits, of who it is, why it stops and how long it may still live.

Discarded: a time of day as the deadline. The clocks of two machines differ; the remaining seconds do not, and
the age of the note is measured by one clock, that of the file system, which also dates the file that is
written to compare.
"""

from __future__ import annotations

import contextlib
import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from lastcall import messages
from lastcall.core.process.identity import Process
from lastcall.storage import files as storage

LONGEST = 24 * 3600.0  # seconds of grace at most: a note that claims more is ignored
_NAME = "leaving"  # leaving-0.json, one a rank


@dataclass(frozen=True)
class Departure:
    """What a rank that was asked to stop has noted: who it is and how long it may still live."""

    rank: int
    reason: str
    seconds: float  # that it had left when it wrote this
    process: Process
    machine: str  # the name that people use
    written: float = 0.0  # when, by the clock of the file system

    def gone(self, mine: Process, locked: bool) -> bool:
        """Whether it is known to have ended. `locked`: the directory's lock is ours; on one machine that is
        proof, since the kernel takes it from the first rank only when that has ended."""
        same_kernel = bool(mine.host) and _boot(mine.host) == _boot(self.process.host)
        return self.process.gone(mine.host) or (locked and self.rank == 0 and same_kernel)

    def __str__(self) -> str:
        who = f"rank {self.rank}, " if self.rank else ""
        return f"{who}process {self.process.pid} on {self.machine}"


def _boot(host: str) -> str:
    return host.partition("/")[0]


class DepartureNote:
    """The side of the process that stops. Nothing here raises: one that cannot write the note must still
    save."""

    def __init__(self, private: Path, rank: int) -> None:
        self._path = private / f"{_NAME}-{rank}.json"
        self._rank = rank
        self._pid = os.getpid()
        self._said = False

    def say(self, reason: str, seconds: float) -> None:
        leaver = Departure(self._rank, reason, seconds, Process.own(), os.uname().nodename)
        with contextlib.suppress(OSError):
            storage.replace_small(self._path, json.dumps(asdict(leaver)).encode())
            self._said = True

    def unsay(self) -> None:
        """Everything is saved, or nothing will be: the next incarnation need not wait."""
        if self._said and os.getpid() == self._pid:  # not a forked child
            self._said = False
            with contextlib.suppress(OSError):
                os.unlink(self._path)


def found(private: Path) -> list[Departure]:
    """The notes that were written and not withdrawn."""
    return [leaver for path in sorted(private.glob(f"{_NAME}-*.json")) if (leaver := _read(path)) is not None]


def left(private: Path, leaver: Departure) -> float:
    """The seconds that the process still has."""
    probe = private / f"now.{storage.own_name()}.tmp"
    try:
        probe.touch()
        return leaver.seconds - max(0.0, probe.stat().st_mtime - leaver.written)
    except OSError:
        return leaver.seconds  # rather wait too long
    finally:
        with contextlib.suppress(OSError):
            probe.unlink()


def forget(private: Path) -> None:
    """These processes have ended, as far as can be known."""
    for path in private.glob(f"{_NAME}-*.json"):
        with contextlib.suppress(OSError):
            os.unlink(path)


def _read(path: Path) -> Departure | None:
    """By opening it, since a network file system may remember for a minute that a file is there, but asks
    when it is opened."""
    try:
        return parse(storage.read_plain(path, 64 * 1024), path.stat(follow_symlinks=False).st_mtime)
    except OSError:
        return None


def parse(data: bytes, written: float = 0.0) -> Departure | None:
    """None if this is not a departure note."""
    try:
        body: dict[str, Any] = json.loads(data)
        leaver = Departure(
            **{
                **body,
                "process": Process(**body["process"]),
                "seconds": float(body["seconds"]),
                "written": written,
            }
        )
    except (ValueError, TypeError, KeyError, RecursionError):
        return None
    whole = messages.typed(leaver) and messages.typed(leaver.process) and 0 <= leaver.seconds <= LONGEST
    return leaver if whole else None
