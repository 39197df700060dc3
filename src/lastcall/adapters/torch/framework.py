"""A framework that has a checkpoint format of its own: its own save runs into a scratch folder, recorded, and
its files are what the core writes. Beside them lies the document of a plain torch run, with what the
framework does not know, or knows only as it is now.
"""

from __future__ import annotations

import abc
import contextlib
import io
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from lastcall import errors, memory
from lastcall.adapters.torch.randomness.rng import Captured
from lastcall.adapters.torch.recorded_save.boundary_buffers import BoundaryBuffers
from lastcall.adapters.torch.recorded_save.per_thread import shadowed
from lastcall.adapters.torch.state import modules
from lastcall.adapters.torch.subject import TorchSubject
from lastcall.storage import files as storage
from lastcall.types import Capture, Extent, File, FileLayout

_TOGETHER = (
    "the state is sharded over the ranks (FSDP, DeepSpeed): only all of them together can save it, and only "
    "at a boundary"
)


class FrameworkSubject(TorchSubject, abc.ABC):
    """A TorchSubject whose checkpoints are a framework's own files."""

    reads_all = False
    _native: Capture | None = None  # the last capture, as a plain torch run would have saved it

    def capture(self) -> Capture:
        return self._as_files(super().capture())

    def outline(self) -> Capture:
        """Nothing of the user's code runs for this: the state is about as large in the framework's format."""
        return super().capture()

    def unfinished(self) -> Capture:
        return self._as_files(super().unfinished())

    def rescue(self) -> Capture:
        if self.spread():  # its collectives would meet those of the training thread
            raise errors.StateError(_TOGETHER)
        copy = self._copy
        current = copy is not None and self._gate.steps == self.mark and copy.boundary == self.boundary
        return self._as_files(super().rescue(), copy.small if copy is not None and current else None)

    def unrescuable(self) -> str:
        if self.spread():
            return _TOGETHER
        return super().unrescuable()

    def part_of(self, rank: int, step: int, mine: Capture) -> Capture | None:
        native = self._native if self._native is not None and self._native.step == step else super().capture()
        found = self._part_of(rank, step, native)
        return None if found is None else self.dressed(found, (self.randomness_file(rank, found),))

    def _part_of(self, rank: int, step: int, native: Capture) -> Capture | None:
        return super().part_of(rank, step, native)

    def _as_files(self, native: Capture, small: object = None) -> Capture:
        self._native = native
        buffers = BoundaryBuffers(modules.copied_buffers(small))
        return buffers.judged(self.record(native, small, buffers))

    def randomness_of(self, capture: Capture) -> Captured:
        run: dict[str, Any] = capture.document["run"]  # type: ignore[assignment]
        return self._randomness.from_document(run["randomness"])

    # ---- what a framework says -----------------------------------------------------------------------------

    @abc.abstractmethod
    def spread(self) -> bool:
        """Whether the framework's save is one that all ranks do together: then no side thread can do it."""

    @abc.abstractmethod
    def record(self, native: Capture, small: object, buffers: BoundaryBuffers) -> Capture:
        """The capture with the framework's files. `small`: the boundary copy, where the live objects may not
        be read; `buffers`: those of the models in it."""

    @abc.abstractmethod
    def dressed(self, native: Capture, files: tuple[File, ...]) -> Capture:
        """With these files, and without what they hold."""

    @abc.abstractmethod
    def randomness_file(self, rank: int, capture: Capture) -> File:
        """The randomness in this capture, in the file that this rank has for it."""


@contextlib.contextmanager
def scratch(private: Path) -> Iterator[Path]:
    """A folder for a save to write into. What is left of it after a kill is removed on start."""
    folder = private / f"scratch-{storage.own_name()}"
    folder.mkdir(parents=True)
    try:
        yield folder
    finally:
        storage.remove_tree(storage.Files(), folder)


@contextlib.contextmanager
def leading() -> Iterator[int]:
    """Any rank may have to write what they all hold, and none may wait for another: for this thread it is
    rank 0, and alone."""
    owner = threading.get_ident()
    with (
        shadowed(dist, "barrier", lambda *args, **kwargs: None, owner),
        shadowed(dist, "get_rank", lambda *args, **kwargs: 0, owner),
    ):
        yield owner


def small_file(name: str, data: bytes, *, shared: bool = False) -> File:
    return File(FileLayout(name, len(data), (Extent(0, memory.BytesSource(data)),)), shared)


def pickled(name: str, value: object) -> File:
    """A small file that torch.load opens."""
    stream = io.BytesIO()
    torch.save(value, stream)
    return small_file(name, stream.getvalue())
