"""Checkpoints of many ranks without a framework: global tensors cut into boxes, written as real files, read
back by other ranks."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt

from helpers.core.bare_core import block, content, noise
from lastcall import errors, memory
from lastcall.core.checkpoint import filenames
from lastcall.core.checkpoint import record as records
from lastcall.core.checkpoint.record import Entry, Record
from lastcall.core.engine import writer
from lastcall.core.ranks import partition
from lastcall.core.subject import Stored
from lastcall.formats import layouts, manifest, safetensors
from lastcall.types import Extent, FileLayout, Group, Kind, Region, Share, Target, TensorEntry

Box = tuple[tuple[int, ...], tuple[int, ...]]  # offset, shape


@dataclass(frozen=True)
class Whole:
    """A global tensor and how a number of ranks hold it: rank r has box r % len(boxes), together with the
    others of that box."""

    dtype: str
    shape: tuple[int, ...]
    boxes: tuple[Box, ...]
    seed: int = 0

    @property
    def data(self) -> npt.NDArray[np.uint8]:
        size = safetensors.DTYPES[self.dtype]
        flat = np.frombuffer(noise(math.prod(self.shape) * size, self.seed), dtype=np.uint8)
        return flat.reshape((*self.shape, size))

    def box(self, rank: int) -> Box:
        return self.boxes[rank % len(self.boxes)]

    def cut(self, box: Box) -> bytes:
        return self.data[
            tuple(slice(begin, begin + size) for begin, size in zip(*box, strict=True))
        ].tobytes()

    def entry(self, name: str, rank: int, world: int) -> TensorEntry:
        offset, shape = self.box(rank)
        holders = tuple(range(rank % len(self.boxes), world, len(self.boxes)))
        return TensorEntry(
            name, self.dtype, shape, block(self.cut((offset, shape))), Share(self.shape, offset, holders)
        )


def grid(shape: tuple[int, ...], cuts: Mapping[int, Sequence[int]]) -> tuple[Box, ...]:
    """The boxes between these cuts, by dimension. Two equal cuts leave an empty one between them."""
    edges = [[0, *sorted(cuts.get(dim, ())), size] for dim, size in enumerate(shape)]
    spans = [list(itertools.pairwise(found)) for found in edges]
    return tuple(
        (tuple(a for a, _ in box), tuple(b - a for a, b in box)) for box in itertools.product(*spans)
    )


def rows(shape: tuple[int, ...], parts: int, dim: int = 0) -> tuple[Box, ...]:
    """Even shards of one dimension, as FSDP2 cuts them: the last may be shorter, or empty."""
    each = -(-shape[dim] // parts)
    return grid(shape, {dim: [min(shape[dim], each * part) for part in range(1, parts)]})


def state(tensors: Mapping[str, Whole], rank: int, world: int) -> tuple[Group, ...]:
    """What a rank holds: its boxes of the tensors, and something of its own."""
    own = TensorEntry("own", "U8", (100,), block(noise(100, f"own {rank}")))
    entries = tuple(whole.entry(name, rank, world) for name, whole in tensors.items())
    return Group("model", (*entries, own), rank=0), Group("rng", (dataclasses.replace(own, name="state"),))


def write(
    folder: Path,
    engine: writer.Engine,
    states: Mapping[int, tuple[Group, ...]],
    writers: Collection[int] | None = None,
    world: int = 0,
) -> Entry:
    """Have these ranks write their portions, and make a checkpoint of it."""
    folder.mkdir(parents=True)
    writers = states.keys() if writers is None else writers
    made, described = [], []
    for rank in writers:
        portion = partition.portion(states[rank], rank, writers)
        described.append(json.loads(json.dumps(manifest.describe(rank, portion))))
        made.append(_small(filenames.document(rank), json.dumps({"rank": rank}).encode()))
        made += [
            safetensors.layout(filenames.tensors(group.name, rank), group.entries, {"format": "pt"})
            for group in portion
        ]
    made.append(_small(manifest.NAME, manifest.merge(described)))
    return commit(folder, engine, made, world or len(states))


def commit(folder: Path, engine: writer.Engine, made: Sequence[FileLayout], world: int) -> Entry:
    outputs = []
    for layout in made:
        layouts.check(layout)
        outputs.append(writer.Output(layout, os.open(folder / layout.name, os.O_RDWR | os.O_CREAT)))
    engine.write(outputs)
    files = []
    for output in outputs:
        assert output.fd is not None and output.record is not None
        os.close(output.fd)
        files.append(output.record)
    record = Record(
        sequence=1, step=1, kind=Kind.JIT, reason="test", exact=True, files=tuple(files), world=world
    )
    (folder / records.NAME).write_bytes(record.to_json())
    return Entry(folder, records.read(folder))


def _small(name: str, data: bytes) -> FileLayout:
    return FileLayout(name, len(data), (Extent(0, memory.BytesSource(data)),))


class Elsewhere:
    """A target that can only be written to call by call, as memory of a device is."""

    def __init__(self, live: memory.HostMemory) -> None:
        self._live = live
        self.nbytes = live.nbytes
        self.calls = 0

    def write_from(self, address: int, offset: int, nbytes: int) -> None:
        assert offset >= 0 and offset + nbytes <= self.nbytes
        self.calls += 1
        self._live.write_from(address, offset, nbytes)


@dataclass
class Several:
    targets: tuple[object, ...]


@dataclass
class Live:
    """A rank that takes its boxes of the tensors from a checkpoint: a Restorable."""

    tensors: Mapping[str, Whole]
    rank: int
    kind: str = "host"  # "host" memory, memory "elsewhere", or "several" targets at once
    document: dict[str, object] | None = None
    memory: dict[str, list[memory.HostMemory]] = field(default_factory=dict)
    targets: dict[str, dict[str, object]] = field(default_factory=dict)
    loads_by_itself = False
    whole = False
    saved_step = None

    def prepare(self, document: dict[str, object], stored: Stored) -> Live:
        self.document = document
        self.memory = {"own": [block(bytes(100))], "state": [block(bytes(100))]}
        self.targets = {"model": {"own": self.memory["own"][0]}, "rng": {"state": self.memory["state"][0]}}
        for name, whole in self.tensors.items():
            found = stored["model"][name]
            if (found.dtype, found.shape) != (whole.dtype, whole.shape):
                raise errors.MismatchError(f"{name} does not fit")
            self.targets["model"][name] = self._target(name, whole)
        return self

    def _target(self, name: str, whole: Whole) -> object:
        box = whole.box(self.rank)
        nbytes = math.prod(box[1]) * safetensors.DTYPES[whole.dtype]
        live = [block(bytes(nbytes)) for _ in range(2 if self.kind == "several" else 1)]
        self.memory[name] = live
        ends: list[Target] = [Elsewhere(one) if self.kind == "elsewhere" else one for one in live]
        targets: list[object] = [end if box[1] == whole.shape else Region(*box, end) for end in ends]
        return Several(tuple(targets)) if len(targets) > 1 else targets[0]

    def finish(self) -> None:
        pass

    def check(self, wrote: Collection[int]) -> None:
        """Everything is there, byte for byte; what is a rank's own comes from the rank of the same number, or
        from 0."""
        source = self.rank if self.rank in wrote else 0
        assert self.document == {"rank": source}
        assert (
            content(self.memory["own"][0]) == content(self.memory["state"][0]) == noise(100, f"own {source}")
        )
        for name, whole in self.tensors.items():
            for live in self.memory[name]:
                assert content(live) == whole.cut(whole.box(self.rank)), f"{name} of rank {self.rank}"
