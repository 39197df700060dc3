"""Preparing space for the next checkpoint, off the training thread: which way of writing is fastest here, and
how fast it is.

The answer is measured on the disk that will be written to, while the spare files are being written, never
guessed from its name.
"""

from __future__ import annotations

import contextlib
import enum
import errno
import logging
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from lastcall import memory
from lastcall.core.checkpoint.catalog import Catalog
from lastcall.core.engine import writer
from lastcall.core.save.budget import Budget
from lastcall.storage import files as storage
from lastcall.types import Extent, FileLayout

log = logging.getLogger("lastcall")
# bytes that a checkpoint takes besides its files: blocks that are not full, the record, folders
_MARGIN = 128 * 1024
_INODES = 100  # more than the files of a checkpoint
_PROBE = 64 * 1024 * 1024  # enough to keep all threads busy
_CLEARLY = (
    # how much faster another way than direct must be: bursts flatter the page cache (1.9 times at 64 MB, 0.5
    # times at 4 GB here)
    2.5
)


class Method(enum.Enum):
    """How large files are written."""

    DIRECT = "direct"  # O_DIRECT: past the page cache
    DONTCACHE = "dontcache"  # buffered, pages dropped once written (Linux 6.14)
    BUFFERED = "buffered"  # through the page cache, then fsync

    @property
    def flags(self) -> int:
        return storage.RWF_DONTCACHE if self is Method.DONTCACHE else 0


def warn_if_short(catalog: Catalog, needed: int) -> bool:
    """Warn early when there is no room for the next checkpoint. Spare files count as room."""
    try:
        free = catalog.files.free_bytes(catalog.root) + sum(catalog.spares.sizes())
        inodes = catalog.files.free_inodes(catalog.root)
    except OSError:
        return False
    if inodes is not None and inodes < _INODES:
        log.warning(
            "The file system of %s has only %d inodes left (df -i): the next checkpoint may fail unless you "
            "remove files",
            catalog.root, inodes,
        )  # fmt: skip
        return True
    if needed + _MARGIN <= free:
        return False
    log.warning(
        "The next checkpoint needs %.1f MB in %s, but only %.1f MB are free: it will fail unless you make "
        "room",
        needed / 1e6,
        catalog.root,
        free / 1e6,
    )
    return True


class Preparation:
    """Writes the spare files that a checkpoint of these sizes needs, and measures on the way."""

    def __init__(
        self, catalog: Catalog, engine: writer.Engine, budget: Budget, cancelled: Callable[[], bool]
    ) -> None:
        self._catalog = catalog
        self._engine = engine
        self._buffer = memory.PageBuffer(_PROBE)
        self._files = catalog.files
        self._budget = budget
        self._cancelled = cancelled
        self.method: Method | None = None

    def run(self, sizes: Sequence[int]) -> bool:
        """True when space for a checkpoint of these file sizes is ready. Never raises for a full or failing
        disk."""
        try:
            if not self.check(sizes):
                return False
            for size in self._missing(sizes):
                if not self._spare(size):
                    return False
        except OSError as error:
            log.warning("Could not prepare space for the next checkpoint: %s", error)
            return False
        return True

    def check(self, sizes: Sequence[int]) -> bool:
        """Warn early when there is no room for the next checkpoint."""
        return not warn_if_short(self._catalog, sum(sizes))

    def _missing(self, sizes: Sequence[int]) -> list[int]:
        """The sizes that no spare file serves yet, largest first."""
        missing = []
        spares = sorted(self._catalog.spares.sizes())
        for size in sorted((size for size in sizes if size >= 1024 * 1024), reverse=True):
            if spares and spares[-1] >= size:
                spares.pop()
            else:
                missing.append(size)
        return missing

    def _spare(self, size: int) -> bool:
        under = self._catalog.preparing
        try:
            if self.method is None and size >= 2 * _PROBE:
                self._probe(under)
            began = time.perf_counter()
            if not self._fill(under, size, self.method or Method.DIRECT):
                return False
            self._budget.observe(size, time.perf_counter() - began)
            return self._catalog.spares.give(under, fresh=True)
        finally:
            with contextlib.suppress(OSError):
                self._files.unlink(under)

    def _probe(self, path: Path) -> None:
        """Write over the same piece with each method in turn, as a save will write over spare space; the
        fastest wins."""
        if not self._fill(path, _PROBE, Method.DIRECT):
            return
        seconds: dict[Method, float] = {}
        for method in [*Method, *Method]:
            began = time.perf_counter()
            try:
                if not self._fill(path, _PROBE, method):
                    return
            except OSError as error:
                if error.errno not in (errno.EINVAL, errno.ENOTSUP):
                    raise
                continue  # this kernel or file system does not know the method
            took = time.perf_counter() - began
            seconds[method] = min(took, seconds.get(method, took))
        if seconds:
            # What this finds are file systems on which O_DIRECT is slow (some network ones). Where it is not,
            # it depends neither on the page cache nor on memory pressure.
            self.method = min(
                seconds, key=lambda method: seconds[method] * (1.0 if method is Method.DIRECT else _CLEARLY)
            )
            log.debug(
                "Write methods measured on %s: %s",
                self._catalog.root,
                {m.value: round(s, 3) for m, s in seconds.items()},
            )

    def _fill(self, path: Path, size: int, method: Method) -> bool:
        """Write a file of that size, the way a save does: by the engine's threads, from memory that is not
        copied."""
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW
        if method is Method.DIRECT:
            fd, direct = writer.open_direct(self._files, path, flags)
        else:
            fd, direct = self._files.open(path, flags), False
        try:
            output = writer.Output(self._layout(size), fd, direct, 0 if direct else method.flags)
            self._engine.write([output], self._cancelled)
            self._files.fsync(fd)
        finally:
            self._files.close(fd)
        return output.record is not None

    def _layout(self, size: int) -> FileLayout:
        """Anything of that size: the same memory over and over. Not a single chunk of it: threads that write
        from one place at a time hold each other up, which a save does not."""
        buffer = self._buffer
        extents = [
            Extent(offset, memory.HostMemory(buffer.address, min(_PROBE, size - offset), buffer))
            for offset in range(0, size, _PROBE)
        ]
        return FileLayout("spare", size, tuple(extents))
