"""The safetensors format: eight bytes of header length, a JSON header, then the tensors without gaps.

Written here rather than with the safetensors library, which needs all tensors in host memory at once and
writes with one thread; the writer needs extents. Read here too, because a header is untrusted: all of it is
checked before an offset is used.
"""

from __future__ import annotations

import errno
import json
import math
import os
import reprlib
import stat
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from lastcall.errors import CheckpointError
from lastcall.formats import layouts
from lastcall.types import FileLayout, TensorEntry

# What safetensors 0.8 reads into torch, of the types whose elements are whole bytes. It also knows F4,
# F6_E2M3 and F6_E3M2, but several of their elements share a byte; it knows no C128. fmt: off
DTYPES: dict[str, int] = {
    "F64": 8,
    "F32": 4,
    "F16": 2,
    "BF16": 2,
    "I64": 8,
    "I32": 4,
    "I16": 2,
    "I8": 1,
    "U64": 8,
    "U32": 4,
    "U16": 2,
    "U8": 1,
    "BOOL": 1,
    "C64": 8,
    "F8_E4M3": 1,
    "F8_E5M2": 1,
    "F8_E8M0": 1,
    "F8_E4M3FNUZ": 1,
    "F8_E5M2FNUZ": 1,
}
# fmt: on
PAGE = 4096
# the data starts this far into a page, like large tensors in torch's allocator, so that they can be written
# in place
PHASE = 64
SECTOR = 512
MAX_HEADER = 100_000_000  # the safetensors library refuses a longer one
_METADATA = "__metadata__"
_FIELDS = {"dtype", "shape", "data_offsets"}
_MAX_ELEMENTS = 2**63 - 1


@dataclass(frozen=True)
class Stored:
    """A tensor in a file. The offsets are those of the file, not of its data part."""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


def layout(
    name: str, entries: Sequence[TensorEntry], metadata: Mapping[str, str] | None = None
) -> FileLayout:
    """The file that holds these tensors. Those of whole sectors come first, since the ones behind them then
    lie on the same phase; then wide types first, so that each tensor lies at a multiple of its element
    size."""
    header: dict[str, object] = {_METADATA: dict(metadata)} if metadata else {}
    for entry in entries:
        if entry.dtype not in DTYPES:
            raise ValueError(
                f"{entry.name!r} has dtype {entry.dtype!r}, which safetensors lacks; it has "
                f"{', '.join(DTYPES)}"
            )
    ordered = sorted(entries, key=lambda entry: (entry.source.nbytes % SECTOR != 0, -DTYPES[entry.dtype]))
    end = 0
    for entry in ordered:
        if entry.name in header or entry.name == _METADATA:
            raise ValueError(f"the name {entry.name!r} is taken: give each tensor of {name} a unique name")
        begin, end = end, end + entry.source.nbytes
        expected = math.prod(entry.shape) * DTYPES[entry.dtype]
        assert end - begin == expected, (
            f"{entry.name}: {end - begin} bytes, but {entry.dtype}{list(entry.shape)} takes {expected}"
        )
        header[entry.name] = {"dtype": entry.dtype, "shape": entry.shape, "data_offsets": (begin, end)}
    pieces = layouts.Pieces()
    pieces.write(_encode(name, header))
    for entry in ordered:
        pieces.add(entry.source)
    return pieces.layout(name)


def _encode(name: str, header: Mapping[str, object]) -> bytes:
    try:
        data = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f"a tensor name or metadata of {name} is not valid Unicode: "
            f"{error.object[error.start : error.end]!r}"
        ) from None
    data += b" " * ((PHASE - 8 - len(data)) % PAGE)
    if len(data) > MAX_HEADER:
        raise ValueError(
            f"the header of {name} takes {len(data)} bytes, more than the {MAX_HEADER} that safetensors "
            "allows: "
            "shorten the names, or split the file"
        )
    return struct.pack("<Q", len(data)) + data


def read_header(path: Path) -> bytes:
    """The length and the JSON, as parse() takes them. Refuses links and pipes; a missing file is an
    OSError."""
    try:
        # O_NONBLOCK: opening a pipe in place of the file would hang.
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENXIO):
            raise CheckpointError(
                f"{path}: not a regular file but a {_kind(os.lstat(path).st_mode)}"
            ) from None
        raise
    try:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            raise CheckpointError(f"not a regular file but a {_kind(status.st_mode)}")
        prefix = _read(fd, 0, 8)
        return prefix + _read(fd, 8, _length(prefix, status.st_size))
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {error}") from None
    finally:
        os.close(fd)


def _kind(mode: int) -> str:
    kinds = {
        stat.S_IFLNK: "symbolic link",
        stat.S_IFDIR: "directory",
        stat.S_IFIFO: "pipe",
        stat.S_IFSOCK: "socket",
    }
    return kinds.get(stat.S_IFMT(mode), "device")


def _read(fd: int, offset: int, nbytes: int) -> bytes:
    data = b""
    while len(data) < nbytes and (piece := os.pread(fd, nbytes - len(data), offset + len(data))):
        data += piece
    return data  # shorter than requested if the file ends: parse() reports it


def _length(header: bytes, file_size: int) -> int:
    if len(header) < 8 or file_size < 8:
        raise CheckpointError(
            f"the file is truncated after {min(len(header), file_size)} bytes, safetensors starts with 8 "
            "bytes of header length"
        )
    length: int = struct.unpack_from("<Q", header)[0]
    if length == 0:
        raise CheckpointError("the header is empty (length 0)")
    if length > MAX_HEADER:
        raise CheckpointError(f"the header claims {length} bytes, more than the {MAX_HEADER} allowed")
    if length > file_size - 8:
        raise CheckpointError(
            f"the header claims {length} bytes, but the file has only {file_size - 8} after the length"
        )
    return length


