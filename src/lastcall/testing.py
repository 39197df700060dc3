"""For tests of training code under preemption: a manual clock, a disk that fails on demand, a notice at a
chosen step.

files = testing.FaultyFiles(testing.Fault("fsync", 2, errno.EIO))    # the second fsync fails
look = testing.preempt_at(step=7); look(run.step)                      # in the loop: SIGTERM to this process
at step 7
testing.assert_resumable("runs/exp1", step=7)
"""

from __future__ import annotations

import errno as errnos
import fcntl
import os
import signal
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lastcall import clock, errors
from lastcall.core.checkpoint import catalog
from lastcall.core.checkpoint.record import Entry
from lastcall.core.engine import writer
from lastcall.core.restore import restore
from lastcall.storage import files as storage

OPERATIONS = (
    "open",
    "close",
    "pwrite",
    "fsync",
    "truncate",
    "allocate",
    "rename",
    "exchange",
    "link",
    "unlink",
    "mkdir",
    "rmdir",
)


class FakeClock(clock.Clock):
    """A clock that advances only when it is set, or when a thread sleeps on it."""

    def __init__(self, now: float = 1000.0) -> None:
        self._now = now

    def now(self) -> float:
        return self._now

    def wall(self) -> float:
        return self._now

    def sleep(self, seconds: float) -> None:
        self._now += seconds

    def advance(self, seconds: float) -> None:
        self._now += seconds


@dataclass(frozen=True)
class Fault:
    """The n-th call (from 1) of an operation, or of any with operation "any", goes wrong."""

    operation: str
    number: int
    errno: int = errnos.EIO
    lasting: bool = False  # every later call of it fails as well
    short: bool = False  # pwrite: write only half, and succeed
    kill: bool = False  # SIGKILL this process instead, at this point


class FaultyFiles(storage.Files):
    """The real file system with faults in chosen places. `calls` counts the operations; without faults it is
    a plain recorder."""

    def __init__(self, *faults: Fault) -> None:
        self.calls: Counter[str] = Counter()
        self.total = 0
        self._faults = faults
        self._lock = threading.Lock()

    def _strike(self, operation: str) -> Fault | None:
        with self._lock:
            self.calls[operation] += 1
            self.total += 1
            for fault in self._faults:
                count = self.total if fault.operation == "any" else self.calls[operation]
                if fault.operation not in ("any", operation) or not (
                    count == fault.number or (fault.lasting and count > fault.number)
                ):
                    continue
                if fault.kill:
                    os.kill(os.getpid(), signal.SIGKILL)
                return fault
        return None

    def _check(self, operation: str) -> None:
        if (fault := self._strike(operation)) is not None and not fault.short:
            raise OSError(fault.errno, os.strerror(fault.errno))

    def pwrite(self, fd: int, views: Sequence[memoryview], offset: int, flags: int = 0) -> int:
        fault = self._strike("pwrite")
        if fault is not None and not fault.short:
            raise OSError(fault.errno, os.strerror(fault.errno))
        size = sum(len(view) for view in views)
        if fault is not None and size > 1:
            half = size // 2
            if fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT:
                half = half // 4096 * 4096 or 4096  # only ever short by whole blocks
            views = _first(views, half)
        return super().pwrite(fd, views, offset, flags)

    def close(self, fd: int) -> None:
        super().close(fd)  # like the kernel: a failed close still closes the file
        self._check("close")


def _first(views: Sequence[memoryview], size: int) -> list[memoryview]:
    kept = []
    for view in views:
        kept.append(view[:size])
        size -= len(kept[-1])
        if size <= 0:
            break
    return kept


def _checked(operation: str) -> Callable[..., Any]:
    real = getattr(storage.Files, operation)

    def method(self: FaultyFiles, *args: Any) -> Any:
        self._check(operation)
        return real(self, *args)

    method.__name__ = operation
    return method


for _operation in OPERATIONS:
    if _operation not in ("pwrite", "close"):
        setattr(FaultyFiles, _operation, _checked(_operation))


def preempt_at(step: int, *, signum: int = signal.SIGTERM, run: Any = None) -> Callable[[int], None]:
    """Returns a function to call with each step: it sends the signal to this process, once, when that step is
    reached."""
    sent = False

    def look(current: int) -> None:
        nonlocal sent
        if current >= step and not sent:
            sent = True
            os.kill(os.getpid(), signum)

    if run is not None:
        look(run.step)
    return look


def assert_resumable(
    directory: str | os.PathLike[str], step: int | None = None, *, exact: bool | None = None
) -> Entry:
    """Asserts that the newest checkpoint exists, every byte matches its digest, and it is of that step.
    Returns it."""
    found = catalog.Catalog(Path(directory), storage.Files()).entries()
    if not found:
        raise AssertionError(f"{directory} holds no committed checkpoint")
    newest = found[0]
    engine = writer.Engine(2)
    try:
        restore.verify(newest, engine)
    except errors.CheckpointError as error:
        raise AssertionError(f"{newest.path} is damaged: {error}") from error
    finally:
        engine.close()
    if step is not None and newest.record.step != step:
        raise AssertionError(f"the newest checkpoint is of step {newest.record.step}, not {step}")
    if exact is not None and newest.record.exact is not exact:
        raise AssertionError(
            f"{newest.path.name} is {'' if newest.record.exact else 'not '}exact: {newest.record.because}"
        )
    return newest
