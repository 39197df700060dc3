"""The manifest of a checkpoint of many ranks: which piece of which tensor lies in which file. JSON, and read
as if hostile.

    {"format": 1, "tensors": {GROUP: {NAME: {"dtype": "F32", "shape": [8, 4], "pieces": [
        {"file": "model-00001.safetensors", "key": "layer.weight@4,0", "offset": [4, 0], "shape": [4, 4]},
        ...]}}}}

The pieces of a tensor cover it and do not overlap, and have elements if it has. A tensor in a rank's files
but not in the manifest belongs to that rank.
"""

from __future__ import annotations

import functools
import json
import math
import re
import reprlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from lastcall.errors import CheckpointError, FormatError, SaveError
from lastcall.formats import safetensors
from lastcall.types import Group

NAME = "manifest.json"
FORMAT = 1
SUFFIX = ".safetensors"
_FILE = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.\-]{0,199}")
_LARGEST = 2**63 - 1
_TENSOR = frozenset({"dtype", "shape", "pieces"})
_PIECE = frozenset({"file", "key", "offset", "shape"})
# the maximum number of recursive cuts; what the ranks write needs one per dimension, and one for the writers
# of a replica
_DEPTH = 16

# what one rank wrote, as recorded in the manifest: GROUP -> NAME -> tensor
Description = dict[str, dict[str, Any]]


class Piece(NamedTuple):
    """A box of a tensor, stored under `key` in `file`. A tuple, not a dataclass: there may be a million."""

    file: str
    key: str
    offset: tuple[int, ...]
    shape: tuple[int, ...]


class ShardedTensor(NamedTuple):
    """A tensor whose pieces are in several files."""

    dtype: str
    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * safetensors.DTYPES[self.dtype]


Manifest = Mapping[str, Mapping[str, ShardedTensor]]


def file_name(group: str, rank: int) -> str:
    return f"{group}-{rank:05d}{SUFFIX}"


def key(name: str, offset: Sequence[int]) -> str:
    """The name of a part of a tensor in its file; a whole tensor keeps its name."""
    return f"{name}@{','.join(map(str, offset))}"


def name_of(found: str) -> str:
    """The tensor that a part's key names."""
    return found.rpartition("@")[0]


def describe(rank: int, groups: Iterable[Group]) -> Description:
    """What a rank writes of shared tensors (ranks.partition), for its receipt; its own tensors are not in
    it."""
    found: Description = {}
    for group in groups:
        for entry in group.entries:
            share = entry.share
            if share is None:
                continue
            name = entry.name if entry.shape == share.whole else name_of(entry.name)
            piece = {
                "file": file_name(group.name, rank),
                "key": entry.name,
                "offset": list(share.offset),
                "shape": list(entry.shape),
            }
            tensor = {"dtype": entry.dtype, "shape": list(share.whole), "pieces": [piece]}
            found.setdefault(group.name, {})[name] = tensor
    return found


def merge(descriptions: Iterable[Description]) -> bytes:
    """The manifest of what all ranks wrote. SaveError if the pieces do not form whole tensors. Each
    description is checked as it arrives, so little is left to do after the last one: pass an iterator that
    waits for them."""
    merged: Description = {}
    wholes: dict[tuple[str, str], ShardedTensor] = {}
    pieces: dict[tuple[str, str], list[Piece]] = {}
    group = name = ""
    try:
        for description in descriptions:
            for group, tensors in _object(description, "what a rank wrote").items():
                into = merged.setdefault(group, {})
                for name, found in _object(tensors, _show(group)).items():
                    part = _tensor(found, wholes.get((group, name)))
                    wholes.setdefault((group, name), part)
                    pieces.setdefault((group, name), []).extend(part.pieces)
                    into.setdefault(name, {**found, "pieces": []})["pieces"] += found["pieces"]
        for (group, name), whole in wholes.items():
            _check_cover(whole, pieces[group, name])
    except CheckpointError as error:
        raise SaveError(
            f"the ranks' pieces do not form a whole, so nothing is committed: {group}/{name}: {error}"
        ) from error
    return json.dumps(
        {"format": FORMAT, "tensors": merged}, ensure_ascii=False, separators=(",", ":")
    ).encode()


def parse(data: bytes) -> Manifest:
    """The manifest, completely checked. Every problem is a CheckpointError."""
    try:
        document = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{NAME} is not JSON: {error}") from None
    if isinstance(document, dict) and type(document.get("format")) is int and document["format"] != FORMAT:
        raise FormatError(
            f"{NAME} has another format ({document['format']}) than {FORMAT}. Was it written by a newer "
            "lastcall? Then install that one"
        )
    if (
        not isinstance(document, dict)
        or document.keys() != {"format", "tensors"}
        or document["format"] != FORMAT
    ):
        raise CheckpointError(f"{NAME} is not an object of format and tensors")
    manifest: dict[str, dict[str, ShardedTensor]] = {}
    for group, name, tensor in _tensors(document["tensors"]):
        manifest.setdefault(group, {})[name] = tensor
    return manifest


