"""The protocol between client and server of our own store.

A frame is a length (4 bytes), what it is (1 byte) and fields, each with a length of its own; an absent field
has the length 2**32 - 1. One request is under way on a connection at a time. SET alone is not answered.

    HELLO secret            -> ANSWER
    SET   key value
    GET   key seconds       -> ANSWER value, absent when the time is over
    MANY  key ...           -> ANSWER value ..., for as many of the keys as fit into a frame, at least one
    CLAIM key value         -> ANSWER the value that stays
    ADD   key amount        -> ANSWER sum
"""

from __future__ import annotations

import struct

HELLO, SET, GET, MANY, CLAIM, ADD, ANSWER = range(1, 8)

LONGEST_KEY = 1024
LARGEST_VALUE = 16 << 20
LARGEST_FRAME = LARGEST_VALUE + 64 * 1024
LARGEST_HELLO = 1024  # of a client that has not sent the secret

HEADER = struct.Struct(">I")
_START = struct.Struct(">IB")
_LENGTH = struct.Struct(">I")
_SECONDS = struct.Struct(">d")
_ABSENT = 0xFFFFFFFF


class Malformed(Exception):
    """The other side does not follow this protocol, or is hostile."""


def frame(what: int, *fields: bytes | None) -> bytes:
    parts = [b""]
    for field in fields:
        if field is None:
            parts.append(_LENGTH.pack(_ABSENT))
        else:
            parts += (_LENGTH.pack(len(field)), field)
    parts[0] = _START.pack(1 + sum(map(len, parts)), what)
    return b"".join(parts)


def parse(body: bytes) -> tuple[int, list[bytes | None]]:
    """What follows the length of a frame."""
    fields: list[bytes | None] = []
    at, end = 1, len(body)
    while at < end:
        if at + 4 > end:
            raise Malformed("a field's length is cut off")
        (length,) = _LENGTH.unpack_from(body, at)
        at += 4
        if length == _ABSENT:
            fields.append(None)
        elif at + length > end:
            raise Malformed("a field is longer than its frame")
        else:
            fields.append(body[at : at + length])
            at += length
    return body[0], fields


def length_of(header: bytes | bytearray, largest: int) -> int:
    """The length of a frame's body."""
    (length,) = HEADER.unpack_from(header)
    if not 1 <= length <= largest:
        raise Malformed(f"a frame of {length} bytes")
    return int(length)


def encode_key(key: str) -> bytes:
    encoded = key.encode()
    if not 1 <= len(encoded) <= LONGEST_KEY:
        raise ValueError(f"a key has 1 to {LONGEST_KEY} bytes, and {key[:40]!r} has {len(encoded)}")
    return encoded


def encode_value(value: bytes) -> bytes:
    if len(value) > LARGEST_VALUE:
        raise ValueError(f"a value has at most {LARGEST_VALUE} bytes, not {len(value)}")
    return value


def encode_seconds(seconds: float) -> bytes:
    return _SECONDS.pack(seconds)


def decode_seconds(field: bytes) -> float:
    if len(field) != _SECONDS.size:
        raise Malformed("a time that is no number")
    (seconds,) = _SECONDS.unpack(field)
    if not 0 <= seconds <= 1e9:  # not true of NaN, either
        raise Malformed(f"a time of {seconds} s")
    return float(seconds)


class Inbox:
    """Bytes as they come, frames as they become whole."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def __len__(self) -> int:
        return len(self._buffer)

    def feed(self, data: bytes) -> None:
        self._buffer += data

    def take(self, largest: int = LARGEST_FRAME) -> tuple[int, list[bytes | None]] | None:
        """The next frame, if all of it has come."""
        if len(self._buffer) < HEADER.size:
            return None
        end = HEADER.size + length_of(self._buffer, largest)
        if len(self._buffer) < end:
            return None
        body = bytes(self._buffer[HEADER.size : end])
        del self._buffer[:end]
        return parse(body)
