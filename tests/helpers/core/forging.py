"""Checkpoints made by hand: folders whose digests hold, whatever is in them. For readers that must not trust
what they read."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from helpers.core.bare_core import block
from lastcall.core.checkpoint.record import NAME, Record
from lastcall.core.engine import digest, writer
from lastcall.formats import layouts, safetensors
from lastcall.types import FileRecord, Kind, TensorEntry

Tensor = tuple[str, tuple[int, ...], bytes]


def floats(*values: float) -> bytes:
    return struct.pack(f"<{len(values)}f", *values)


def tensor_file(tensors: Mapping[str, Tensor]) -> bytes:
    entries = [TensorEntry(name, dtype, shape, block(data)) for name, (dtype, shape, data) in tensors.items()]
    return layouts.materialize(safetensors.layout("forged", entries))


def commit(folder: Path, files: Mapping[str, bytes], **more: Any) -> Path:
    """A folder with these files and a record that vouches for them."""
    folder.mkdir(parents=True, exist_ok=True)
    known = []
    for name, data in files.items():
        (folder / name).write_bytes(data)
        chunks = tuple(
            digest.of(data[begin : begin + writer.CHUNK]) for begin in range(0, len(data), writer.CHUNK)
        )
        known.append(FileRecord(name, len(data), digest.over(chunks), writer.CHUNK, chunks))
    record = Record(
        **{
            "sequence": 1,
            "step": 1,
            "kind": Kind.JIT,
            "reason": "",
            "exact": True,
            "files": tuple(known),
            **more,
        }
    )
    (folder / NAME).write_bytes(record.to_json())
    return folder


def two_ranks() -> dict[str, bytes]:
    """A weight of 2 x 4 in two columns' shards, a bias that rank 1 wrote as a whole, and a buffer of each
    rank's own."""
    pieces = [
        {
            "file": f"model-0000{rank}.safetensors",
            "key": f"w@0,{2 * rank}",
            "offset": [0, 2 * rank],
            "shape": [2, 2],
        }
        for rank in (0, 1)
    ]
    bias = {"file": "model-00001.safetensors", "key": "b", "offset": [0], "shape": [2]}
    manifest = {
        "format": 1,
        "tensors": {
            "model": {
                "w": {"dtype": "F32", "shape": [2, 4], "pieces": pieces},
                "b": {"dtype": "F32", "shape": [2], "pieces": [bias]},
                "none": {"dtype": "F32", "shape": [0, 3], "pieces": []},
            }
        },
    }
    return {
        "manifest.json": json.dumps(manifest).encode(),
        "state-00000.json": b'{"state": {}}',
        "state-00001.json": b'{"state": {}}',
        "model-00000.safetensors": tensor_file(
            {"w@0,0": ("F32", (2, 2), floats(0, 1, 4, 5)), "mean": ("F32", (1,), floats(10))},
        ),
        "model-00001.safetensors": tensor_file(
            {
                "w@0,2": ("F32", (2, 2), floats(2, 3, 6, 7)),
                "b": ("F32", (2,), floats(8, 9)),
                "mean": ("F32", (1,), floats(11)),
            },
        ),
    }


def _edit(files: dict[str, bytes], change: Any) -> None:
    manifest = json.loads(files["manifest.json"])
    change(manifest["tensors"]["model"])
    files["manifest.json"] = json.dumps(manifest).encode()


def _piece(**fields: Any) -> Any:
    return lambda files: _edit(files, lambda model: model["w"]["pieces"][1].update(fields))


# What to do to two_ranks(), and what a reader has to say of it.
HOSTILE: dict[str, tuple[Any, str]] = {
    "a file outside": (_piece(file="../model-00001.safetensors"), "plain name"),
    "an absolute file": (_piece(file="/etc/passwd"), "plain name"),
    "a file that is not of the checkpoint": (
        _piece(file="other-00001.safetensors"),
        "which the record does not",
    ),
    "a file that holds no tensors": (_piece(file="state-00000.json"), "plain name"),
    "a key that is not there": (_piece(key="nope"), "is not in it"),
    "a key of another shape": (_piece(key="b"), "in it"),
    "pieces that overlap": (_piece(offset=[0, 1]), "overlap"),
    "a piece outside the whole": (_piece(offset=[0, 3]), "w@0,2"),
    "a negative offset": (_piece(offset=[0, -2]), "integers from 0"),
    "a hole": (lambda files: _edit(files, lambda model: model["w"]["pieces"].pop()), "elements"),
    "another type than the file's": (
        lambda files: _edit(files, lambda model: model["w"].update(dtype="I32")),
        "in it",
    ),
    "an unknown type": (
        lambda files: _edit(files, lambda model: model["w"].update(dtype="X9")),
        "unknown dtype",
    ),
    "an absurd shape": (
        lambda files: _edit(files, lambda model: model["w"].update(shape=[2**40, 2**40])),
        "overflows",
    ),
    "no JSON": (lambda files: files.update({"manifest.json": b"{"}), "not JSON"),
    "no document": (lambda files: files.pop("state-00000.json"), "names no state-00000.json"),
    "a cut header": (lambda files: files.update({"model-00001.safetensors": b"\xff" * 20}), "header"),
}
