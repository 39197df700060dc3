"""Ranks as threads of which exactly one runs at a time: each operation on the store gives the turn back, and
a seed says who is next.

So every interleaving of operations can be had, again and again: with a clock that is turned by hand, ranks
that die between two operations or in the middle of one (it was carried out, but nobody came back), and
connections that are lost in the same ways.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from lastcall import errors, testing
from lastcall.core.store import table


class Killed(BaseException):
    """Ends the thread of a rank, past every `except Exception`."""


@dataclass(frozen=True)
class Fate:
    """What happens to a rank, at its n-th operation on the store, before it is carried out or after."""

    starts: float = 0.0  # seconds after the others
    dies: int | None = None
    loses: int | None = None  # the store
    halfway: bool = False  # ... after the operation was carried out


class Stage:
    def __init__(self, seed: int, *, hurried: bool = False) -> None:
        self.clock = testing.FakeClock()
        self.table = table.Table()
        self.ranks: list[Rank] = []
        self._random = random.Random(seed)
        self._hurried = hurried  # time goes on also while somebody could run
        self.returned = threading.Semaphore(0)

    def run(self) -> None:
        """Until every rank has ended."""
        for rank in self.ranks:
            rank.thread.start()
            assert self.returned.acquire(timeout=60)
        while waiting := [rank for rank in self.ranks if not rank.ended]:
            ready = [rank for rank in waiting if rank.ready()]
            if not ready:
                self.clock.advance(max(0.0, min(rank.wakes for rank in waiting) - self.clock.now()))
                continue
            if self._hurried and self._random.random() < 0.1:
                self.clock.advance(self._random.choice([0.1, 1.0, 7.0]))
            self._random.choice(ready).turn.release()
            assert self.returned.acquire(timeout=60)
        for rank in self.ranks:
            rank.thread.join(60)

    def dead(self) -> set[int]:
        return {number for number, rank in enumerate(self.ranks) if rank.dead}


class Rank:
    """One rank's thread, and its connection to the store (core.store.Store)."""

    def __init__(self, stage: Stage, work: Callable[[Rank], None], fate: Fate) -> None:
        self.ended = self.dead = self.lost = False
        self.operations = 0
        self.wakes = stage.clock.now() + fate.starts
        self.turn = threading.Semaphore(0)
        self.thread = threading.Thread(target=self._live, args=(work,), daemon=True)
        self.fate = fate
        self._awaited: str | None = None
        self._stage = stage
        stage.ranks.append(self)

    def ready(self) -> bool:
        arrived = self._awaited is not None and self._stage.table.get(self._awaited) is not None
        return arrived or self._stage.clock.now() >= self.wakes

    def _live(self, work: Callable[[Rank], None]) -> None:
        try:
            self._pause(self.wakes)
            work(self)
        except Killed:
            self.dead = True
        finally:
            self.ended = True
            self._stage.returned.release()

    def _pause(self, wakes: float, awaited: str | None = None) -> None:
        self.wakes, self._awaited = wakes, awaited
        self._stage.returned.release()
        self.turn.acquire()

    def _operation(self, act: Callable[[], object], seconds: float = 0.0, awaited: str | None = None) -> None:
        self.operations += 1
        self._pause(self._stage.clock.now() + seconds, awaited)
        dies, loses = self.fate.dies == self.operations, self.fate.loses == self.operations
        struck = dies or loses or self.lost
        if not struck or (self.fate.halfway and not self.lost):
            act()
        self.lost = self.lost or loses
        if dies:
            raise Killed
        if self.lost:
            raise errors.StoreLost("the link was cut")

    def set(self, key: str, value: bytes) -> None:
        self._operation(lambda: self._stage.table.set(key, value))

    def get(self, key: str, timeout: float) -> bytes | None:
        self._operation(lambda: None, timeout, key)
        return self._stage.table.get(key)

    def get_many(self, keys: Sequence[str]) -> list[bytes | None]:
        self._operation(lambda: None)
        return [self._stage.table.get(key) for key in keys]

    def claim(self, key: str, value: bytes) -> bytes:
        found: list[bytes] = []
        self._operation(lambda: found.append(self._stage.table.claim(key, value)))
        return found[0]

    def add(self, key: str, amount: int) -> int:
        found: list[int] = []
        self._operation(lambda: found.append(self._stage.table.add(key, amount)))
        return found[0]

    def clone(self) -> Rank:
        return self

    def close(self) -> None:
        return
