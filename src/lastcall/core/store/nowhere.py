"""What `anchored` uses where no directory is shared by all ranks. Decisions are then made in the store in
memory, and a rank that loses it has no fallback."""

from __future__ import annotations

import time
from collections.abc import Sequence

from lastcall import errors

_REST = 0.2  # between two looks at whether the connection is back


class NullStore:
    def set(self, key: str, value: bytes) -> None:
        """Kept by `anchored`, which says it again once it is connected."""

    def get(self, key: str, timeout: float) -> bytes | None:
        time.sleep(min(timeout, _REST))
        return None

    def get_many(self, keys: Sequence[str]) -> list[bytes | None]:
        return [None] * len(keys)

    def claim(self, key: str, value: bytes) -> bytes:
        raise _lost()

    def add(self, key: str, amount: int) -> int:
        raise _lost()

    def clone(self) -> NullStore:
        return NullStore()

    def close(self) -> None:
        """There is nothing to close."""


def _lost() -> errors.StoreLost:
    return errors.StoreLost("the store in memory is lost, and the ranks share no directory")
