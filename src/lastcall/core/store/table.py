"""The keys and values themselves: what setting, claiming and counting mean, for the server and for the store
in memory."""

from __future__ import annotations


class Table:
    """Used by one thread at a time."""

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}

    def set(self, key: str, value: bytes) -> None:
        self._values[key] = value

    def get(self, key: str) -> bytes | None:
        return self._values.get(key)

    def claim(self, key: str, value: bytes) -> bytes:
        return self._values.setdefault(key, value)

    def add(self, key: str, amount: int) -> int:
        """A counter is kept as decimal digits, as torch's stores keep it. ValueError where the key holds
        something else."""
        total = int(self._values.get(key, b"0")) + amount
        self._values[key] = str(total).encode()
        return total

    def clear(self) -> None:
        self._values.clear()
