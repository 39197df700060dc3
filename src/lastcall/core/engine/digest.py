"""The digest over every byte: xxh3-128, which overlaps with the write for free (17 GB/s on one core, sha256
1.5).

A checkpoint records the algorithm it was written with. Where the xxhash package is missing (a bare image),
blake2b from the standard library serves, and says so in the record.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from lastcall import errors

Digest = Callable[[bytes | memoryview], str]


def _blake2b(data: bytes | memoryview) -> str:
    return hashlib.blake2b(data, digest_size=16).hexdigest()


_KNOWN: dict[str, Digest] = {"blake2b-128": _blake2b}
ALGORITHMS = ("blake2b-128", "xxh3-128")  # all known ones, whether they can be computed here or not

_state: Callable[[], Any]
try:
    import xxhash
except ImportError:
    ALGORITHM = "blake2b-128"
    _state = functools.partial(hashlib.blake2b, digest_size=16)
else:
    _KNOWN["xxh3-128"] = xxhash.xxh3_128_hexdigest
    ALGORITHM = "xxh3-128"
    _state = xxhash.xxh3_128

of: Digest = _KNOWN[ALGORITHM]


def of_pieces(pieces: Sequence[memoryview]) -> str:
    """The digest of bytes that lie in several places, as if they lay in one."""
    if len(pieces) == 1:
        return of(pieces[0])
    state = _state()
    for piece in pieces:
        state.update(piece)
    return str(state.hexdigest())


def named(algorithm: str) -> Digest:
    """The function that a record's algorithm names."""
    if algorithm in _KNOWN:
        return _KNOWN[algorithm]
    what = f"digests of the kind {algorithm!r} cannot be checked here"
    if algorithm == "xxh3-128":
        raise errors.UncheckedError(
            f"{what}: the xxhash package is missing. Install it with: pip install xxhash"
        )
    raise errors.CheckpointError(f"{what}. Was it written by a newer lastcall?")


def over(chunks: Iterable[str], function: Digest = of) -> str:
    """The digest of a file: the digest over the digests of its chunks."""
    return function("".join(chunks).encode())
