"""A `.pt` file that torch.load opens (weights_only and mmap included), made without torch.

The pickle and the zip are byte for byte what torch.save writes (a test compares them), the serialization id
apart: torch's zip reader can be told to compute the offsets of records instead of reading them, and relies on
torch's layout. Discarded: the standard library's pickler, which must import what it names, and its zipfile,
which cannot align records and wants their bytes before it can say where they lie.
"""

from __future__ import annotations

import hashlib
import pickle
import struct
import sys
import zlib
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

from lastcall.errors import StateError
from lastcall.formats import layouts, safetensors
from lastcall.memory import BytesSource, PageBuffer
from lastcall.types import FileLayout, Source

DTYPES: dict[str, int] = {**safetensors.DTYPES, "C128": 16}
_ALIGNMENT = 64
_PIECE = 1 << 20  # CRCs are computed through a buffer of this size
_BATCH = 1000  # items in one APPENDS or SETITEMS, as in the standard library

_STORAGES = {
    "F64": "DoubleStorage",
    "F32": "FloatStorage",
    "F16": "HalfStorage",
    "BF16": "BFloat16Storage",
    "I64": "LongStorage",
    "I32": "IntStorage",
    "I16": "ShortStorage",
    "I8": "CharStorage",
    "U8": "ByteStorage",
    "BOOL": "BoolStorage",
    "C64": "ComplexFloatStorage",
    "C128": "ComplexDoubleStorage",
}  # the others came after torch had dropped storage classes
_NAMES = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "I64": "int64",
    "I32": "int32",
    "I16": "int16",
    "I8": "int8",
    "U64": "uint64",
    "U32": "uint32",
    "U16": "uint16",
    "U8": "uint8",
    "BOOL": "bool",
    "C64": "complex64",
    "C128": "complex128",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "F8_E8M0": "float8_e8m0fnu",
    "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
}


@dataclass(frozen=True, eq=False)
class ZippedTensor:
    """A tensor over a storage. Tensors with the same Source object share it, in the file and after loading.

    Strides and offset are counted in elements; without strides the tensor is contiguous.
    """

    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...] | None
    source: Source
    requires_grad: bool = False
    parameter: bool = False
    offset: int = 0


def layout(name: str, tree: object, *, crc: bool = True) -> FileLayout:
    """The file that holds a tree of dict, OrderedDict (attributes such as a state dict's _metadata included),
    list, tuple, set, str, int, float, bool, None, bytes and Tensor. Anything else is a StateError that names
    its path.

    With `crc` every source is read once now, and must not change until the file is written; torch.load does
    not look at the checksums, zip tools do. weights_only refuses integers of more than 255 bytes.
    """
    pickled = _ProtocolTwo()
    try:
        pickled.save(tree, "")
    except RecursionError:
        raise StateError("the tree contains itself or is nested too deeply to be saved: flatten it") from None
    return archive(name, bytes(pickled.out + pickle.STOP), pickled.storages, crc=crc)


def archive(name: str, pickled: bytes, storages: Iterable[Source], *, crc: bool = True) -> FileLayout:
    """The file around an existing pickle. The storages are in the order of their keys, "0", "1" and so on."""
    records = _Archive(crc)
    records.add("data.pkl", BytesSource(pickled))
    records.add(".format_version", BytesSource(b"1"))
    records.add(".storage_alignment", BytesSource(b"%d" % _ALIGNMENT))
    records.add("byteorder", BytesSource(sys.byteorder.encode()))
    for key, source in enumerate(storages):
        records.add(f"data/{key}", source)
    records.add("version", BytesSource(b"3\n"))
    records.add(".data/serialization_id", BytesSource(records.identity()))
    return records.layout(name)


