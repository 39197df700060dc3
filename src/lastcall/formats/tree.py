"""JSON-like values with their exact types, as a JSON document and back; and a fast copy of them.

What JSON supports stays unchanged; all else becomes an object with the key "$", which names its type: `(1,
2)` is `{"$": "tuple", "items": [1, 2]}`. A document survives any JSON writer that keeps the order of keys.
Types are compared exactly: a subclass may hold more than its parent, so it goes to `foreign`, as does
everything not named here. Values form a tree: a value that is referenced twice is restored as two equal
values, and a cycle is refused.

Discarded: pickle (runs code when loaded), JSON's own NaN and long integers (most readers refuse or round
them, and Python refuses more than 4300 digits), lone surrogates in JSON text (two of them merge into one
character when read).
"""

from __future__ import annotations

import base64
import collections
import datetime
import enum
import io
import json
import math
import pathlib
import re
import reprlib
import struct
import types
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NoReturn

from lastcall import errors

TAG = "$"
# json.loads stops at 1000; a level here can be three levels there, and the caller needs some as well
MAX_DEPTH = 100

Foreign = Callable[[object, str], object]
ForeignTag = Callable[[dict[str, object]], object]
Leaf = Callable[[object], object]

_EXACT = 2**53  # readers that store numbers as doubles round integers beyond it
_HEX = re.compile(r"-?0x[0-9a-f]+")
_FACTORIES: dict[str, type] = {"int": int, "list": list, "dict": dict, "set": set, "float": float, "str": str}


def encode(value: object, path: str, foreign: Foreign) -> object:
    """The JSON document of a value. Errors call it `path`; `foreign` encodes or refuses what is not
    native."""
    try:
        return _TreeEncoder(foreign).value(value, path)
    except RecursionError:
        raise errors.StateError(_too_deep(path)) from None


def decode(document: object, foreign: ForeignTag) -> object:
    """The value of a document. Runs no code but `foreign`, which gets every object whose tag is not
    native."""
    try:
        return _Decoder(foreign).value(document)
    except RecursionError:
        raise errors.CheckpointError(_HOSTILE_DEPTH) from None


def copy(value: Any, leaf: Leaf | None = None) -> Any:
    """A copy with new containers. Leaves other than Python's immutable ones are passed to `leaf`, or kept.

    Called at every boundary, so a container of only numbers and text is copied without checking each.
    """
    copier = _COPIERS.get(type(value))
    if copier is None:
        return value if leaf is None or type(value) in _IMMUTABLE else leaf(value)
    try:
        return copier(value, leaf)
    except RecursionError:
        raise errors.StateError("the state contains itself or is nested too deeply to be saved") from None


def refuse(value: object, path: str) -> NoReturn:
    """The `foreign` of encode() that accepts nothing: says what cannot be saved, where it is, and what to
    do."""
    what, remedy = _describe(value)
    raise errors.StateError(f"{path}: {what} cannot be saved. {remedy}")


def refuse_tag(document: dict[str, object]) -> NoReturn:
    """The `foreign` of decode() that accepts nothing."""
    raise errors.CheckpointError(
        f"the state document holds a value of the unknown kind {reprlib.repr(document.get(TAG))}"
    )


def _describe(value: object) -> tuple[str, str]:
    kind = type(value)
    name = kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
    again = "Leave it out of the state and create it again when the script starts."
    if isinstance(value, types.FunctionType | types.MethodType | types.BuiltinFunctionType):
        return "a function", again
    if isinstance(value, type | types.ModuleType):
        return "a class" if isinstance(value, type) else "a module", again
    if isinstance(value, io.IOBase):  # before iterators: a file is one, of its lines
        return f"a file ({name})", "Save its content (bytes or text), or its path."
    if isinstance(value, Iterator):
        return (
            f"an iterator ({name})",
            "Its position is not visible in Python. Save a number to restart from.",
        )
    if isinstance(value, enum.Enum):
        return f"an enum member ({name})", "Save its .value, and look the member up again after the restore."
    if isinstance(value, tuple) and hasattr(kind, "_fields"):
        return f"a named tuple ({name})", "Save tuple(value) or value._asdict() instead."
    if isinstance(value, list | tuple | dict | set | frozenset | str | bytes | int | float):
        base = next(parent for parent in kind.__mro__ if parent.__module__ == "builtins")
        return f"a subclass of {base.__name__} ({name})", f"Save {base.__name__}(value) instead."
    if hasattr(kind, "__iter__") and hasattr(kind, "__len__"):  # a wrapper around a loader
        return (
            f"a value of type {name}",
            "Leave it out, and loop over run.batches(...) of it, which follows it; or give it "
            "state_dict() and load_state_dict().",
        )
    return (
        f"a value of type {name}",
        "Give it state_dict() and load_state_dict(), or save the numbers, text, lists and dicts that it "
        "consists of.",
    )


