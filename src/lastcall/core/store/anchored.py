"""The store that the ranks use: fast through memory, anchored in the directory that the checkpoints go to.

Every claim is made in the directory, where the commit is made too: so there is one register even when some ranks can reach the
store in memory and others cannot (a cut link), and whoever cannot reach the directory could not save anyway. Everything else goes
through memory, and through the directory from the moment that memory is lost. A healthy run touches the directory only when it
decides something.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence

from lastcall import errors
from lastcall.core.store import Store
from lastcall.core.store.folder import FolderStore

_FALLBACK = "fallback"  # there once a rank has lost the store in memory: from then on the others look here, too
_LOOK = 1.0  # seconds between two looks into the directory once somebody is there
_GLANCE = 5.0  # ... before that: a rank that is cut off can say so nowhere else, and must be heard within the grace


class Anchored:
    def __init__(self, fast: Store, folder: FolderStore) -> None:
        self._fast: Store | None = fast
        self._origin = fast
        self._folder = folder
        self._unconfirmed: dict[str, bytes] = {}  # set() does not say whether it arrived

    @property
    def lost(self) -> bool:
        return self._fast is None

    def set(self, key: str, value: bytes) -> None:
        if self._fast is not None:
            try:
                self._fast.set(key, value)
                self._unconfirmed[key] = value
                return
            except errors.StoreLost:
                self._lose()
        self._folder.set(key, value)

    def get(self, key: str, timeout: float) -> bytes | None:
        until = time.monotonic() + timeout
        while self._fast is not None:
            elsewhere = self._elsewhere()
            if elsewhere and (found := self._folder.get_many([key])[0]) is not None:
                return found
            left = until - time.monotonic()
            try:
                found = self._fast.get(key, max(0.0, min(left, _LOOK if elsewhere else _GLANCE)))
                self._unconfirmed.clear()
            except errors.StoreLost:
                self._lose()
                break
            if found is None:
                (found,) = self._folder.get_many([key])
            if found is not None or time.monotonic() >= until:
                return found
        return self._folder.get(key, max(0.0, until - time.monotonic()))

    def get_many(self, keys: Sequence[str]) -> list[bytes | None]:
        found: list[bytes | None] = [None] * len(keys)
        if self._fast is not None:
            try:
                found = self._fast.get_many(keys)
                self._unconfirmed.clear()
            except errors.StoreLost:
                self._lose()
        if self._fast is not None and not self._elsewhere():
            return found
        missing = [key for key, value in zip(keys, found, strict=True) if value is None]
        others = dict(zip(missing, self._folder.get_many(missing), strict=True))
        return [others[key] if value is None else value for key, value in zip(keys, found, strict=True)]

    def claim(self, key: str, value: bytes) -> bytes:
        winner = self._folder.claim(key, value)
        if self._fast is not None:
            try:
                self._fast.set(key, winner)  # wakes those who wait
                self._unconfirmed[key] = winner
            except errors.StoreLost:
                self._lose()
        return winner

    def add(self, key: str, amount: int) -> int:
        if self._fast is not None:
            try:
                total = self._fast.add(key, amount)
                self._unconfirmed.clear()
                return total
            except errors.StoreLost:
                self._lose()
        return self._folder.add(key, amount)

    def clone(self) -> Anchored:
        try:
            return Anchored(self._origin.clone(), self._folder.clone())
        except errors.StoreLost:
            other = Anchored(self._origin, self._folder.clone())
            other._lose()
            return other

    def close(self) -> None:
        self._folder.close()
        if self._fast is not None:
            self._fast.close()

    def _elsewhere(self) -> bool:
        return self._folder.get_many([_FALLBACK])[0] is not None

    def _lose(self) -> None:
        """From here on everything goes through the directory, what may not have arrived included."""
        self._fast = None
        self._folder.set(_FALLBACK, b"1")
        for key, value in self._unconfirmed.items():
            with contextlib.suppress(errors.StoreLost):
                self._folder.set(key, value)
        self._unconfirmed = {}
