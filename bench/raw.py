"""The limit: the same number of bytes moved between the disk and a few hot, aligned buffers, with nothing else done
to them.

Four ways to write, since which one is fastest depends on disk, file system and kernel. Each is tried with two and
with four threads.
"""

from __future__ import annotations

import enum
import itertools
import mmap
import os
import threading
from collections.abc import Callable
from pathlib import Path

from bench import disk
from bench.measure import Kind, Method

_CHUNK = 8 << 20
_PAGE = 4096
_RWF_DONTCACHE = 0x80


class Way(enum.Enum):
    """How the bytes reach the disk."""

    RECYCLED = "raw O_DIRECT, space written before"
    NEW = "raw O_DIRECT, new space"
    UNCACHED = "raw RWF_DONTCACHE"
    BUFFERED = "raw buffered + fsync"


def hot_buffer() -> memoryview:
    """Page-aligned, as O_DIRECT asks for; random, so that no layer below can take the easy way out."""
    buffer = mmap.mmap(-1, _CHUNK)
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
    def __init__(self, way: Way, folder: Path, nbytes: int, threads: int) -> None:
        super().__init__(f"{way.value}, {threads} threads", Kind.LIMIT, way.value)
        self._way = way
        self._nbytes = _rounded(nbytes)
        self._threads = threads
        self.path = folder / f"raw-{way.name.lower()}-{threads}.bin"

    def setup(self) -> None:
        self.buffers = [hot_buffer() for _ in range(self._threads)]
        if self._way is Way.RECYCLED:
            self._write(os.O_CREAT | os.O_DIRECT)

    def run(self) -> None:
        match self._way:
            case Way.RECYCLED:
                self._write(os.O_DIRECT)
            case Way.NEW:
                self._write(os.O_CREAT | os.O_DIRECT, allocate=True)
            case Way.UNCACHED:
                self._write(os.O_CREAT, flags=_RWF_DONTCACHE)
            case Way.BUFFERED:
                self._write(os.O_CREAT)

    def after(self) -> None:
        if self._way is not Way.RECYCLED:
            disk.clear(self.path)

    def close(self) -> None:
        disk.clear(self.path)

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
    """O_DIRECT: the page cache has no part in it, so it is cold each time."""

    def __init__(self, folder: Path, nbytes: int, threads: int) -> None:
        super().__init__(f"raw O_DIRECT read, {threads} threads", Kind.LIMIT, "raw O_DIRECT read")
        self._nbytes = _rounded(nbytes)
        self._threads = threads
        self._writer = RawWrite(Way.RECYCLED, folder, nbytes, threads)
        self.path = self._writer.path

    def setup(self) -> None:
        self._writer.setup()
        self.buffers = self._writer.buffers

    def run(self) -> None:
        fd = os.open(self.path, os.O_RDONLY | os.O_DIRECT)
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
    return [RawWrite(way, folder, nbytes, threads) for way in Way for threads in (2, 4)]