def _too_deep(path: str) -> str:
    return (
        f"{path}: nested more than {MAX_DEPTH} levels deep, which cannot be saved. Use a flatter structure."
    )


class _TreeEncoder:
    def __init__(self, foreign: Foreign) -> None:
        self.foreign = foreign
        self.ancestors: set[int] = set()  # ids of the containers around the current value

    def value(self, value: object, path: str) -> object:
        kind = type(value)
        if kind in _LEAF_ENCODERS:
            return _LEAF_ENCODERS[kind](value)
        branch = _BRANCH_ENCODERS.get(kind)
        if branch is None:
            return self.foreign(value, path)
        if id(value) in self.ancestors:
            raise errors.StateError(
                f"{path}: contains itself, which cannot be saved. Remove the reference back to it."
            )
        if len(self.ancestors) >= MAX_DEPTH:
            raise errors.StateError(_too_deep(path))
        self.ancestors.add(id(value))
        try:
            return branch(self, value, path)
        finally:
            self.ancestors.discard(id(value))

    def items(self, values: Iterable[object], path: str) -> list[object]:
        return [self.value(value, f"{path}[{index}]") for index, value in enumerate(values)]

    def members(self, values: Iterable[object], path: str) -> list[object]:
        """The members of a set in an order that does not depend on this process's hash seed."""
        members = [(value, self.value(value, f"{path}{{{_shown(value)}}}")) for value in values]
        if {type(value) for value, _ in members} in ({int}, {str}, {bytes}):
            members.sort(key=lambda pair: pair[0])  # type: ignore[arg-type, return-value]
        else:
            members.sort(key=lambda pair: json.dumps(pair[1], sort_keys=True))
        return [encoded for _, encoded in members]

    def pairs(self, value: dict[object, object], path: str) -> list[object]:
        return [
            [self.value(key, f"{path} key {_shown(key)}"), self.value(item, f"{path}[{_shown(key)}]")]
            for key, item in value.items()
        ]

    def mapping(self, value: dict[object, object], path: str) -> object:
        if all(type(key) is str and not key.startswith(TAG) and _clean(key) for key in value):
            return {key: self.value(item, f"{path}[{_shown(key)}]") for key, item in value.items()}
        return {TAG: "dict", "pairs": self.pairs(value, path)}

    def attributed(self, value: dict[object, object], path: str) -> object:
        """OrderedDict and Counter can carry attributes; torch keeps a module's versions in `_metadata` of its
        state."""
        for name in vars(value):
            if hasattr(type(value), name):
                raise errors.StateError(
                    f"{path}.{name}: hides a method and cannot be saved. Use another name."
                )
        document: dict[str, object] = {TAG: type(value).__name__, "pairs": self.pairs(value, path)}
        if vars(value):
            document["attributes"] = {
                name: self.value(item, f"{path}.{name}") for name, item in vars(value).items()
            }
        return document

    def defaulting(self, value: collections.defaultdict[object, object], path: str) -> object:
        factory = value.default_factory
        name = next((name for name, known in _FACTORIES.items() if known is factory), None)
        if factory is not None and name is None:
            raise errors.StateError(
                f"{path}: a defaultdict that makes its values with {factory!r} cannot be saved. "
                f"Use one of {', '.join(_FACTORIES)} or None as its default_factory, or save dict(value)."
            )
        return {TAG: "defaultdict", "factory": name, "pairs": self.pairs(value, path)}

    def deque(self, value: collections.deque[object], path: str) -> object:
        return {TAG: "deque", "items": self.items(value, path), "maxlen": value.maxlen}

    def slice(self, value: slice, path: str) -> object:
        return {TAG: "slice", "items": self.items((value.start, value.stop, value.step), path)}

    def moment(self, value: datetime.datetime, path: str) -> object:
        if value.tzinfo is not None and type(value.tzinfo) is not datetime.timezone:
            refuse(value, path)  # a time zone's rules change; its name is not in the text
        return {TAG: "datetime", "v": value.isoformat(), "fold": value.fold}