class _ProtocolTwo:
    """Protocol 2, opcode for opcode as torch.save's."""

    def __init__(self) -> None:
        self.out = bytearray(pickle.PROTO + b"\x02")
        self.storages: list[Source] = []  # their indices are their keys
        self._keys: dict[int, tuple[str, str]] = {}  # id of a source: its key and its storage class
        # id of an object, or name of a global: its index in the reader's memo
        self._memo: dict[int | str, int] = {}
        self._slots = 0
        self._alive: list[object] = []  # the id of a freed object may be reused

    def save(self, value: object, path: str) -> None:
        kind = type(value)
        if kind in _ATOMS:
            self.out += _ATOMS[kind](value)
        elif not self._recall(id(value)):
            # Exact types only: a subclass (a numpy float64 is a float) would come back as something else.
            if kind not in _SAVERS:
                raise StateError(
                    f"{path or 'the root'} is a {kind.__module__}.{kind.__qualname__}, which a .pt file "
                    "cannot hold "
                    "without code: turn it into tensors, numbers, strings, lists or dicts"
                )
            _SAVERS[kind](self, value, path)

    def _text(self, value: str, path: str) -> None:
        data = value.encode("utf-8", "surrogatepass")
        self.out += pickle.BINUNICODE + struct.pack("<I", len(data)) + data
        self._remember(value, path)

    def _bytes(self, value: bytes, path: str) -> None:
        self._global("_codecs encode")
        self.save(value.decode("latin1"), path)
        self.save("latin1", path)
        self.out += pickle.TUPLE2
        self._slot()
        self.out += pickle.REDUCE
        self._remember(value, path)

    def _tuple(self, value: tuple[object, ...], path: str) -> None:
        if len(value) > 3:
            self.out += pickle.MARK
        for index, item in enumerate(value):
            self.save(item, f"{path}[{index}]")
        self.out += _tuple_end(len(value))
        if value:
            self._remember(value, path)

    def _list(self, value: Sequence[object], path: str) -> None:
        self.out += pickle.EMPTY_LIST
        self._remember(value, path)
        if len(value) == 1:
            self.save(value[0], f"{path}[0]")
            self.out += pickle.APPEND
            return
        for start in range(0, len(value), _BATCH):
            self.out += pickle.MARK
            for index, item in enumerate(value[start : start + _BATCH], start):
                self.save(item, f"{path}[{index}]")
            self.out += pickle.APPENDS

    def _set(self, value: Iterable[object], path: str) -> None:
        self._global("__builtin__ set")
        self._list([*value], path)
        self.out += pickle.TUPLE1
        self._slot()
        self.out += pickle.REDUCE
        self._remember(value, path)

    def _dict(self, value: Mapping[Any, object], path: str) -> None:
        self.out += pickle.EMPTY_DICT
        self._remember(value, path)
        self._items(value, path)

    def _ordered(self, value: OrderedDict[object, object], path: str) -> None:
        self._global("collections OrderedDict")
        self.out += pickle.EMPTY_TUPLE + pickle.REDUCE
        self._remember(value, path)
        self._items(value, path)
        if attributes := vars(value):
            self._dict(attributes, f"{path}.__dict__")
            self.out += pickle.BUILD

    def _items(self, value: Mapping[Any, object], path: str) -> None:
        items = iter(value.items())
        while batch := [*islice(items, _BATCH)]:
            if len(value) > 1:
                self.out += pickle.MARK
            for key, item in batch:
                where = f"{path}[{key!r}]"
                self.save(key, where)
                self.save(item, where)
            self.out += pickle.SETITEMS if len(value) > 1 else pickle.SETITEM

    def _tensor(self, tensor: ZippedTensor, path: str) -> None:
        _check_bounds(tensor, path)
        if tensor.parameter:
            self._global("torch._utils _rebuild_parameter")
            self._rebuild(tensor, requires_grad=False)
            self._slot()
            self.out += pickle.NEWTRUE if tensor.requires_grad else pickle.NEWFALSE
            self._no_hooks()
            self.out += pickle.TUPLE3
            self._slot()
            self.out += pickle.REDUCE
        else:
            self._rebuild(tensor, tensor.requires_grad)
        self._remember(tensor, path)

    def _rebuild(self, tensor: ZippedTensor, requires_grad: bool) -> None:
        storage = self._storage_class(tensor)
        typed = storage != _UNTYPED
        self._global("torch._utils _rebuild_tensor_v2" if typed else "torch._utils _rebuild_tensor_v3")
        self.out += pickle.MARK
        self._storage(tensor.source, storage, DTYPES[tensor.dtype] if typed else 1)
        self.out += _integer(tensor.offset)
        self._integers(tensor.shape)
        self._integers(_contiguous(tensor.shape) if tensor.strides is None else tensor.strides)
        self.out += pickle.NEWTRUE if requires_grad else pickle.NEWFALSE
        self._no_hooks()
        if not typed:
            self._global(f"torch {_NAMES[tensor.dtype]}")
        self.out += pickle.TUPLE
        self._slot()
        self.out += pickle.REDUCE

    def _storage_class(self, tensor: ZippedTensor) -> str:
        """Untyped where the dtype has no class, and for a second dtype over one storage (torch.save refuses
        those): the reader keeps the storage it made first, and a tensor over an untyped one names its own
        dtype."""
        own = _STORAGES.get(tensor.dtype)
        storage = _UNTYPED if own is None or tensor.source.nbytes % DTYPES[tensor.dtype] else f"torch {own}"
        if id(tensor.source) not in self._keys:
            self._keys[id(tensor.source)] = (str(len(self.storages)), storage)
            self.storages.append(tensor.source)
        return storage if storage == self._keys[id(tensor.source)][1] else _UNTYPED

    def _storage(self, source: Source, storage: str, itemsize: int) -> None:
        self.out += pickle.MARK
        self.save("storage", "")
        self._global(storage)
        self.save(self._keys[id(source)][0], "")
        self.save("cpu", "")
        self.out += _integer(source.nbytes // itemsize) + pickle.TUPLE
        self._slot()
        self.out += pickle.BINPERSID

    def _integers(self, values: Sequence[int]) -> None:
        if len(values) > 3:
            self.out += pickle.MARK
        self.out += b"".join(map(_integer, values)) + _tuple_end(len(values))
        if values:
            self._slot()

    def _no_hooks(self) -> None:
        self._global("collections OrderedDict")
        self.out += pickle.EMPTY_TUPLE + pickle.REDUCE
        self._slot()

    def _global(self, name: str) -> None:
        if not self._recall(name):
            self.out += pickle.GLOBAL + name.replace(" ", "\n").encode() + b"\n"
            self._memo[name] = self._slots
            self._slot()

    def _recall(self, key: int | str) -> bool:
        slot = self._memo.get(key)
        if slot is not None:
            self.out += (
                pickle.BINGET + bytes((slot,)) if slot < 256 else pickle.LONG_BINGET + struct.pack("<I", slot)
            )
        return slot is not None

    def _remember(self, value: object, path: str) -> None:
        if id(value) in self._memo:
            raise StateError(
                f"{path or 'the root'} is a {type(value).__name__} that contains itself and cannot be saved"
            )
        self._memo[id(value)] = self._slots
        self._alive.append(value)
        self._slot()

    def _slot(self) -> None:
        slot = self._slots
        self.out += (
            pickle.BINPUT + bytes((slot,)) if slot < 256 else pickle.LONG_BINPUT + struct.pack("<I", slot)
        )
        self._slots += 1


_UNTYPED = "torch.storage UntypedStorage"


def _integer(value: int) -> bytes:
    if 0 <= value < 256:
        return pickle.BININT1 + bytes((value,))
    if 0 <= value < 65536:
        return pickle.BININT2 + struct.pack("<H", value)
    if -(2**31) <= value < 2**31:
        return pickle.BININT + struct.pack("<i", value)
    data = pickle.encode_long(value)
    if len(data) < 256:
        return pickle.LONG1 + bytes((len(data),)) + data
    return pickle.LONG4 + struct.pack("<i", len(data)) + data


def _tuple_end(length: int) -> bytes:
    ends = (pickle.EMPTY_TUPLE, pickle.TUPLE1, pickle.TUPLE2, pickle.TUPLE3)
    return ends[length] if length < len(ends) else pickle.TUPLE


_ATOMS: dict[type, Callable[[Any], bytes]] = {
    type(None): lambda value: pickle.NONE,
    bool: lambda value: pickle.NEWTRUE if value else pickle.NEWFALSE,
    int: _integer,
    float: lambda value: pickle.BINFLOAT + struct.pack(">d", value),
}
_SAVERS: dict[type, Callable[[_ProtocolTwo, Any, str], None]] = {
    str: _ProtocolTwo._text,
    bytes: _ProtocolTwo._bytes,
    tuple: _ProtocolTwo._tuple,
    list: _ProtocolTwo._list,
    set: _ProtocolTwo._set,
    dict: _ProtocolTwo._dict,
    OrderedDict: _ProtocolTwo._ordered,
    ZippedTensor: _ProtocolTwo._tensor,
}


def _contiguous(shape: Sequence[int]) -> tuple[int, ...]:
    strides = [1]
    for size in reversed(shape[1:]):
        strides.append(strides[-1] * max(size, 1))
    return tuple(reversed(strides)) if shape else ()


def _check_bounds(tensor: ZippedTensor, path: str) -> None:
    if tensor.dtype not in DTYPES:
        raise StateError(
            f"{path or 'the root'} has dtype {tensor.dtype!r}, a .pt file holds one of {', '.join(DTYPES)}"
        )
    strides = _contiguous(tensor.shape) if tensor.strides is None else tensor.strides
    assert len(strides) == len(tensor.shape), f"{path}: shape {tensor.shape} with strides {strides}"
    if 0 not in tensor.shape:
        last = tensor.offset + sum(
            (size - 1) * stride for size, stride in zip(tensor.shape, strides, strict=True)
        )
        needed = (last + 1) * DTYPES[tensor.dtype]
        assert tensor.source.nbytes >= needed, (
            f"{path}: {tensor.source.nbytes} bytes, the tensor reaches to {needed}"
        )


_LIMIT = 0xFFFFFFFF  # from here on a number is in the zip64 fields
_UTF8, _DESCRIPTOR = 0x0800, 0x0008


class _Archive:
    """A zip as torch writes it: stored, sizes and CRC after the data, the data aligned through the extra
    field."""

    def __init__(self, crc: bool) -> None:
        self._buffer = PageBuffer(_PIECE) if crc else None
        self._pieces = layouts.Pieces()
        self._directory = bytearray()
        self._count = 0

    def add(self, record: str, source: Source) -> None:
        path = f"archive/{record}".encode()
        start, size, crc = self._pieces.size, source.nbytes, self._crc(source)
        flags = _UTF8 | _DESCRIPTOR if size else _UTF8
        # As in torch: before the data the compressed size is 0, and the offset is there though zip has no use
        # for it.
        extra = _zip64(*((size, 0) if size >= _LIMIT else ()), *((start,) if start >= _LIMIT else ()))
        begin = start + 30 + len(path) + len(extra) + 4
        padding = -begin % _ALIGNMENT
        lengths = len(path), len(extra) + 4 + padding
        self._pieces.write(struct.pack("<4s5H3I2H", b"PK\3\4", 0, flags, 0, 0, 0, 0, 0, 0, *lengths))
        self._pieces.write(path + extra + b"FB" + struct.pack("<H", padding) + b"Z" * padding)
        self._pieces.add(source)
        if size:
            self._pieces.write(struct.pack("<4sI2Q" if extra else "<4sI2I", b"PK\7\10", crc, size, size))
        extra = _zip64(*((size, size) if size >= _LIMIT else ()), *((start,) if start >= _LIMIT else ()))
        stored = min(size, _LIMIT)
        self._directory += struct.pack(
            "<4s6H3I2H", b"PK\1\2", 0, 0, flags, 0, 0, 0, crc, stored, stored, len(path), len(extra)
        )
        self._directory += struct.pack("<3H2I", 0, 0, 0, 0, min(start, _LIMIT)) + path + extra
        self._count += 1

    def identity(self) -> bytes:
        """40 digits over the names, sizes and CRCs so far. torch only logs them; equal states give equal
        files."""
        digest = hashlib.blake2b(self._directory, digest_size=16).digest()
        return b"%040d" % int.from_bytes(digest)

    def layout(self, name: str) -> FileLayout:
        start, size, count = self._pieces.size, len(self._directory), self._count
        self._pieces.write(self._directory)
        end = self._pieces.size
        self._pieces.write(
            struct.pack("<4sQ2H2I4Q", b"PK\6\6", 44, 0x031E, 45, 0, 0, count, count, size, start)
        )
        self._pieces.write(struct.pack("<4sIQI", b"PK\6\7", 0, end, 1))
        short = min(count, 0xFFFF)
        sizes = min(size, _LIMIT), min(start, _LIMIT)
        self._pieces.write(struct.pack("<4s4H2IH", b"PK\5\6", 0, 0, short, short, *sizes, 0))
        return self._pieces.layout(name)

    def _crc(self, source: Source) -> int:
        crc = 0
        if self._buffer is not None:
            for offset in range(0, source.nbytes, _PIECE):
                nbytes = min(_PIECE, source.nbytes - offset)
                source.read_into(self._buffer.address, offset, nbytes)
                crc = zlib.crc32(self._buffer.view[:nbytes], crc)
        return crc


def _zip64(*values: int) -> bytes:
    return struct.pack(f"<2H{len(values)}Q", 1, 8 * len(values), *values) if values else b""