def parse(header: bytes, file_size: int) -> tuple[dict[str, Stored], dict[str, str]]:
    """The tensors and the metadata of a file, from its size and its first bytes; those after the header are
    ignored.

    Accepts nothing that the safetensors library refuses. Every problem is a CheckpointError.
    """
    length = _length(header, file_size)
    if len(header) < 8 + length:
        raise CheckpointError(f"the header is truncated: {len(header) - 8} of {length} bytes")
    document = _decode(header[8 : 8 + length])
    metadata = _metadata(document.pop(_METADATA, {}))
    start = 8 + length
    tensors = {name: _tensor(name, info, start, file_size) for name, info in document.items()}
    _check_cover(tensors, start, file_size)
    return tensors, metadata


def _decode(data: bytes) -> dict[str, object]:
    if not data.startswith(b"{"):
        raise CheckpointError(f"the header does not start with '{{' but with {data[:8]!r}")
    try:
        document = json.loads(data.decode(), object_pairs_hook=_unique, parse_int=_integer)
    except UnicodeDecodeError as error:
        raise CheckpointError(
            f"the header is not UTF-8: byte {data[error.start]:#04x} at {error.start}"
        ) from None
    except RecursionError:
        raise CheckpointError("the header is nested too deeply") from None
    except json.JSONDecodeError as error:
        raise CheckpointError(f"the header is not JSON: {error}") from None
    assert isinstance(document, dict)  # it begins with a brace
    return document


def _integer(text: str) -> int | float:
    """int() reads -0 as 0, which the safetensors library refuses, and fails on thousands of digits before the
    tensor is known; as floats both are refused with the tensor's name."""
    return float(text) if text == "-0" or len(text) > 40 else int(text)


def _unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
    found = dict(pairs)
    if len(found) != len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise CheckpointError(f"the header names {_show(twice)} twice")
    return found


def _metadata(found: object) -> dict[str, str]:
    if not isinstance(found, dict):
        raise CheckpointError(f"{_METADATA} must map strings to strings, not be {_show(found)}")
    for key, value in found.items():
        if not isinstance(value, str) or not _is_text(key) or not _is_text(value):
            raise CheckpointError(
                f"{_METADATA} must map strings to strings, but {_show(key)} is {_show(value)}"
            )
    return found


def _is_text(value: str) -> bool:
    """False for a lone surrogate, which JSON can escape but no file or terminal can take."""
    return value.isascii() or not any("\ud800" <= char <= "\udfff" for char in value)


def _tensor(name: str, info: object, start: int, file_size: int) -> Stored:
    what = f"tensor {_show(name)}"
    if not _is_text(name):
        raise CheckpointError(f"{what}: the name is not valid Unicode")
    if not isinstance(info, dict) or info.keys() != _FIELDS:
        raise CheckpointError(
            f"{what}: expected an object with dtype, shape and data_offsets, found {_show(info)}"
        )
    dtype = info["dtype"]
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise CheckpointError(f"{what}: unknown dtype {_show(dtype)}")
    shape = _integers(info["shape"], f"{what}: shape")
    offsets = _integers(info["data_offsets"], f"{what}: data_offsets")
    if len(offsets) != 2:
        raise CheckpointError(f"{what}: data_offsets must be two numbers, not {_show(offsets)}")
    begin, end = offsets
    if begin > end:
        raise CheckpointError(f"{what}: data_offsets are reversed: {_show(offsets)}")
    if end > file_size - start:
        raise CheckpointError(
            f"{what}: data_offsets {_show(offsets)} are out of range, the data has {file_size - start} bytes"
        )
    expected = _elements(shape, what) * DTYPES[dtype]
    if end - begin != expected:
        raise CheckpointError(
            f"{what}: data_offsets hold {end - begin} bytes, but {dtype} of shape "
            f"{_show(shape)} takes {expected}"
        )
    return Stored(dtype, shape, start + begin, start + end)


def _integers(found: object, what: str) -> tuple[int, ...]:
    if not isinstance(found, list):
        raise CheckpointError(f"{what} must be a list, not {_show(found)}")
    for value in found:
        if type(value) is not int or not 0 <= value < 2**63:  # bool is an int to isinstance
            raise CheckpointError(f"{what} must hold integers from 0 to 2**63 - 1, not {_show(value)}")
    return tuple(found)


def _elements(shape: tuple[int, ...], what: str) -> int:
    """The product. One that overflows is refused even where a dimension is 0: the strides of such a tensor
    overflow."""
    product = 1
    for size in shape:
        product *= size or 1
        if product > _MAX_ELEMENTS:
            raise CheckpointError(f"{what}: the product of shape {_show(shape)} overflows")
    return 0 if 0 in shape else product


def _check_cover(tensors: Mapping[str, Stored], start: int, file_size: int) -> None:
    end = start
    for name, stored in sorted(tensors.items(), key=lambda item: (item[1].begin, item[1].end)):
        if stored.begin != end:
            wrong = (
                "overlaps the tensor before it, which ends"
                if stored.begin < end
                else "leaves a gap after the data before it, which ends"
            )
            raise CheckpointError(
                f"tensor {_show(name)}: begins at byte {stored.begin} of the file and {wrong} at {end}"
            )
        end = stored.end
    if end != file_size:
        raise CheckpointError(
            f"the tensors end at byte {end} of the file, but it has {file_size}: "
            f"{file_size - end} belong to none"
        )


def _show(value: object) -> str:
    """A value for a message, cut short: it comes from outside and may be anything."""
    return reprlib.repr(value)
