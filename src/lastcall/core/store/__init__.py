"""The key-value store through which the ranks of a run agree. One protocol, three backends that pass one
conformance suite:

client/server   our own, which lives in `lastcall run`, outside every training process
c10d            torch's (adapters/torch/distributed/c10d.py), where there is no launcher: under torchrun it
                lives in the agent
memory          one process, for tests and simulations
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol


class Store(Protocol):
    """One connection, used by one thread at a time: a wait on it keeps others out, so every thread has a
    clone of its own.

    Every method raises errors.StoreLost, and nothing else, when the store cannot be reached (any more).
    """

    def set(self, key: str, value: bytes) -> None:
        """May return before the value has arrived: what must be known to have arrived is claimed or read
        back."""

    def get(self, key: str, timeout: float) -> bytes | None:
        """Wait for a key. None if it is not there within `timeout` seconds."""

    def get_many(self, keys: Sequence[str]) -> list[bytes | None]:
        """What is there now, without waiting."""

    def claim(self, key: str, value: bytes) -> bytes:
        """Write a key once and for all: the first writer's value stays, and every claim returns it. The one
        atomic act on which every decision of the ranks rests. `value` is not empty."""

    def add(self, key: str, amount: int) -> int:
        """Count: the sum after this addition. Atomic."""

    def clone(self) -> Store:
        """A connection of its own to the same store, for another thread."""

    def close(self) -> None:
        """Close the connection. A thread that waits on it gets StoreLost."""


class Scoped:
    """A store whose keys all begin with a prefix: the runs and the incarnations of a store do not see each
    other."""

    def __init__(self, store: Store, prefix: str) -> None:
        self._store = store
        self._prefix = prefix

    def set(self, key: str, value: bytes) -> None:
        self._store.set(self._prefix + key, value)

    def get(self, key: str, timeout: float) -> bytes | None:
        return self._store.get(self._prefix + key, timeout)

    def get_many(self, keys: Sequence[str]) -> list[bytes | None]:
        return self._store.get_many([self._prefix + key for key in keys])

    def claim(self, key: str, value: bytes) -> bytes:
        return self._store.claim(self._prefix + key, value)

    def add(self, key: str, amount: int) -> int:
        return self._store.add(self._prefix + key, amount)

    def clone(self) -> Scoped:
        return Scoped(self._store.clone(), self._prefix)

    def close(self) -> None:
        self._store.close()