def _tensors(groups: object) -> Iterator[tuple[str, str, ShardedTensor]]:
    for group, tensors in _object(groups, "tensors").items():
        for name, found in _object(tensors, _show(group)).items():
            try:
                tensor = _tensor(found)
                _check_cover(tensor, tensor.pieces)
            except CheckpointError as error:
                raise CheckpointError(f"{NAME}: {_show(group)} {_show(name)}: {error}") from None
            yield group, name, tensor


def _object(found: object, what: str) -> dict[str, Any]:
    if not isinstance(found, dict):
        raise CheckpointError(f"{NAME}: {what} must be an object, not {_show(found)}")
    return found


def _tensor(found: object, known: ShardedTensor | None = None) -> ShardedTensor:
    """`known`: what another rank wrote of the same tensor."""
    if not isinstance(found, dict) or found.keys() != _TENSOR or not isinstance(found["pieces"], list):
        raise CheckpointError(
            f"expected an object with dtype, shape and a list of pieces, found {_show(found)}"
        )
    dtype, shape = found["dtype"], _numbers(found["shape"], "shape")
    if known is None:
        if not isinstance(dtype, str) or dtype not in safetensors.DTYPES:
            raise CheckpointError(f"unknown dtype {_show(dtype)}")
        if math.prod([size or 1 for size in shape]) * safetensors.DTYPES[dtype] > _LARGEST:
            raise CheckpointError(f"the product of shape {_show(shape)} overflows")
    elif (known.dtype, known.shape) != (dtype, shape):
        raise CheckpointError(
            f"it is {known.dtype} {_show(known.shape)} on one rank and {_show(dtype)} {_show(shape)} on "
            "another. "
            "Build the same model on every rank"
        )
    return ShardedTensor(dtype, shape, tuple([_piece(piece, shape) for piece in found["pieces"]]))


def _piece(found: object, whole: tuple[int, ...]) -> Piece:
    if not isinstance(found, dict) or found.keys() != _PIECE:
        raise CheckpointError(f"expected a piece with file, key, offset and shape, found {_show(found)}")
    file, name = found["file"], found["key"]
    if not isinstance(file, str) or not _plain(file):
        raise CheckpointError(f"the file {_show(file)} is not the plain name of a {SUFFIX} file")
    if not isinstance(name, str):
        raise CheckpointError(f"the key {_show(name)} is not text")
    offset, shape = _numbers(found["offset"], "offset"), _numbers(found["shape"], "shape")
    if len(offset) != len(whole) or len(shape) != len(whole):
        raise CheckpointError(
            f"the piece {_show(name)} has another number of dimensions than the whole, which has {len(whole)}"
        )
    for begin, size, limit in zip(offset, shape, whole, strict=True):
        if begin + size > limit or (size == 0 and 0 not in whole):
            where = f"{_show(shape)} at {_show(offset)} of {_show(whole)}"
            raise CheckpointError(f"the piece {_show(name)} is empty or exceeds the whole: {where}")
    return Piece(file, name, offset, shape)


@functools.lru_cache(4096)  # there are many pieces to a file
def _plain(file: str) -> bool:
    return bool(_FILE.fullmatch(file)) and ".." not in file and file.endswith(SUFFIX)


def _numbers(found: object, what: str) -> tuple[int, ...]:
    if not isinstance(found, list):
        raise CheckpointError(f"{what} must be a list, not {_show(found)}")
    for value in found:
        if type(value) is not int or not 0 <= value <= _LARGEST:  # bool is an int to isinstance
            raise CheckpointError(f"{what} must hold integers from 0 to 2**63 - 1, not {_show(value)}")
    return tuple(found)


def _check_cover(tensor: ShardedTensor, found: Sequence[Piece]) -> None:
    """Pieces that do not overlap and have the volume of the whole cover it."""
    there, whole = sum([math.prod(piece.shape) for piece in found]), math.prod(tensor.shape)
    if there != whole:
        raise CheckpointError(f"the pieces have {there} elements, the whole has {whole}")
    todo: list[tuple[Sequence[Piece], int]] = [(found, 0)] if whole and len(found) > 1 else []
    while todo:
        pieces, depth = todo.pop()
        parts = _cut(pieces, len(tensor.shape)) if depth < _DEPTH else None
        if parts is None:
            raise CheckpointError(
                f"pieces overlap, or are arranged as no ranks would write them: {_show(pieces[0].key)} and "
                f"{_show(pieces[1].key)}"
            )
        todo += [(part, depth + 1) for part in parts if len(part) > 1]


def _cut(pieces: Sequence[Piece], dimensions: int) -> list[list[Piece]] | None:
    """Split the pieces recursively where a cut separates them. Shards are cut like that, so comparing every
    piece with every other, which takes minutes for thousands, is not needed."""
    for dim in range(dimensions):
        ordered = sorted(pieces, key=lambda piece: piece.offset[dim])
        parts: list[list[Piece]] = [[]]
        end = 0
        for piece in ordered:
            begin = piece.offset[dim]
            if begin >= end and parts[-1]:
                parts.append([])
            parts[-1].append(piece)
            end = max(end, begin + piece.shape[dim])
        if len(parts) > 1:
            return parts
    return None


def _show(value: object) -> str:
    """A value for a message, shortened: it comes from outside and may be anything."""
    return reprlib.repr(value)
