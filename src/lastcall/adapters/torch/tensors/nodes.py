"""What the tagged objects of a document mean, before anything live is looked at. Documents may be hostile."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from lastcall import errors
from lastcall.adapters.torch.tensors import dtypes
from lastcall.adapters.torch.tensors.table import Place
from lastcall.formats import tree

UNSAVED_TAG = "unsaved"
UNSAVED = object()  # stands for what could not be saved
PARTS = ("module", "optimizer", "object", "generator", "loader")


@dataclass(frozen=True)
class Ref:
    """A tensor in a file."""

    place: Place
    dtype: torch.dtype
    shape: tuple[int, ...]
    dense: tuple[int, ...]  # its shape in the file: expanded dimensions are stored once
    device: torch.device
    parameter: bool
    grad: bool
    dtensor: bool = False


@dataclass(frozen=True)
class ArrayRef:
    """A numpy array in a file."""

    place: Place
    dtype: np.dtype[Any]
    shape: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class Node:
    """A module, an optimizer, ...: what it holds is taken apart by the Part of the live one."""

    tag: str
    document: dict[str, object]


def of(document: dict[str, object]) -> object:
    """The `foreign` of tree.decode()."""
    tag = document.get(tree.TAG)
    try:
        if tag == "tensor":
            return _array(document) if document.get("kind") == "numpy" else _tensor(document)
        if tag == "numpy":
            return _scalar(document)
        if tag == "torch.Size":
            return torch.Size(shape(document["v"]))
        if tag == "torch.dtype":
            return dtypes.by_name(str(document["v"]).removeprefix("torch."))
        if tag == "torch.device":
            return torch.device(str(document["v"]))
    except (KeyError, ValueError, TypeError, RuntimeError, OverflowError) as error:
        if isinstance(error, errors.LastcallError):
            raise
        raise errors.CheckpointError(f"the document holds a broken {tag}: {error!r:.200}") from error
    if tag == UNSAVED_TAG:
        return UNSAVED
    if isinstance(tag, str) and tag in PARTS:
        return Node(tag, document)
    return tree.refuse_tag(document)


def ref(document: object) -> Ref:
    """A reference where only a reference to a tensor may stand."""
    found = of(document) if isinstance(document, dict) else None
    if not isinstance(found, Ref):
        raise errors.CheckpointError(
            f"the document holds {document!r:.80} where a tensor belongs: it is damaged"
        )
    return found


def pairs(document: dict[str, object], name: str) -> list[tuple[Any, Any]]:
    """A list of pairs with different keys."""
    items = document.get(name)
    if not isinstance(items, list) or not all(isinstance(item, list) and len(item) == 2 for item in items):
        raise errors.CheckpointError(f"the part {name!r} of the document is no list of pairs: it is damaged")
    if not all(type(key) in (str, int) for key, _ in items) or len({key for key, _ in items}) != len(items):
        raise errors.CheckpointError(
            f"the part {name!r} of the document names something wrongly or twice: it is damaged"
        )
    return [(key, item) for key, item in items]


def shape(value: object) -> tuple[int, ...]:
    if (
        not isinstance(value, list)
        or len(value) > 64
        or not all(type(n) is int and 0 <= n < 2**62 for n in value)
    ):
        raise errors.CheckpointError(f"the document holds a shape that is none: {value!r:.80}")
    return tuple(value)


def _place(document: dict[str, object]) -> Place:
    group, name = document["g"], document["n"]
    if not isinstance(group, str) or not isinstance(name, str):
        raise errors.CheckpointError(
            f"the document refers to a tensor by {group!r:.40}, {name!r:.40}: it is damaged"
        )
    return group, name


@functools.lru_cache(64)
def _device(name: str) -> torch.device:
    return torch.device(name)


def _tensor(document: dict[str, object]) -> Ref:
    full = shape(document["shape"])
    dense = shape(document["dense"]) if "dense" in document else full
    if len(dense) != len(full) or any(one not in (1, every) for one, every in zip(dense, full, strict=True)):
        raise errors.CheckpointError(
            f"the document expands a tensor of {dense} to {full}, which is impossible"
        )
    if document["kind"] not in ("torch", "parameter"):
        raise errors.CheckpointError(
            f"the document holds a tensor of the unknown kind {document['kind']!r:.40}"
        )
    return Ref(
        _place(document),
        dtypes.by_name(document["dtype"]),
        full,
        dense,
        _device(str(document["device"])),
        document["kind"] == "parameter",
        document.get("grad") is True,
        document.get("dtensor") is True,
    )


def _array(document: dict[str, object]) -> ArrayRef:
    descr = tree.decode(document["dtype"], tree.refuse_tag)
    return ArrayRef(_place(document), dtypes.numpy_by_descr(descr), shape(document["shape"]))


def _scalar(document: dict[str, object]) -> object:
    dtype = dtypes.numpy_by_descr(tree.decode(document["dtype"], tree.refuse_tag))
    data = bytes.fromhex(str(document["hex"]))
    if len(data) != dtype.itemsize:
        raise errors.CheckpointError(
            f"the document holds a numpy scalar of {len(data)} bytes instead of {dtype.itemsize}"
        )
    return np.ndarray((), dtype, data)[()] if data else np.zeros((), dtype)[()]
