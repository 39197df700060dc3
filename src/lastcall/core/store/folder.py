"""A store in a folder that all ranks share: slow, polled, and there as long as the directory is that the checkpoints go to. What the ranks
fall back on when the store in memory is lost, and where their decisions are anchored (`anchored`)."""

from __future__ import annotations

import itertools
import os
import time
import urllib.parse
from collections.abc import Sequence
from pathlib import Path

from lastcall import errors

_POLL = 0.05
_numbers = itertools.count()


class FolderStore:
    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._closed = False

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
        return FolderStore(self._folder)

    def close(self) -> None:
        self._closed = True

    def _guarded(self, do, *arguments):  # type: ignore[no-untyped-def]
        if self._closed:
            raise errors.StoreLost("the store was closed")
        try:
            return do(*arguments)
        except OSError as error:
            raise errors.StoreLost(f"{self._folder} cannot be used: {error.strerror or error}") from error

    def _path(self, key: str) -> Path:
        return self._folder / urllib.parse.quote(key, safe="")

    def _under(self) -> Path:
        """A name of its own for what is about to get its proper one."""
        self._folder.mkdir(parents=True, exist_ok=True)
        return self._folder / f".{os.uname().nodename}-{os.getpid()}-{next(_numbers)}"

    def _set(self, key: str, value: bytes) -> None:
        under = self._under()
        under.write_bytes(value)
        os.replace(under, self._path(key))

    def _read(self, key: str) -> bytes | None:
        try:
            return self._path(key).read_bytes()
        except FileNotFoundError:
            return None

    def _claim(self, key: str, value: bytes) -> bytes:
        under = self._under()
        under.write_bytes(value)
        try:
            os.link(under, self._path(key))  # fails where the name is taken: also on network file systems
        except FileExistsError:
            return self._path(key).read_bytes()
        finally:
            under.unlink()
        return value

    def _add(self, key: str, amount: int) -> int:
        """Each addition is a claim of the next number."""
        for number in itertools.count(1):
            mine = f"{os.uname().nodename} {os.getpid()} {next(_numbers)} {amount}".encode()
            if self._claim(f"{key}+{number}", mine) == mine:
                earlier = [self._path(f"{key}+{n}").read_bytes() for n in range(1, number)]
                return amount + sum(int(one.split()[-1]) for one in earlier)
        raise AssertionError
