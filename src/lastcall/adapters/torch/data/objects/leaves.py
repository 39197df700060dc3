"""One value that a pipeline holds (a number, a list, a small tensor, a generator, an open file) as a plain
value, and put back.

A frozen value is a tuple of text, numbers and bytes only: immutable, cheap to compare, written without
pickle. Lists, dictionaries, tensors, arrays, generators and files are put back in place, so that others who
hold them see the same.
"""

from __future__ import annotations

import array
import collections
import functools
import hashlib
import io
import random
import types
from typing import Any

import numpy as np
import torch

from lastcall.adapters.torch.data.objects import generators as rng

Frozen = tuple[Any, ...]
MISSING: Frozen = ("missing",)  # the attribute or the key was not there
LIMIT = 1 << 19  # bytes of one value
_ORDERED = 20_000  # entries of a list whose order is remembered
_LONGEST = 8192  # entries of a container that are no plain numbers
_DEPTH = 6
_PLAIN = frozenset({type(None), bool, int, str, bytes})
_SEQUENCES: dict[type, str] = {
    list: "list",
    tuple: "tuple",
    set: "set",
    frozenset: "frozenset",
    collections.deque: "deque",
}
_MAPPINGS = (dict, collections.OrderedDict, collections.defaultdict, collections.Counter)
_MADE: dict[str, Any] = {
    "list": list,
    "tuple": tuple,
    "set": set,
    "frozenset": frozenset,
    "deque": collections.deque,
}
_GENERATORS = (torch.Generator, random.Random, np.random.Generator, np.random.RandomState)
_ITERATORS: tuple[type, ...] = (type(iter([])), type(iter(())), type(iter(range(0))))
_FILES = (io.IOBase,)
_LEAVES = (torch.Tensor, np.ndarray, np.generic, *_GENERATORS, *_FILES, *_ITERATORS, types.GeneratorType)


class _TooLarge(Exception):
    pass


def is_generator(value: object) -> bool:
    return isinstance(value, _GENERATORS)


def is_leaf(value: object) -> bool:
    """Whether it is looked at as one value, and not into."""
    kind: Any = type(value)
    return kind in _PLAIN or _is_leaf(kind)


@functools.lru_cache(1024)
def _is_leaf(kind: Any) -> bool:
    return kind is float or issubclass(kind, _LEAVES)


def freeze(value: Any) -> Frozen | None:
    """None where it cannot be saved: another kind of object, or too large."""
    try:
        return _freeze(value, [LIMIT], 0)
    except (_TooLarge, OSError, ValueError, RecursionError):
        return None


def _freeze(value: Any, room: list[int], depth: int) -> Frozen | None:
    kind = type(value)
    if kind in _PLAIN:
        _spend(room, len(value) if kind in (str, bytes) else 8)
        return ("v", value)
    if kind is float:
        _spend(room, 8)
        return ("f", value.hex())
    if kind in _SEQUENCES and depth < _DEPTH:
        return _freeze_items(value, _SEQUENCES[kind], room, depth)
    if kind in _MAPPINGS and depth < _DEPTH and len(value) <= _LONGEST:
        pairs = [
            (_freeze(key, room, depth + 1), _freeze(item, room, depth + 1))
            for key, item in list(value.items())
        ]
        return None if any(None in pair for pair in pairs) else ("dict", tuple(pairs))
    return (
        _freeze_numbers(value, room)
        if isinstance(value, (torch.Tensor, np.ndarray, np.generic))
        else _freeze_other(value)
    )


def _freeze_items(value: Any, kind: str, room: list[int], depth: int) -> Frozen | None:
    _spend(room, 8 * len(value))
    if kind in ("list", "tuple") and value and type(value[0]) is int and set(map(type, value)) == {int}:
        try:
            return ("ints", kind, array.array("q", value).tobytes())
        except OverflowError:
            pass
    if len(value) > _LONGEST:
        return None
    found = []
    for item in list(value):
        frozen = _freeze(item, room, depth + 1)
        if frozen is None:
            return None
        found.append(frozen)
    if kind in ("set", "frozenset"):
        found.sort(key=repr)
    return ("items", kind, tuple(found), value.maxlen if kind == "deque" else None)


def _freeze_numbers(value: Any, room: list[int]) -> Frozen | None:
    if isinstance(value, torch.Tensor):
        if (
            type(value) is not torch.Tensor
            or value.device.type != "cpu"
            or value.layout is not torch.strided
            or value.requires_grad
        ):
            return None
        _spend(room, value.nbytes)
        raw = bytes(value.contiguous().reshape(-1).view(torch.uint8).numpy()) if value.numel() else b""
        return ("tensor", str(value.dtype)[6:], tuple(value.shape), raw)
    if value.dtype.hasobject:
        return None
    _spend(room, value.nbytes)
    return (
        "array" if isinstance(value, np.ndarray) else "number",
        value.dtype.str,
        tuple(value.shape),
        value.tobytes(),
    )


def _freeze_other(value: Any) -> Frozen | None:
    if isinstance(value, _GENERATORS):
        return ("generator", type(value).__name__, rng.take_generators((value,))[0])
    if isinstance(value, _FILES):
        return ("file", -1) if value.closed else ("file", value.tell())
    if isinstance(value, _ITERATORS):
        reduced = value.__reduce__()
        return ("at", reduced[2] if len(reduced) > 2 else -1)
    return None


def _spend(room: list[int], count: int) -> None:
    room[0] -= count
    if room[0] < 0:
        raise _TooLarge