def _shown(key: object) -> str:
    try:
        return repr(key)
    except ValueError:  # Python prints no integer of more than 4300 digits
        return hex(key) if isinstance(key, int) else f"<{type(key).__name__} of huge numbers>"


def _clean(text: str) -> bool:
    """Whether text contains no surrogates, so that JSON can hold it unchanged."""
    if text.isascii():
        return True
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _base64(data: bytes | bytearray) -> str:
    return base64.b64encode(data).decode("ascii")


def _encode_text(value: str) -> object:
    return value if _clean(value) else {TAG: "str", "base64": _base64(value.encode("utf-8", "surrogatepass"))}


def _encode_int(value: int) -> object:
    return value if -_EXACT <= value <= _EXACT else {TAG: "int", "hex": hex(value)}


def _encode_float(value: float) -> object:
    # a nan's bits, too
    return value if math.isfinite(value) else {TAG: "float", "hex": struct.pack(">d", value).hex()}


def _encode_complex(value: complex) -> object:
    return {TAG: "complex", "items": [_encode_float(value.real), _encode_float(value.imag)]}


def _encode_range(value: range) -> object:
    return {
        TAG: "range",
        "items": [_encode_int(value.start), _encode_int(value.stop), _encode_int(value.step)],
    }


def _encode_timedelta(value: datetime.timedelta) -> object:
    return {TAG: "timedelta", "items": [value.days, value.seconds, value.microseconds]}


_PATHS: dict[type, str] = {type(pathlib.Path()): "path", pathlib.PurePosixPath: "purepath"}
_LEAF_ENCODERS: dict[type, Callable[[Any], object]] = {
    type(None): lambda value: value,
    bool: lambda value: value,
    int: _encode_int,
    float: _encode_float,
    str: _encode_text,
    bytes: lambda value: {TAG: "bytes", "base64": _base64(value)},
    bytearray: lambda value: {TAG: "bytearray", "base64": _base64(value)},
    complex: _encode_complex,
    range: _encode_range,
    datetime.date: lambda value: {TAG: "date", "v": value.isoformat()},
    datetime.timedelta: _encode_timedelta,
    **{kind: lambda value: {TAG: _PATHS[type(value)], "v": _encode_text(str(value))} for kind in _PATHS},
}
_BRANCH_ENCODERS: dict[type, Callable[[_TreeEncoder, Any, str], object]] = {
    list: _TreeEncoder.items,
    tuple: lambda encoder, value, path: {TAG: "tuple", "items": encoder.items(value, path)},
    set: lambda encoder, value, path: {TAG: "set", "items": encoder.members(value, path)},
    frozenset: lambda encoder, value, path: {TAG: "frozenset", "items": encoder.members(value, path)},
    dict: _TreeEncoder.mapping,
    collections.OrderedDict: _TreeEncoder.attributed,
    collections.Counter: _TreeEncoder.attributed,
    collections.defaultdict: _TreeEncoder.defaulting,
    collections.deque: _TreeEncoder.deque,
    slice: _TreeEncoder.slice,
    datetime.datetime: _TreeEncoder.moment,
}


