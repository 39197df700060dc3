"""The limit: the same number of bytes moved between the disk and a few hot, aligned buffers, with nothing
else done to them.

Four ways to write, since which one is fastest depends on disk, file system and kernel. Each is tried with
four and with sixteen threads. Space written before is that of three files in turn: who keeps two checkpoints
while writing the next has three. Beside it stands what no saver can do, writing over one and the same file: a
host that caches its guest's disk rewards that.
"""

from __future__ import annotations

import enum
import itertools
import mmap
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

from bench import disk
from bench.measure import Kind, Method

_CHUNK = 8 << 20
_PAGE = 4096
_RWF_DONTCACHE = 0x80
RECYCLED_FILES = 3


class Way(enum.Enum):
    """How the bytes reach the disk."""

    RECYCLED = "raw O_DIRECT, space written before"
    SAME = "raw O_DIRECT, one file over and over"
    NEW = "raw O_DIRECT, new space"
    UNCACHED = "raw RWF_DONTCACHE"
    BUFFERED = "raw buffered + fsync"


def hot_buffer() -> memoryview:
    """Page-aligned, as O_DIRECT asks for; in huge pages, which are fastest; random, so that no layer below
    can take the easy way out."""
    buffer = mmap.mmap(-1, _CHUNK, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    buffer.madvise(mmap.MADV_HUGEPAGE)
    buffer.write(os.urandom(_CHUNK))
    return memoryview(buffer)


def _rounded(nbytes: int) -> int:
    return -(-nbytes // _PAGE) * _PAGE


def _in_parallel(nbytes: int, threads: int, move: Callable[[int, int, int], None]) -> None:
    """Call move(thread, offset, length) for each chunk; the first error ends the run."""
    numbers = itertools.count()  # next() is atomic under the interpreter lock
    errors: list[BaseException] = []

    def work(thread: int) -> None:
        try:
            while not errors and (offset := next(numbers) * _CHUNK) < nbytes:
                move(thread, offset, min(_CHUNK, nbytes - offset))
        except BaseException as error:
            errors.append(error)

    workers = [threading.Thread(target=work, args=(number,)) for number in range(threads)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    if errors:
        raise errors[0]


class RawWrite(Method):
    def __init__(
        self, way: Way, folder: Path, nbytes: int, threads: int, turns: Iterator[int] | None = None
    ) -> None:
        super().__init__(
            f"{way.value}, {threads} threads", Kind.ASIDE if way is Way.SAME else Kind.LIMIT, way.value
        )
        self._way = way
        self._nbytes = _rounded(nbytes)
        self._threads = threads
        self._turns = turns or itertools.repeat(0)
        self.path = folder / f"raw-{way.name.lower()}-{threads}.bin"
        self._recycled = [folder / f"raw-recycled-{turn}.bin" for turn in range(RECYCLED_FILES)]

    def setup(self) -> None:
        self.buffers = [hot_buffer() for _ in range(self._threads)]
        match self._way:
            case Way.SAME:
                self._write(os.O_CREAT | os.O_DIRECT)
            case Way.RECYCLED:
                for path in self._recycled:
                    self.path = path
                    self._write(os.O_CREAT | os.O_DIRECT)

    def run(self) -> None:
        match self._way:
            case Way.SAME:
                self._write(os.O_DIRECT)
            case Way.RECYCLED:
                self.path = self._recycled[next(self._turns)]
                self._write(os.O_DIRECT)
            case Way.NEW:
                self._write(os.O_CREAT | os.O_DIRECT, allocate=True)
            case Way.UNCACHED:
                self._write(os.O_CREAT, flags=_RWF_DONTCACHE)
            case Way.BUFFERED:
                self._write(os.O_CREAT)

    def after(self) -> None:
        if self._way not in (Way.RECYCLED, Way.SAME):
            disk.clear(self.path)

    def close(self) -> None:
        disk.clear(self.path)
        if self._way is Way.RECYCLED:
            for path in self._recycled:
                disk.clear(path)

    def _write(self, how: int, flags: int = 0, allocate: bool = False) -> None:
        fd = os.open(self.path, os.O_WRONLY | how, 0o644)
        try:
            if allocate:
                os.posix_fallocate(fd, 0, self._nbytes)

            def move(thread: int, offset: int, length: int) -> None:
                done = 0
                while done < length:
                    done += os.pwritev(fd, [self.buffers[thread][done:length]], offset + done, flags)

            _in_parallel(self._nbytes, self._threads, move)
            os.fsync(fd)
        finally:
            os.close(fd)
        disk.fsync(self.path.parent)


class RawRead(Method):
    """O_DIRECT: the page cache has no part in it, so it is cold each time. `cached`: out of the page cache
    instead."""

    def __init__(self, folder: Path, nbytes: int, threads: int, *, cached: bool = False) -> None:
        what = "raw read from the page cache" if cached else "raw O_DIRECT read"
        super().__init__(f"{what}, {threads} threads", Kind.LIMIT, what)
        self._cached = cached
        self._nbytes = _rounded(nbytes)
        self._threads = threads
        self._writer = RawWrite(Way.SAME, folder, nbytes, threads)
        self.path = self._writer.path

    def setup(self) -> None:
        self._writer.setup()
        self.buffers = self._writer.buffers

    def before(self) -> None:
        if self._cached:
            self._read(os.O_RDONLY)

    def run(self) -> None:
        self._read(os.O_RDONLY | (0 if self._cached else os.O_DIRECT))

    def _read(self, flags: int) -> None:
        fd = os.open(self.path, flags)
        try:

            def move(thread: int, offset: int, length: int) -> None:
                done = 0
                while done < length:
                    got = os.preadv(fd, [self.buffers[thread][done:length]], offset + done)
                    if got == 0:
                        raise OSError(f"{self.path} ends at {offset + done}, before its {self._nbytes} bytes")
                    done += got

            _in_parallel(self._nbytes, self._threads, move)
        finally:
            os.close(fd)

    def close(self) -> None:
        self._writer.close()


def writes(folder: Path, nbytes: int) -> list[Method]:
    # shared: both numbers of threads write the same three files in turn
    turns = itertools.cycle(range(RECYCLED_FILES))
    return [RawWrite(way, folder, nbytes, threads, turns) for way in Way for threads in (4, 16)]