def put(frozen: Frozen, current: Any) -> Any:
    """The value: `current` itself, changed in place, where that can be; otherwise a new one."""
    kind = frozen[0]
    if kind == "generator":
        if current is None:
            current = rng.made(frozen[1], frozen[2])  # one that is made at its first use
        if is_generator(current) and type(current).__name__ == frozen[1]:
            rng.put_generators((frozen[2],), (current,))
        return current
    if kind == "file":
        if isinstance(current, _FILES) and not current.closed and frozen[1] >= 0 and current.seekable():
            current.seek(frozen[1])
        return current
    if kind == "at":
        if isinstance(current, _ITERATORS) and frozen[1] >= 0:
            current.__setstate__(frozen[1])  # type: ignore[attr-defined]
        return current
    made = thaw(frozen)
    if type(made) is not type(current) and not (kind == "dict" and isinstance(current, dict)):
        return made
    return _in_place(made, current)


def _in_place(made: Any, current: Any) -> Any:
    if isinstance(current, list):
        current[:] = made
    elif isinstance(current, dict | set):
        current.clear()
        current.update(made)
    elif isinstance(current, collections.deque) and current.maxlen == made.maxlen:
        current.clear()
        current.extend(made)
    elif isinstance(current, torch.Tensor) and _alike(made, current) and not current.requires_grad:
        current.copy_(made)
    elif isinstance(current, np.ndarray) and _alike(made, current) and current.flags.writeable:
        current[...] = made
    else:
        return made
    return current


def _alike(made: Any, current: Any) -> bool:
    return bool(current.shape == made.shape and current.dtype == made.dtype)


def thaw(frozen: Frozen) -> Any:
    kind = frozen[0]
    if kind == "v":
        return frozen[1]
    if kind == "f":
        return float.fromhex(frozen[1])
    if kind == "ints":
        numbers = array.array("q")
        numbers.frombytes(frozen[2])
        return _MADE[frozen[1]](numbers)
    if kind == "items":
        items = [thaw(item) for item in frozen[2]]
        return collections.deque(items, frozen[3]) if frozen[1] == "deque" else _MADE[frozen[1]](items)
    if kind == "dict":
        return {thaw(key): thaw(item) for key, item in frozen[1]}
    if kind == "tensor":
        flat = (
            torch.frombuffer(bytearray(frozen[3]), dtype=torch.uint8)
            if frozen[3]
            else torch.empty(0, dtype=torch.uint8)
        )
        return flat.view(getattr(torch, frozen[1])).reshape(tuple(frozen[2]))
    numbers_in = np.frombuffer(bytearray(frozen[3]), dtype=frozen[1]).reshape(tuple(frozen[2]))
    return numbers_in if kind == "array" else numbers_in[()]


def mark(value: Any, frozen: Frozen | None) -> Any:
    """What tells that it has changed, for a value that is too large to be saved, or of another kind."""
    if frozen is not None:
        return frozen
    if isinstance(value, types.GeneratorType):
        frame = value.gi_frame
        seen = (
            {}
            if frame is None
            else {name: item for name, item in frame.f_locals.items() if type(item) in _PLAIN}
        )
        return (
            id(value),
            frame is None or frame.f_lasti,
            repr(sorted(seen.items(), key=lambda pair: pair[0])),
        )
    if isinstance(value, torch.Tensor):
        return (id(value), value._version)
    if isinstance(value, np.ndarray):
        flat = value.reshape(-1) if value.flags.contiguous else value[:0].reshape(-1)
        return (id(value), *(flat[place].tobytes() for place in _places(flat.size)))
    if type(value) in (list, collections.deque):
        return (id(value), len(value), *(id(value[place]) for place in _places(len(value))))
    return (id(value), len(value)) if type(value) in (dict, set) else id(value)


def _places(count: int) -> list[int]:
    return [count * part // 16 for part in range(16)] if count else []


def index_like(frozen: Frozen) -> bool:
    """A list of different whole numbers, as the indices of a subset are."""
    if frozen[0] == "ints":
        numbers = array.array("q")
        numbers.frombytes(frozen[2])
        found: Any = numbers
    elif (
        frozen[0] in ("tensor", "array")
        and frozen[1] in ("int64", "int32", "<i8", "<i4")
        and len(frozen[2]) == 1
    ):
        found = np.frombuffer(frozen[3], dtype="<i4" if frozen[1] in ("int32", "<i4") else "<i8").tolist()
    else:
        return False
    return 2 <= len(found) == len(set(found)) and min(found) >= 0


def order_of(value: Any) -> Frozen | None:
    """Of a list of texts, or of rows that begin with one (files and their labels): which entry is where."""
    if type(value) is not list or not 2 <= len(value) <= _ORDERED or not isinstance(value[0], str | tuple):
        return None
    if not all(
        type(item) is str or (type(item) is tuple and all(type(part) in _PLAIN for part in item))
        for item in value
    ):
        return None
    return ("order", b"".join(hashlib.blake2b(repr(item).encode(), digest_size=8).digest() for item in value))


def put_order(frozen: Frozen, current: Any) -> bool:
    """Whether `current` held the same entries in another order, and now has them in this one."""
    now = order_of(current)
    if now is None or now == frozen or len(now[1]) != len(frozen[1]):
        return False
    digests, wanted = ([raw[at : at + 8] for at in range(0, len(raw), 8)] for raw in (now[1], frozen[1]))
    if sorted(digests) != sorted(wanted):
        return False
    found = collections.defaultdict(list)
    for digest, item in zip(digests, current, strict=True):
        found[digest].append(item)
    current[:] = [found[digest].pop(0) for digest in wanted]
    return True


def advances(value: Any) -> bool:
    """Whether it is something that is read on and on, and cannot be told where it stands."""
    return isinstance(value, (types.GeneratorType, *_FILES))