class _Decoder:
    """Trusts nothing: each part of an object is taken by name and type, and extra parts are refused."""

    def __init__(self, foreign: ForeignTag) -> None:
        self.foreign = foreign
        self.depth = 0

    def value(self, document: object) -> object:
        if type(document) in _JSON_LEAVES:
            return document
        if self.depth > MAX_DEPTH + 2:  # a complex number of infinities is a leaf, but two objects deep
            raise errors.CheckpointError(_HOSTILE_DEPTH)
        self.depth += 1
        try:
            if isinstance(document, list):
                return [self.value(item) for item in document]
            if isinstance(document, dict):
                return self.tagged(document) if TAG in document else self.mapping(document)
        finally:
            self.depth -= 1
        raise errors.CheckpointError(
            f"the state document holds a {type(document).__name__}, which JSON does not have"
        )

    def mapping(self, document: dict[str, object]) -> object:
        if any(type(key) is not str or key.startswith(TAG) for key in document):
            raise errors.CheckpointError(
                f"the state document holds a wrong key among {reprlib.repr(list(document))}"
            )
        return {key: self.value(item) for key, item in document.items()}

    def tagged(self, document: dict[str, object]) -> object:
        tag = document[TAG]
        decoder = _TAG_DECODERS.get(tag) if isinstance(tag, str) else None
        if decoder is None:
            return self.foreign(document)
        parts = {key: item for key, item in document.items() if key != TAG}
        try:
            value = decoder(self, parts)
        except errors.LastcallError:
            raise
        except (ValueError, TypeError, OverflowError, struct.error) as error:
            raise errors.CheckpointError(f"the state document holds a broken {tag}: {error}") from error
        if parts:
            raise errors.CheckpointError(
                f"the state document holds a {tag} with unknown parts {reprlib.repr(parts)}"
            )
        return value

    def items(self, parts: dict[str, object]) -> list[object]:
        return [self.value(item) for item in _take(parts, "items", list)]

    def members(self, parts: dict[str, object]) -> set[object]:
        items = self.items(parts)
        members = set(items)
        if len(members) != len(items):
            raise ValueError("a member is in it twice")
        return members

    def pairs(self, parts: dict[str, object]) -> dict[object, object]:
        pairs = _take(parts, "pairs", list)
        if any(type(pair) is not list or len(pair) != 2 for pair in pairs):
            raise ValueError("a pair is not a pair")
        result = {self.value(key): self.value(item) for key, item in pairs}
        if len(result) != len(pairs):
            raise ValueError("a key is in it twice")
        return result

    def ordered(self, parts: dict[str, object]) -> object:
        return self.attributed(collections.OrderedDict(self.pairs(parts)), parts)

    def counter(self, parts: dict[str, object]) -> object:
        value: Any = collections.Counter()
        dict.update(value, self.pairs(parts))  # Counter.update() would add, and refuse non-numbers
        return self.attributed(value, parts)

    def attributed(self, value: object, parts: dict[str, object]) -> object:
        if "attributes" in parts:
            for name, item in _take(parts, "attributes", dict).items():
                # must not hide a method such as items()
                if type(name) is not str or hasattr(type(value), name):
                    raise ValueError(f"it has no place for the attribute {name!r}")
                vars(value)[name] = self.value(item)
        return value

    def defaulting(self, parts: dict[str, object]) -> object:
        name = _take(parts, "factory", str, type(None))
        if name is not None and name not in _FACTORIES:
            raise ValueError(f"unknown factory {name!r}")
        return collections.defaultdict(None if name is None else _FACTORIES[name], self.pairs(parts))

    def deque(self, parts: dict[str, object]) -> object:
        maxlen, items = _take(parts, "maxlen", int, type(None)), self.items(parts)
        if maxlen is not None and maxlen < len(items):
            raise ValueError("it is longer than its maxlen")
        return collections.deque(items, maxlen)

    def path(self, parts: dict[str, object], kind: type[pathlib.PurePath]) -> pathlib.PurePath:
        text = self.value(parts.pop("v", None))
        if type(text) is not str:
            raise ValueError("it is no text")
        return kind(text)

    def exactly(self, parts: dict[str, object], count: int, kind: type | None = None) -> list[Any]:
        items = self.items(parts)
        if len(items) != count or any(type(item) is not kind for item in items if kind):
            raise ValueError(f"it does not have {count} parts of the right kind")
        return items


def _take(parts: dict[str, object], name: str, *kinds: type) -> Any:
    value = parts.pop(name, parts)
    if type(value) not in kinds or value is parts:
        raise ValueError(f"its part {name!r} is missing or wrong")
    return value


def _unbase64(parts: dict[str, object]) -> bytes:
    return base64.b64decode(_take(parts, "base64", str), validate=True)


def _decode_int(_: _Decoder, parts: dict[str, object]) -> int:
    text = _take(parts, "hex", str)
    if not _HEX.fullmatch(text):
        raise ValueError("it is not hexadecimal")
    return int(text, 16)


def _decode_float(_: _Decoder, parts: dict[str, object]) -> object:
    return struct.unpack(">d", bytes.fromhex(_take(parts, "hex", str)))[0]


