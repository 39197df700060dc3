"""That an incarnation is on its way out, written down for the next one, which may be there before it has gone.

A Job's controller makes the replacement of a pod at the moment when that pod is told to stop. The new incarnation then starts while the
old one still saves: if it went on from what is committed already, all that the old one saves now would be lost. The lock says only that
somebody is there and not for how long, and some network file systems have none, or one that other machines do not see. So every rank
that has a notice writes, until it has left, who it is, why it leaves and how long it may still live.

Discarded: a time of day as the deadline. The clocks of two machines differ; the length of the rest does not, and how long ago it was
written is told by one clock, that of the file system, which also dates the file that is written to compare.
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

LONGEST = 24 * 3600.0  # seconds of grace that anybody has: a word that says more is none
AFTERWARDS = 10.0  # seconds after its deadline at which a process that should be dead counts as dead
_NAME = "leaving"  # leaving-0.json, one a rank


@dataclass(frozen=True)
class Leaver:
    """A rank of an incarnation that was told to stop."""

    rank: int
    reason: str
    seconds: float  # that it had left when it said so
    process: Process
    machine: str  # as people call it
    written: float = 0.0  # when, by the clock of the file system

    def gone(self, mine: Process, locked: bool) -> bool:
        """Whether it is known to have ended. `locked`: the directory's lock is ours; on one machine that is proof, since the kernel
        takes it from the first rank only when that has ended."""
        same_kernel = bool(mine.host) and _boot(mine.host) == _boot(self.process.host)
        return self.process.gone(mine.host) or (locked and self.rank == 0 and same_kernel)

    def __str__(self) -> str:
        who = f"rank {self.rank}, " if self.rank else ""
        return f"{who}process {self.process.pid} on {self.machine}"


def _boot(host: str) -> str:
    return host.partition("/")[0]


class Leaving:
    """The side of the one that leaves. Nothing here raises: who cannot say it must save all the same."""

    def __init__(self, private: Path, rank: int) -> None:
        self._path = private / f"{_NAME}-{rank}.json"
        self._rank = rank
        self._pid = os.getpid()
        self._said = False

    def say(self, reason: str, seconds: float) -> None:
        leaver = Leaver(self._rank, reason, seconds, Process.own(), os.uname().nodename)
        under = self._path.with_suffix(f".{storage.own_name()}.tmp")
        with contextlib.suppress(OSError):
            under.write_text(json.dumps(asdict(leaver)))
            os.replace(under, self._path)
            self._said = True

    def unsay(self) -> None:
        """Everything is saved, or nothing will be: the next one need not wait."""
        if self._said and os.getpid() == self._pid:  # not a forked child
            self._said = False
            with contextlib.suppress(OSError):
                os.unlink(self._path)


def found(private: Path) -> list[Leaver]:
    """Who has said so, and has not taken it back."""
    return [leaver for path in sorted(private.glob(f"{_NAME}-*.json")) if (leaver := _read(path)) is not None]


def left(private: Path, leaver: Leaver) -> float:
    """The seconds that it still has."""
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
    """They are gone, as far as anybody can tell."""
    for path in private.glob(f"{_NAME}-*.json"):
        with contextlib.suppress(OSError):
            os.unlink(path)


def _read(path: Path) -> Leaver | None:
    """By opening it, since a network file system may remember for a minute that a file is there, but asks when it is opened."""
    try:
        return parse(storage.read_plain(path, 64 * 1024), path.stat(follow_symlinks=False).st_mtime)
    except OSError:
        return None


def parse(data: bytes, written: float = 0.0) -> Leaver | None:
    """None for what is no word of a leaver."""
    try:
        body: dict[str, Any] = json.loads(data)
        leaver = Leaver(**{**body, "process": Process(**body["process"]), "seconds": float(body["seconds"]), "written": written})
    except (ValueError, TypeError, KeyError, RecursionError):
        return None
    whole = messages.typed(leaver) and messages.typed(leaver.process) and 0 <= leaver.seconds <= LONGEST
    return leaver if whole else None
