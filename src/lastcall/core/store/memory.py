"""A store among the threads of one process, for tests and simulations. It counts what a real one would have
to carry."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Sequence

from lastcall import errors
from lastcall.core.store import table


class Traffic:
    """What went through a store: calls by name, and the bytes of keys and values to it and from it."""

    def __init__(self) -> None:
        self.operations: Counter[str] = Counter()
        self.bytes_in = 0
        self.bytes_out = 0

    def count(self, operation: str, received: int, sent: int) -> None:
        self.operations[operation] += 1
        self.bytes_in += received
        self.bytes_out += sent


class _Shared:
    """What all clones have in common."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.table = table.Table()
        self.traffic = Traffic()
        self.lost = False


class MemoryStore:
    def __init__(self, shared: _Shared | None = None) -> None:
        self._shared = shared or _Shared()
        self._closed = False

    @property
    def traffic(self) -> Traffic:
        """Of all clones together."""
        return self._shared.traffic

    def set(self, key: str, value: bytes) -> None:
        with self._shared.changed:
            self._check()
            self._shared.table.set(key, bytes(value))
            self.traffic.count("set", len(key) + len(value), 0)
            self._shared.changed.notify_all()

    def get(self, key: str, timeout: float) -> bytes | None:
        deadline = time.monotonic() + timeout
        with self._shared.changed:
            self._check()
            while (value := self._shared.table.get(key)) is None and (
                left := deadline - time.monotonic()
            ) > 0:
                self._shared.changed.wait(min(left, threading.TIMEOUT_MAX))
                self._check()
            self.traffic.count("get", len(key), len(value or b""))
            return value

    def get_many(self, keys: Sequence[str]) -> list[bytes | None]:
        with self._shared.changed:
            self._check()
            values = [self._shared.table.get(key) for key in keys]
            self.traffic.count("get_many", sum(map(len, keys)), sum(len(value or b"") for value in values))
            return values

    def claim(self, key: str, value: bytes) -> bytes:
        with self._shared.changed:
            self._check()
            kept = self._shared.table.claim(key, bytes(value))
            self.traffic.count("claim", len(key) + len(value), len(kept))
            self._shared.changed.notify_all()
            return kept

    def add(self, key: str, amount: int) -> int:
        with self._shared.changed:
            self._check()
            total = self._shared.table.add(key, amount)
            self.traffic.count("add", len(key) + 8, 8)
            self._shared.changed.notify_all()
            return total

    def clone(self) -> MemoryStore:
        self._check()
        return MemoryStore(self._shared)

    def close(self) -> None:
        with self._shared.changed:
            self._closed = True
            self._shared.changed.notify_all()

    def lose(self) -> None:
        """As if the server had gone, for all clones; tests ask for it."""
        with self._shared.changed:
            self._shared.lost = True
            self._shared.changed.notify_all()

    def _check(self) -> None:
        if self._closed or self._shared.lost:
            raise errors.StoreLost(f"The store in memory {'was closed' if self._closed else 'is gone'}")
