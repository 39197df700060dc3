"""The values that travel between the stages. Frozen, and without behaviour that could fail."""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol


class Kind(enum.Enum):
    """Why a checkpoint was made."""

    PERIODIC = "periodic"  # from PeriodicCheckpointConfig
    JIT = "jit"  # a notice, saved at a boundary
    # the last completed step, saved in the middle of the next: no boundary came in time, or training raised
    RESCUE = "rescue"
    MANUAL = "manual"  # run.save()
    FINAL = "final"  # training finished
    GUARD = "guard"  # the process was killed: saved from its shared memory
    SURVIVORS = "survivors"  # a rank was lost, failed or hung: saved by the others


class Outcome(enum.Enum):
    """How an incarnation ended."""

    FINISHED = "finished"  # training reached its end
    SAVED = "saved"  # a notice came and a checkpoint was committed
    NOT_SAVED = "not saved"  # a notice came and nothing could be committed
    FAILED = "failed"  # an exception left the block
    LEFT = "left"  # the script exited on its own (sys.exit()), and its training is not known to have finished


@dataclass(frozen=True)
class Notice:
    """News that the run must stop. Times are on the monotonic clock."""

    source: str  # the source of the notice: "signal", "request", ...
    reason: str  # the reason, such as "SIGTERM"
    at: float
    deadline: float | None = None
    signum: int | None = None  # the signal, if it was one: a run that cannot save exits with it


class Source(Protocol):
    """Bytes that can be copied to host memory piece by piece, from several threads at once, without a full
    copy in between."""

    @property
    def nbytes(self) -> int: ...

    def read_into(self, address: int, offset: int, nbytes: int) -> None:
        """Copy bytes [offset, offset + nbytes) of this source to the host memory at `address`."""


class Target(Protocol):
    """The destination of a checkpoint's bytes on restore; the mirror image of Source."""

    @property
    def nbytes(self) -> int: ...

    def write_from(self, address: int, offset: int, nbytes: int) -> None:
        """Copy `nbytes` from the host memory at `address` to [offset, offset + nbytes) of this target."""


@dataclass(frozen=True)
class Share:
    """How a tensor of this rank is part of a whole that several ranks hold: DDP's parameters, a DTensor's
    shard. Without one, a tensor is the rank's own. Shapes are those of the file (a dtype that safetensors
    lacks is stored in another shape)."""

    whole: tuple[int, ...]  # the shape of the whole
    offset: tuple[int, ...]  # where this rank's piece starts in it
    holders: tuple[int, ...]  # the ranks that hold the same piece, this one included, in order


@dataclass(frozen=True)
class Region:
    """A Target for a piece of a stored tensor: the box at `offset` of `shape` goes to `target`, in C
    order."""

    offset: tuple[int, ...]
    shape: tuple[int, ...]
    target: Target


@dataclass(frozen=True)
class TensorEntry:
    """One tensor as a format sees it: a name, a safetensors dtype code ("F32", "BF16", ...), a shape, and its
    bytes in C order."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    source: Source
    share: Share | None = None


@dataclass(frozen=True)
class Extent:
    """Where the bytes of a source lie in a file."""

    offset: int
    source: Source


@dataclass(frozen=True)
class FileLayout:
    """A file as a list of extents: sorted by offset, without gaps or overlaps, from 0 to `size`."""

    name: str
    size: int
    extents: tuple[Extent, ...]


@dataclass(frozen=True)
class FileRecord:
    """The commit record's entry for a file. Every byte is covered: `chunks` are the digests of consecutive
    pieces of `chunk` bytes (the last may be shorter), `digest` is the digest over the chunk digests."""

    name: str
    size: int
    digest: str
    chunk: int
    chunks: tuple[str, ...] = field(repr=False)


@dataclass(frozen=True)
class Group:
    """Tensors that are saved into one file."""

    name: str  # the file is called <name>.safetensors
    entries: tuple[TensorEntry, ...]
    # not expected to change: worth comparing with the previous checkpoint before it is written
    frozen: bool = False
    rank: int = 1  # most important first: 0 weights, 1 the rest, 2 what can be rebuilt (optimizer moments)

    @property
    def nbytes(self) -> int:
        return sum(entry.source.nbytes for entry in self.entries)


@dataclass(frozen=True)
class File:
    """A file of a framework's own format, laid out by its adapter. A `shared` one is the same on every rank:
    one of them writes it."""

    layout: FileLayout
    shared: bool = False


@dataclass(frozen=True)
class Capture:
    """The whole state of a run, ready to be written: groups of tensors, one JSON document that refers to
    them, and the files of a framework that has a format of its own."""

    step: int
    document: dict[str, object]
    groups: tuple[Group, ...]
    exact: bool = True
    because: str = ""  # when not exact: why
    metrics: dict[str, float] = field(default_factory=dict)
    still: Callable[[], bool] = field(
        default=lambda: True, repr=False, compare=False
    )  # called once the bytes are written: is it still exact?
    files: tuple[File, ...] = ()
    doubt: str = ""  # why the run is not exact although this is the whole state that was passed to protect()

    @property
    def nbytes(self) -> int:
        return sum(group.nbytes for group in self.groups) + sum(file.layout.size for file in self.files)

    @property
    def sources(self) -> list[Source]:
        """All that has to be read for a restore."""
        tensors = [entry.source for group in self.groups for entry in group.entries]
        return tensors + [extent.source for file in self.files for extent in file.layout.extents]


@dataclass(frozen=True)
class Plan:
    """What the budget decided, and why."""

    # "full": everything fits | "partial": the most important files first, for as long as time permits
    kind: str
    because: str
    seconds: float  # what the save is expected to take
