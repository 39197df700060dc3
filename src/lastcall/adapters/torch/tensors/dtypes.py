"""Element types: what torch and numpy call them, and what safetensors calls them.

An element type without a safetensors code (complex128, float8_e5m2fnuz, a numpy record) is stored as plain
numbers with one more dimension; its true name stands in the document. So every state fits into a file that
any reader opens.
"""

from __future__ import annotations

import numpy as np
import torch

from lastcall import errors

CODES: dict[torch.dtype, str] = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.uint16: "U16",
    torch.uint32: "U32",
    torch.uint64: "U64",
    torch.bool: "BOOL",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.complex64: "C64",
}
_NUMPY_CODES = {
    "<f8": "F64", "<f4": "F32", "<f2": "F16", "<i8": "I64", "<i4": "I32", "<i2": "I16", "|i1": "I8",
    "|u1": "U8", "<u2": "U16", "<u4": "U32", "<u8": "U64", "|b1": "BOOL", "<c8": "C64",
}  # fmt: skip
_BY_NAME = {str(value): value for value in vars(torch).values() if isinstance(value, torch.dtype)}
_QUANTIZED = {"torch.qint8", "torch.quint8", "torch.qint32", "torch.quint4x2", "torch.quint2x4"}


def stored_as(dtype: torch.dtype, shape: tuple[int, ...]) -> tuple[str, tuple[int, ...]]:
    """The safetensors code and the shape under which elements of this type are stored."""
    if dtype is torch.complex128:
        return "F64", (*shape, 2)
    code = CODES.get(dtype)
    return (code, shape) if code is not None else ("U8", (*shape, dtype.itemsize))


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def by_name(name: object) -> torch.dtype:
    """The element type a document names. Documents may be hostile: only names of plain element types are
    taken."""
    dtype = _BY_NAME.get(f"torch.{name}")
    if dtype is None or str(dtype) in _QUANTIZED:
        raise errors.CheckpointError(
            f"the document names a dtype {name!r:.40} that torch {torch.__version__} does not have: it is "
            "damaged, or "
            "from a newer torch"
        )
    return dtype


def numpy_stored_as(dtype: np.dtype[np.generic], shape: tuple[int, ...]) -> tuple[str, tuple[int, ...]]:
    code = _NUMPY_CODES.get(dtype.str) if dtype.names is None else None
    return (code, shape) if code is not None else ("U8", (*shape, dtype.itemsize))


def numpy_descr(dtype: np.dtype[np.generic]) -> object:
    """What stands in the document: a string for simple types, numpy's own list of tuples for records."""
    return np.lib.format.dtype_to_descr(dtype)


def numpy_by_descr(descr: object) -> np.dtype[np.generic]:
    """The numpy dtype a document describes. One that holds objects would need pickle, which runs code:
    refused."""
    if not isinstance(descr, (str, list, tuple)) or (isinstance(descr, str) and not 0 < len(descr) <= 32):
        raise errors.CheckpointError(f"the document describes a numpy dtype as {descr!r:.80}: it is damaged")
    try:
        dtype: np.dtype[np.generic] = np.lib.format.descr_to_dtype(descr)  # type: ignore[arg-type]
    except Exception as error:  # numpy raises whatever the parser of the day meets
        raise errors.CheckpointError(
            f"the document describes no numpy dtype: {descr!r:.80} ({error})"
        ) from error
    if dtype.hasobject:
        raise errors.CheckpointError(
            f"the document describes a numpy dtype that holds Python objects: {descr!r:.80}"
        )
    return dtype