_JSON_LEAVES = frozenset({type(None), bool, int, float, str})
_HOSTILE_DEPTH = "the state document is nested too deeply to have been written by lastcall"
_TAG_DECODERS: dict[str, Callable[[_Decoder, dict[str, object]], object]] = {
    "int": _decode_int,
    "float": _decode_float,
    "str": lambda _, parts: _unbase64(parts).decode("utf-8", "surrogatepass"),
    "bytes": lambda _, parts: _unbase64(parts),
    "bytearray": lambda _, parts: bytearray(_unbase64(parts)),
    "complex": lambda decoder, parts: complex(*decoder.exactly(parts, 2, float)),
    "range": lambda decoder, parts: range(*decoder.exactly(parts, 3, int)),
    "slice": lambda decoder, parts: slice(*decoder.exactly(parts, 3)),
    "tuple": lambda decoder, parts: tuple(decoder.items(parts)),
    "set": _Decoder.members,
    "frozenset": lambda decoder, parts: frozenset(decoder.members(parts)),
    "dict": _Decoder.pairs,
    "OrderedDict": _Decoder.ordered,
    "Counter": _Decoder.counter,
    "defaultdict": _Decoder.defaulting,
    "deque": _Decoder.deque,
    "path": lambda decoder, parts: decoder.path(parts, pathlib.Path),
    "purepath": lambda decoder, parts: decoder.path(parts, pathlib.PurePosixPath),
    "date": lambda _, parts: datetime.date.fromisoformat(_take(parts, "v", str)),
    "datetime": lambda _, parts: datetime.datetime.fromisoformat(_take(parts, "v", str)).replace(
        fold=_take(parts, "fold", int)
    ),
    "timedelta": lambda decoder, parts: datetime.timedelta(*decoder.exactly(parts, 3, int)),
}


_IMMUTABLE = frozenset(
    {
        type(None),
        bool,
        int,
        float,
        str,
        bytes,
        complex,
        range,
        slice,
        datetime.date,
        datetime.datetime,
        datetime.timedelta,
        *_PATHS,
    }
)
LEAVES = _IMMUTABLE  # values without mutable parts
_flat = _IMMUTABLE.issuperset  # one call in C for a whole container


def _copies(values: Iterable[Any], leaf: Leaf | None) -> Iterator[Any]:
    return (value if type(value) in _IMMUTABLE else copy(value, leaf) for value in values)


def _copy_dict(value: dict[Any, Any], leaf: Leaf | None) -> dict[Any, Any]:
    if _flat(map(type, value.values())):
        return value.copy()
    return {key: item if type(item) in _IMMUTABLE else copy(item, leaf) for key, item in value.items()}


def _pairs(value: dict[Any, Any], leaf: Leaf | None) -> dict[Any, Any]:
    """What a subclass of dict is to be filled with: itself where it is flat, which saves a copy."""
    return value if _flat(map(type, value.values())) else _copy_dict(value, leaf)


def _copy_list(value: list[Any], leaf: Leaf | None) -> list[Any]:
    return value.copy() if _flat(map(type, value)) else list(_copies(value, leaf))


def _copy_tuple(value: tuple[Any, ...], leaf: Leaf | None) -> tuple[Any, ...]:
    return value if _flat(map(type, value)) else tuple(_copies(value, leaf))


def _copy_set(value: set[Any], leaf: Leaf | None) -> set[Any]:
    return value.copy() if _flat(map(type, value)) else set(_copies(value, leaf))


def _copy_frozenset(value: frozenset[Any], leaf: Leaf | None) -> frozenset[Any]:
    return value if _flat(map(type, value)) else frozenset(_copies(value, leaf))


def _copy_deque(value: collections.deque[Any], leaf: Leaf | None) -> collections.deque[Any]:
    return value.copy() if _flat(map(type, value)) else collections.deque(_copies(value, leaf), value.maxlen)


def _copy_ordered(
    value: collections.OrderedDict[Any, Any], leaf: Leaf | None
) -> collections.OrderedDict[Any, Any]:
    result = collections.OrderedDict(_pairs(value, leaf))
    if vars(value):
        vars(result).update(_copy_dict(vars(value), leaf))
    return result


def _copy_counter(value: collections.Counter[Any], leaf: Leaf | None) -> collections.Counter[Any]:
    result = collections.Counter.__new__(collections.Counter)  # its __init__ and copy() are slow, and count
    dict.update(result, _pairs(value, leaf))
    if vars(value):
        vars(result).update(_copy_dict(vars(value), leaf))
    return result


def _copy_defaulting(
    value: collections.defaultdict[Any, Any], leaf: Leaf | None
) -> collections.defaultdict[Any, Any]:
    return collections.defaultdict(value.default_factory, _pairs(value, leaf))


_COPIERS: dict[type, Callable[[Any, Leaf | None], Any]] = {
    dict: _copy_dict,
    list: _copy_list,
    tuple: _copy_tuple,
    set: _copy_set,
    frozenset: _copy_frozenset,
    bytearray: lambda value, _: bytearray(value),
    collections.deque: _copy_deque,
    collections.OrderedDict: _copy_ordered,
    collections.Counter: _copy_counter,
    collections.defaultdict: _copy_defaulting,
}
