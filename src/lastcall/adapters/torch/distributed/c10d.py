"""torch's own key-value store as the one through which the ranks agree, where no `lastcall run` offers ours.

Measured with torch 2.13:
- A connection is kept busy by the thread that waits on it, so every store here has a clone of its own.
- A `wait` that times out writes two warnings to stderr, and one that ends while the interpreter shuts down
  aborts the process (134). So
  no thread waits here for a key itself, which only its setter could end. A waiter parks on a key of its own,
  its bell, which is rung by the writer of the key, by its own time-out, and by close().
- `add`, `check` and the like have no time-out: a cut link would hold them for a quarter of an hour. So the
  calls are made on a thread
  of ours, and given up.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import queue
import threading
import time
import uuid
import weakref
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any, Generic, TypeVar

import torch
import torch.distributed as dist

from lastcall import errors

T = TypeVar("T")
_PATIENCE = 10.0  # seconds for an answer
# seconds for a connection: torch asks the name server for the name of each address, which may take 5 s and
# more
_CONNECTING = 30.0
_LONG = timedelta(days=20)  # milliseconds that an int holds
# seconds between two looks of a waiter that was not rung: a setter may be killed between setting and ringing
_LOOK = 2.0
_SLOWEST_POLL = 1.0


class C10dStore:
    """A clone of `store` (TCPStore, PrefixStore, FileStore, HashStore). StoreLost where it cannot be had."""

    def __init__(self, store: Any) -> None:
        self._open(store, None)

    def _open(self, store: Any, ringer: _Ringer | None) -> None:
        self._worker = _Worker()
        self._lost: str | None = None
        self._closed = False
        self._watched: set[str] = set()
        try:
            if not hasattr(store, "clone"):
                raise self._loss(
                    f"{type(store).__name__} of torch {torch.__version__} cannot be cloned. Start the run "
                    "with `lastcall run`"
                )
            self._store = self._run(store.clone, _CONNECTING)
            rings = isinstance(_innermost(self._store), dist.TCPStore)  # type: ignore[attr-defined]  # the others have no `append`
            self._bell = f"lastcall-bell/{uuid.uuid4().hex}" if rings else None
            self._ringer = ringer or _Ringer(self._run(store.clone, _CONNECTING) if rings else None)
        except BaseException:
            self._worker.end()
            raise
        _live.add(self)

    def set(self, key: str, value: bytes) -> None:
        self._run(partial(self._set, key, value))

    def get(self, key: str, timeout: float) -> bytes | None:
        deadline = time.monotonic() + timeout
        value = self._run(partial(self._look, key))
        pause = 0.002
        while value is None and (left := deadline - time.monotonic()) > 0:
            if self._bell is not None:
                self._park(self._bell, min(left, _LOOK))
            elif self._worker.gone.wait(min(left, pause)):
                raise self._loss()
            pause = min(_SLOWEST_POLL, pause * 1.25)  # a poll comes at most a quarter of the time late
            value = self._run(partial(self._look, key))
        return value

    def get_many(self, keys: Sequence[str]) -> list[bytes | None]:
        return self._run(partial(self._some, list(keys)))

    def claim(self, key: str, value: bytes) -> bytes:
        return self._run(partial(self._claim, key, value))

    def add(self, key: str, amount: int) -> int:
        return self._run(partial(self._add, key, amount))

    def clone(self) -> C10dStore:
        if self._lost is not None or self._closed:
            raise self._loss()
        other = C10dStore.__new__(C10dStore)
        other._open(self._store, self._ringer)
        return other

    def close(self) -> None:
        self._closed = True
        self._worker.end()
        if self._bell is not None:
            self._ringer.ring(self._bell)
        _live.discard(self)

    def leave(self, patience: float) -> None:
        """Close, and wait for the thread to come out of torch."""
        self.close()
        self._worker.join(patience)

    # ---- on the thread

    def _set(self, key: str, value: bytes) -> None:
        self._store.set(key, value)
        self._ring(key)

    def _claim(self, key: str, value: bytes) -> bytes:
        # Only with "" as the expected value does it create a key; with any other it would return that one and
        # store nothing.
        kept = bytes(self._store.compare_set(key, "", value))
        self._ring(key)
        return kept

    def _add(self, key: str, amount: int) -> int:
        total = int(self._store.add(key, amount))
        self._ring(key)
        return total

    def _some(self, keys: list[str]) -> list[bytes | None]:
        """`check` says whether all are there, so halve until they are: a question for each missing one and a
        few more."""
        if not keys:
            return []
        if self._store.check(keys):
            return [bytes(value) for value in self._store.multi_get(keys)]
        if len(keys) == 1:
            return [None]
        half = len(keys) // 2
        return self._some(keys[:half]) + self._some(keys[half:])

    def _look(self, key: str) -> bytes | None:
        """The order matters: a ring before the bell is put up again is for a value that is found here."""
        if self._bell is not None:
            if key not in self._watched:
                self._store.append(_watchers(key), self._bell + ",")
                self._watched.add(key)
            self._store.delete_key(self._bell)
        return bytes(self._store.get(key)) if self._store.check([key]) else None

    def _ring(self, key: str) -> None:
        if self._bell is not None and self._store.check([_watchers(key)]):
            for bell in self._store.get(_watchers(key)).decode().split(","):
                if bell:
                    self._store.set(bell, b"1")

    # ---- from the thread that calls

    def _park(self, bell: str, seconds: float) -> None:
        job = self._begin(partial(self._store.wait, [bell], _LONG))
        if not self._ended(job, seconds):
            self._ringer.ring(bell)
        self._finish(job)

    def _run(self, call: Callable[[], T], patience: float | None = None) -> T:
        return self._finish(self._begin(call), patience)

    def _begin(self, call: Callable[[], T]) -> _Job[T]:
        if self._lost is not None or self._closed:
            raise self._loss()
        return self._worker.begin(call)

    def _ended(self, job: _Job[T], seconds: float) -> bool:
        ended = job.ended.wait(seconds)
        if self._closed:
            raise self._loss()
        return ended

    def _finish(self, job: _Job[T], patience: float | None = None) -> T:
        patience = patience or _PATIENCE
        if not self._ended(job, patience):
            raise self._loss(f"no answer in {patience:.0f} s")
        if job.error is not None:
            raise self._loss(str(job.error).partition("\n")[0]) from job.error
        return job.result

    def _loss(self, why: str | None = None) -> errors.StoreLost:
        self._lost = self._lost or why
        return errors.StoreLost(
            f"torch's store is lost: {'this connection was closed' if self._closed else self._lost}"
        )


class _Job(Generic[T]):
    result: T

    def __init__(self, call: Callable[[], T]) -> None:
        self.call = call
        self.error: Exception | None = None
        self.ended = threading.Event()

    def do(self) -> None:
        try:
            self.result = self.call()
        except Exception as error:
            self.error = error
        self.ended.set()


class _Worker:
    """A thread that makes calls which may never come back."""

    def __init__(self) -> None:
        self.gone = threading.Event()
        self._jobs: queue.SimpleQueue[_Job[Any] | None] = queue.SimpleQueue()
        self._job: _Job[Any] | None = None
        self._thread = threading.Thread(target=self._work, name="lastcall-c10d", daemon=True)
        self._thread.start()

    def begin(self, call: Callable[[], T]) -> _Job[T]:
        job = self._job = _Job(call)
        self._jobs.put(job)
        if self.gone.is_set():  # closed in this very moment
            job.ended.set()
        return job

    def end(self) -> None:
        """A thread that waits for a job is woken; the thread ends when torch lets it."""
        self.gone.set()
        self._jobs.put(None)
        if (job := self._job) is not None:
            job.ended.set()

    def join(self, patience: float) -> None:
        self._thread.join(patience)

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            job.do()


class _Ringer:
    """A connection from which parked waiters are woken: their own are busy. The clones of a store share
    it."""

    def __init__(self, store: Any) -> None:
        self._store = store
        self._lock = threading.Lock()

    def ring(self, bell: str) -> None:
        with self._lock, contextlib.suppress(Exception):  # a lost store wakes its waiters on its own
            self._store.set(bell, b"1")


def _innermost(store: Any) -> Any:
    while isinstance(store, dist.PrefixStore):  # type: ignore[attr-defined]
        store = store.underlying_store
    return store


def _watchers(key: str) -> str:
    return f"{key}#watchers"


_live: weakref.WeakSet[C10dStore] = weakref.WeakSet()
_home = os.getpid()


@atexit.register
def _leave_all() -> None:
    """No thread may come back from torch while the interpreter shuts down: the process would be aborted."""
    if os.getpid() == _home:  # a forked child has the connections, but not the threads
        for store in list(_live):
            store.leave(1.0)
