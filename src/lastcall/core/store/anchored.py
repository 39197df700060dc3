"""The store that the ranks use: fast through memory, anchored in the directory that the checkpoints go to.

Every claim is made in the directory, where the commit is made too: so there is one register even when some
ranks can reach the store in memory and others cannot (a cut link), and a rank that cannot reach the directory
could not save anyway. Everything else goes through memory. A rank that loses that connection continues in the
directory, and leaves a mark there: when the others see it, they also read and write there. Meanwhile a thread
tries to reconnect: a slow answer is not a lost store.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Sequence

from lastcall import errors
from lastcall.core.store import Store
from lastcall.core.store.folder import FolderStore
from lastcall.core.store.nowhere import NullStore

_FALLBACK = "fallback"  # there once a rank has lost the store in memory
_LOOK = 1.0  # seconds between two looks into the directory once a rank has fallen back to it
# ... before that: a rank that is cut off can report nowhere else, and must be noticed within the grace
_GLANCE = 10.0
_AGAIN = 2.0  # seconds between two attempts to connect
_FLEETING = "pulse/"  # what is written again every second is not worth repeating


class Anchored:
    """`over`: set once all ranks have finished. A rank that loses the store then leaves nothing in the
    directory, which is being cleaned up."""

    def __init__(
        self,
        fast: Store | None,
        folder: FolderStore | NullStore,
        connect: Callable[[], Store] | None = None,
        over: threading.Event | None = None,
    ) -> None:
        self._fast = fast
        self._over = over if over is not None else threading.Event()
        self._folder = folder
        self._connect = connect  # a new connection to the same store
        self._back: Store | None = None  # ... that was established
        self._closed = threading.Event()
        self._said: dict[str, bytes] = {}
        self._elsewhere = False  # a rank has fallen back to the directory
        self._looked = 0.0

    @property
    def lost(self) -> bool:
        return self._fast is None

    def set(self, key: str, value: bytes) -> None:
        if not key.startswith(_FLEETING):
            self._said[key] = value
        if (fast := self._store()) is not None:
            try:
                fast.set(key, value)
                if self._elsewhere:
                    self._folder.set(key, value)
                return
            except errors.StoreLost:
                self._lose()
        if not self._over.is_set():
            self._folder.set(key, value)

    def get(self, key: str, timeout: float) -> bytes | None:
        until = time.monotonic() + timeout
        while True:
            left = until - time.monotonic()
            found = self._get(key, max(0.0, left))
            if found is not None or left <= 0:
                return found

    def _get(self, key: str, left: float) -> bytes | None:
        """One wait, for as long as the directory need not be read."""
        fast = self._store()
        if fast is None:
            return self._folder.get(key, min(left, _LOOK))
        elsewhere = self._look()
        if elsewhere and (found := self._folder.get_many([key])[0]) is not None:
            return found
        try:
            found = fast.get(key, min(left, _LOOK if elsewhere else _GLANCE))
        except errors.StoreLost:
            self._lose()
            found = None
        return self._folder.get_many([key])[0] if found is None else found

    def get_many(self, keys: Sequence[str]) -> list[bytes | None]:
        found: list[bytes | None] = [None] * len(keys)
        fast = self._store()
        if fast is not None:
            try:
                found = fast.get_many(keys)
            except errors.StoreLost:
                self._lose()
                fast = None
        if fast is not None and not self._look():
            return found
        missing = [key for key, value in zip(keys, found, strict=True) if value is None]
        others = dict(zip(missing, self._folder.get_many(missing), strict=True))
        return [others[key] if value is None else value for key, value in zip(keys, found, strict=True)]

    def claim(self, key: str, value: bytes) -> bytes:
        try:
            winner = self._folder.claim(key, value)
        except errors.StoreLost:
            return self._claim_in_memory(key, value)
        if (fast := self._store()) is not None:
            try:
                fast.set(key, winner)  # wakes the waiters
            except errors.StoreLost:
                self._lose()
        return winner

    def _claim_in_memory(self, key: str, value: bytes) -> bytes:
        """The directory is full. A notice must still be announced; existing entries still count."""
        held, fast = self._folder.get_many([key])[0], self._store()
        if held is not None:
            return held
        if fast is None:
            raise errors.StoreLost("neither the store in memory nor the directory can be used")
        return fast.claim(key, value)

    def add(self, key: str, amount: int) -> int:
        if (fast := self._store()) is not None:
            try:
                return fast.add(key, amount)
            except errors.StoreLost:
                self._lose()
        return self._folder.add(key, amount)

    def clone(self) -> Anchored:
        fast = self._store()
        if fast is not None:
            try:
                return Anchored(fast.clone(), self._folder.clone(), self._connect, self._over)
            except errors.StoreLost:
                self._lose()
        other = Anchored(None, self._folder.clone(), self._connect, self._over)
        other._lose()
        return other

    def close(self) -> None:
        self._closed.set()
        self._folder.close()
        if self._fast is not None:
            self._fast.close()

    def _store(self) -> Store | None:
        if self._fast is None and self._back is not None:
            self._fast, self._back = self._back, None
            for key, value in self._said.items():
                with contextlib.suppress(errors.StoreLost):
                    self._fast.set(key, value)
        return self._fast

    def _look(self) -> bool:
        """Whether a rank has fallen back to the directory. The first time, repeat there what this rank has
        written."""
        now = time.monotonic()
        if not self._elsewhere and now - self._looked >= _LOOK:
            self._looked = now
            if self._folder.get_many([_FALLBACK])[0] is not None:
                self._elsewhere = True
                self._repeat()
        return self._elsewhere

    def _lose(self) -> None:
        """From here on everything goes through the directory, earlier writes included: they may not have
        arrived."""
        self._fast = None
        if self._over.is_set():
            return
        self._folder.set(_FALLBACK, b"1")
        self._repeat()
        if self._connect is not None and not self._closed.is_set():
            threading.Thread(target=self._reconnect, name="lastcall-reconnect", daemon=True).start()

    def _repeat(self) -> None:
        for key, value in list(self._said.items()):
            with contextlib.suppress(errors.StoreLost):
                self._folder.set(key, value)

    def _reconnect(self) -> None:
        assert self._connect is not None
        while not self._closed.wait(_AGAIN):
            try:
                self._back = self._connect()
                return
            except errors.LastcallError:
                continue
