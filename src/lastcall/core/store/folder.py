"""A store in a folder that all ranks share: slow, polled, and as durable as the checkpoint directory. The
ranks fall back to it when the store in memory is lost, and their decisions are anchored in it
(`anchored`)."""

from __future__ import annotations

import os
import time
import urllib.parse
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import ParamSpec, TypeVar

from lastcall import errors
from lastcall.storage import files as storage

P = ParamSpec("P")
T = TypeVar("T")
_POLL = 0.05


class FolderStore:
    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._closed = False
        self._counted: dict[str, int] = {}  # the newest number of each counter that was seen

    def set(self, key: str, value: bytes) -> None:
        self._guarded(self._set, key, value)

    def get(self, key: str, timeout: float) -> bytes | None:
        until = time.monotonic() + timeout
        while (found := self._guarded(self._read, key)) is None:
            left = until - time.monotonic()
            if left <= 0:
                return None
            time.sleep(min(left, _POLL))
            if self._closed:
                raise errors.StoreLost("the store was closed")
        return found

    def get_many(self, keys: Sequence[str]) -> list[bytes | None]:
        return [self._guarded(self._read, key) for key in keys]

    def claim(self, key: str, value: bytes) -> bytes:
        return self._guarded(self._claim, key, value)

    def add(self, key: str, amount: int) -> int:
        return self._guarded(self._add, key, amount)

    def clone(self) -> FolderStore:
        if self._closed:
            raise errors.StoreLost("the store was closed")
        return FolderStore(self._folder)

    def close(self) -> None:
        self._closed = True

    def _guarded(self, do: Callable[P, T], *arguments: P.args, **named: P.kwargs) -> T:
        if self._closed:
            raise errors.StoreLost("the store was closed")
        try:
            return do(*arguments, **named)
        except OSError as error:
            raise errors.StoreLost(f"could not use {self._folder}: {error.strerror or error}") from error

    def _path(self, key: str) -> Path:
        return self._folder / urllib.parse.quote(key, safe="")

    def _set(self, key: str, value: bytes) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        storage.replace_small(self._path(key), value)

    def _read(self, key: str) -> bytes | None:
        try:
            return self._path(key).read_bytes()
        except FileNotFoundError:
            number, total = self._count(key)
            return str(total).encode() if number else None

    def _claim(self, key: str, value: bytes) -> bytes:
        self._folder.mkdir(parents=True, exist_ok=True)
        under = self._folder / f".{storage.own_name()}"
        try:
            under.write_bytes(value)
            os.link(under, self._path(key))  # fails where the name is taken: also on network file systems
        except FileExistsError:
            return self._path(key).read_bytes()
        finally:
            under.unlink(missing_ok=True)
        return value

    def _add(self, key: str, amount: int) -> int:
        """Each addition is a claim of the next number, with the sum so far: the value under a number never
        changes."""
        while True:
            number, total = self._count(key)
            mine = f"{storage.own_name()} {total + amount}".encode()
            if self._claim(f"{key}+{number + 1}", mine) == mine:
                return total + amount

    def _count(self, key: str) -> tuple[int, int]:
        """The newest number of a counter, and the sum there. No number: nothing was counted yet."""
        number = self._counted.get(key, 0)
        while self._path(f"{key}+{number + 1}").exists():
            number += 1
        if not number:
            return 0, 0
        self._counted[key] = number
        return number, int(self._path(f"{key}+{number}").read_bytes().split()[-1])
