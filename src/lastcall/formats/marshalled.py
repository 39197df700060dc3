"""Reads the output of Python's `marshal.dumps(value, 2)` as untrusted data: numbers, text, bytes, tuples,
lists and dicts, and nothing else.

marshal is the fastest way to write small state at every step, but its own reader trusts its bytes: a crafted
one can crash the interpreter. This one is slow, and only used when a rank has died.
"""

from __future__ import annotations

import struct

VERSION = 2  # of marshal's format: the last without references
_DEEPEST = 64
_INT = struct.Struct("<i")
_LENGTH = struct.Struct("<I")
_FLOAT = struct.Struct("<d")
_CONSTANTS: dict[int, object] = {ord("N"): None, ord("T"): True, ord("F"): False}


def loads(data: bytes) -> object:
    """Raises ValueError for anything else."""
    reader = _Reader(data)
    value = reader.value(0)
    if reader.at != len(data):
        raise ValueError(f"{len(data) - reader.at} bytes too many")
    return value


class _EndOfDict(Exception):
    """The end of a dict."""


class _Reader:
    def __init__(self, data: bytes) -> None:
        self._data = data
        self.at = 0

    def value(self, depth: int) -> object:
        if depth > _DEEPEST:
            raise ValueError("nested too deep")
        kind = self._take(1)[0]
        if kind in _CONSTANTS:
            return _CONSTANTS[kind]
        match chr(kind):
            case "i":
                return _INT.unpack(self._take(4))[0]
            case "l":
                return self._long()
            case "g":
                return _FLOAT.unpack(self._take(8))[0]
            case "s":
                return self._take(self._length())
            case "u":
                return self._take(self._length()).decode("utf-8", "surrogatepass")
            case "(":
                return tuple(self.value(depth + 1) for _ in range(self._items()))
            case "[":
                return [self.value(depth + 1) for _ in range(self._items())]
            case "{":
                return self._dict(depth)
            case "0":
                raise _EndOfDict
        raise ValueError(f"byte {kind} is no kind of value")

    def _dict(self, depth: int) -> dict[object, object]:
        found: dict[object, object] = {}
        while True:
            try:
                key = self.value(depth + 1)
            except _EndOfDict:
                return found
            found[key] = self.value(depth + 1)

    def _long(self) -> int:
        """Digits of 15 bits, the number of them first, negative for a negative number."""
        (count,) = _INT.unpack(self._take(4))
        digits = struct.unpack(f"<{abs(count)}h", self._take(2 * abs(count)))
        value = sum(int(digit) << (15 * place) for place, digit in enumerate(digits))
        return -value if count < 0 else value

    def _length(self) -> int:
        return int(_LENGTH.unpack(self._take(4))[0])

    def _items(self) -> int:
        count = self._length()
        if count > len(self._data) - self.at:  # each has a byte at least
            raise ValueError(f"{count} items in {len(self._data)} bytes")
        return count

    def _take(self, count: int) -> bytes:
        if count > len(self._data) - self.at:
            raise ValueError("it is truncated")
        self.at += count
        return self._data[self.at - count : self.at]
