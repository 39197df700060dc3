"""What is not a tensor in a state dict: JSON in the document instead of the pickles that DCP would write."""

from __future__ import annotations

import base64
import io
import math
from typing import Any

import numpy as np
import torch

from lastcall import errors
from lastcall.adapters.torch.tensors import dtypes, nodes, table
from lastcall.formats import tree

_ARRAY = "array"
_BUFFER = "BytesIO"
_TAGS = ("numpy", "torch.Size", "torch.dtype", "torch.device")


def encode(value: object, key: str) -> object:
    """The JSON of a value. StateError names the key of one that has none."""
    return tree.encode(value, key, _foreign)


def decode(document: object) -> object:
    return tree.decode(document, _tagged)


def as_torch_saved(value: object) -> io.BytesIO:
    """A value as a LoadPlanner takes it: DCP's own unpickles what it is handed, so it is handed a pickle of
    our making."""
    data = io.BytesIO()
    torch.save(value, data)
    data.seek(0)
    return data


def _foreign(value: Any, path: str) -> object:
    if isinstance(value, torch.Tensor):
        raise errors.StateError(
            f"{path}: a tensor inside another value cannot be saved. Let the planner flatten the state dict "
            "(DefaultSavePlanner(flatten_state_dict=True), its default), or put the tensor under a key of "
            "its own."
        )
    if isinstance(value, np.generic) and not value.dtype.hasobject:
        return table.scalar(value)
    if type(value) is np.ndarray and not value.dtype.hasobject:
        return {
            tree.TAG: _ARRAY,
            "dtype": tree.encode(dtypes.numpy_descr(value.dtype), "dtype", tree.refuse),
            "shape": list(value.shape),
            "base64": base64.b64encode(value.tobytes()).decode("ascii"),
        }
    if isinstance(value, torch.dtype | torch.device):
        return {tree.TAG: f"torch.{type(value).__name__}", "v": str(value)}
    if type(value) is torch.Size:
        return {tree.TAG: "torch.Size", "v": list(value)}
    # what people keep torch.save()d things in; an attribute of its own is not kept
    if type(value) is io.BytesIO and not value.closed:
        return {
            tree.TAG: _BUFFER,
            "base64": base64.b64encode(value.getbuffer()).decode("ascii"),
            "at": value.tell(),
        }
    return tree.refuse(value, path)


def _tagged(document: dict[str, object]) -> object:
    tag = document.get(tree.TAG)
    if tag in _TAGS:
        return nodes.of(document)
    if tag == _BUFFER:
        return _buffer(document)
    return _array(document) if tag == _ARRAY else tree.refuse_tag(document)


def _buffer(document: dict[str, object]) -> io.BytesIO:
    try:
        found = io.BytesIO(base64.b64decode(str(document["base64"]), validate=True))
        at = document["at"]
        if type(at) is not int:
            raise TypeError(f"it stands at {at!r:.50}")
        found.seek(at)
    except (KeyError, ValueError, TypeError, OverflowError) as error:
        raise errors.CheckpointError(f"the document holds a broken BytesIO: {error!r:.200}") from error
    return found


def _array(document: dict[str, object]) -> object:
    try:
        dtype = dtypes.numpy_by_descr(tree.decode(document["dtype"], tree.refuse_tag))
        shape = nodes.shape(document["shape"])
        data = base64.b64decode(str(document["base64"]), validate=True)
        if math.prod(shape) * dtype.itemsize != len(data):
            raise ValueError(f"{len(data)} bytes for {list(shape)} of {dtype}")
        return np.frombuffer(bytearray(data), dtype).reshape(shape) if data else np.zeros(shape, dtype)
    except (KeyError, ValueError, TypeError) as error:
        if isinstance(error, errors.LastcallError):
            raise
        raise errors.CheckpointError(f"the document holds a broken array: {error!r:.200}") from error
