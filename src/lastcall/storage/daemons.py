"""Threads for work that may never end, such as a request to a store that has stopped answering.

Discarded: concurrent.futures.ThreadPoolExecutor. The interpreter waits for its threads at exit, whatever they
do: a process that has saved, and has seconds left, would be killed while it waits for an answer that is no
longer needed.
"""

from __future__ import annotations

import concurrent.futures as futures
import queue
import threading
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

T = TypeVar("T")
R = TypeVar("R")
_LOOK = 0.25  # seconds between two checks


class Daemons(futures.Executor):
    """An executor whose threads end with the process."""

    def __init__(self, max_workers: int = 1) -> None:
        self._most = max_workers
        self._waiting: queue.SimpleQueue[tuple[futures.Future[Any], Callable[[], Any]] | None] = (
            queue.SimpleQueue()
        )
        self._threads: list[threading.Thread] = []
        self._lock = threading.Lock()

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> futures.Future[Any]:
        future: futures.Future[Any] = futures.Future()
        self._waiting.put((future, lambda: fn(*args, **kwargs)))
        with self._lock:
            if len(self._threads) < self._most:
                thread = threading.Thread(target=self._work, name="lastcall-transfer", daemon=True)
                self._threads.append(thread)
                thread.start()
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        with self._lock:
            for _ in self._threads:
                self._waiting.put(None)
        for thread in self._threads if wait else ():
            thread.join()

    def _work(self) -> None:
        while (item := self._waiting.get()) is not None:
            future, work = item
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(work())
                except BaseException as error:
                    future.set_exception(error)


def at_once(work: Callable[[T], R], items: Iterable[T], threads: int, check: Callable[[], None]) -> list[R]:
    """All of it, on so many threads. `check` is called periodically; when it raises, or some work does, this
    ends without waiting for work in progress."""
    pool = Daemons(threads)
    everything = [pool.submit(work, item) for item in items]
    try:
        waiting = set(everything)
        while waiting:
            check()
            done, waiting = futures.wait(waiting, _LOOK, futures.FIRST_EXCEPTION)
            for future in done:
                future.result()
        return [future.result() for future in everything]
    finally:
        for future in everything:
            future.cancel()
        pool.shutdown(wait=False)
