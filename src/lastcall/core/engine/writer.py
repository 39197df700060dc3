"""The writer engine: files as lists of extents, moved by a few threads through small aligned buffers that
exist from the start.

A file is cut into chunks at fixed file offsets, whatever tensors lie there. A thread takes the next chunk,
digests it and writes it, straight from the tensors where alignment allows (`segments`), otherwise gathered in
its own buffer. So nothing large is allocated, the digest overlaps with the disk, and every byte of the file,
header included, is covered by a digest. Reading goes through the buffers.

Discarded: io_uring (no gain over threads here, blocked by many container profiles), one file a thread (files
of unequal size wait for the largest).
"""

from __future__ import annotations

import bisect
import errno
import functools
import io
import itertools
import os
import queue
import threading
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

from lastcall import errors, memory
from lastcall.core.engine import digest, segments
from lastcall.storage import errnos
from lastcall.storage import files as storage
from lastcall.types import FileLayout, FileRecord, Target

CHUNK = 4 * 1024 * 1024
_DIRECT_FROM = 1024 * 1024  # smaller files gain nothing from O_DIRECT


@dataclass
class Output:
    """A file to be written. With `fd` None its bytes are only digested. `direct`: opened with O_DIRECT."""

    layout: FileLayout
    fd: int | None
    direct: bool = False
    flags: int = 0
    # host memory is written from where it lies; turned off by a disk that wants whole pages
    in_place: bool = True
    chunks: list[str | None] = field(default_factory=list)

    @property
    def record(self) -> FileRecord | None:
        """What the commit record says of it, once every chunk is there."""
        chunks = [chunk for chunk in self.chunks if chunk is not None]
        if len(chunks) < len(self.chunks):
            return None
        return _recorded(self.layout.name, self.layout.size, chunks)


def recorded(name: str, data: BinaryIO | bytes) -> FileRecord:
    """What the commit record says of bytes that no engine has written."""
    file = io.BytesIO(data) if isinstance(data, bytes) else data
    chunks = [digest.of(chunk) for chunk in iter(lambda: file.read(CHUNK), b"")]
    return _recorded(name, file.tell(), chunks)


def _recorded(name: str, size: int, chunks: Sequence[str]) -> FileRecord:
    return FileRecord(name, size, digest.over(chunks), CHUNK, tuple(chunks))


@dataclass(frozen=True)
class FilePiece:
    """The destination of bytes of a file on restore."""

    offset: int
    target: Target


@dataclass(frozen=True)
class Input:
    """A file to be read: every chunk is checked against its digest before a byte of it reaches a target. No
    two pieces overlap."""

    fd: int
    record: FileRecord
    pieces: Sequence[FilePiece]
    direct: bool
    digest: digest.Digest = digest.of
    chunks: Collection[int] | None = None  # the numbers of those to be read; None: all of them

    @property
    def numbers(self) -> Iterable[int]:
        return range(len(self.record.chunks)) if self.chunks is None else sorted(self.chunks)


class Engine:
    """A few threads with a buffer each, parked until there is work. One piece of work at a time."""

    def __init__(
        self,
        threads: int = 16,
        files: storage.Files | None = None,
        allocate: Callable[[int], memory.Buffer] = memory.PageBuffer,
    ) -> None:
        self._files = files or storage.Files()
        self._buffers = [allocate(CHUNK) for _ in range(threads)]
        self._work: queue.SimpleQueue[Callable[[memory.Buffer], None] | None] = queue.SimpleQueue()
        self._one_at_a_time = threading.Lock()
        self._threads = [
            threading.Thread(target=self._serve, args=(buffer,), name=f"lastcall-writer-{n}", daemon=True)
            for n, buffer in enumerate(self._buffers)
        ]
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        for _ in self._threads:
            self._work.put(None)
        for thread in self._threads:
            thread.join()

    def write(self, outputs: Sequence[Output], cancelled: Callable[[], bool] = lambda: False) -> None:
        """Write the files in the order given; each has a `record` afterwards. When `cancelled` turns true the
        files that are complete by then have theirs, the others None. fsync is the caller's."""
        for output in outputs:
            output.chunks = [None] * -(-output.layout.size // CHUNK)
        jobs = [(output, index) for output in outputs for index in range(len(output.chunks))]
        starts = {id(output): [extent.offset for extent in output.layout.extents] for output in outputs}

        def one(buffer: memory.Buffer, job: tuple[Output, int]) -> None:
            output, index = job
            begin = index * CHUNK
            count = min(CHUNK, output.layout.size - begin)
            while True:
                in_place = output.in_place
                views = segments.gather(
                    output.layout.extents,
                    starts[id(output)],
                    begin,
                    count,
                    buffer,
                    in_place=in_place,
                    sectors=output.direct,
                )
                seen = digest.of_pieces(views)
                if output.fd is not None and not self._put(
                    output, output.fd, views, begin, count, buffer, in_place
                ):
                    continue
                break
            output.chunks[index] = seen  # only now: a chunk that failed must not look complete

        self._run(jobs, one, cancelled)

    def read(self, inputs: Sequence[Input]) -> None:
        """Read, check and hand out the files. CheckpointError at the first chunk that does not match its
        digest."""
        for source in inputs:
            if source.record.chunk > CHUNK or source.record.chunk % memory.ALIGNMENT:
                raise errors.CheckpointError(
                    f"{source.record.name}: chunks of {source.record.chunk} bytes are not read here"
                )
        jobs = [(source, index) for source in inputs for index in source.numbers]
        # Without the empty ones: they share their offset with a neighbour, which bisect would then miss.
        pieces = {id(source): [piece for piece in source.pieces if piece.target.nbytes] for source in inputs}
        starts = {key: [piece.offset for piece in found] for key, found in pieces.items()}

        def one(buffer: memory.Buffer, job: tuple[Input, int]) -> None:
            source, index = job
            begin = index * source.record.chunk
            count = min(source.record.chunk, source.record.size - begin)
            self._fill(source, buffer, begin, count)
            if source.digest(buffer.view[:count]) != source.record.chunks[index]:
                raise errors.CheckpointError(
                    f"{source.record.name}: the bytes from {begin} to {begin + count} do not match their "
                    "digest"
                )
            _scatter(pieces[id(source)], starts[id(source)], begin, count, buffer.address)

        self._run(jobs, one, lambda: False)

    def copy(self, copies: Sequence[Callable[[], None]]) -> None:
        """Run plain copies (memory to memory) on the engine's threads."""
        self._run(list(copies), lambda _buffer, one: one(), lambda: False)

    def _put(
        self,
        output: Output,
        fd: int,
        views: list[memoryview],
        begin: int,
        count: int,
        buffer: memory.Buffer,
        in_place: bool,
    ) -> bool:
        """Write a chunk. False where this disk refuses pieces that lie on sectors only: then all goes through
        the buffer."""
        try:
            padded = segments.pad(views, begin, count, buffer) if output.direct else views
            storage.write_all(self._files, fd, padded, begin, output.flags)
        except OSError as error:
            if error.errno != errno.EINVAL or not (output.direct and in_place):
                raise
            output.in_place = False
            return False
        return True

    def _fill(self, source: Input, buffer: memory.Buffer, begin: int, count: int) -> None:
        done = 0
        whole = _round_up(count) if source.direct else count
        while done < count:
            view, at = buffer.view[done:whole], begin + done
            got = errnos.reading(
                functools.partial(self._files.pread, source.fd, view, at),
                f"{source.record.name}: cannot be read at {at}",
            )
            if source.direct and done + got < count:
                got -= got % memory.ALIGNMENT  # a short direct read continues from an aligned offset
            if got <= 0:
                raise errors.CheckpointError(
                    f"{source.record.name}: ends at {begin + done}, {source.record.size} were recorded"
                )
            done += got

    def _serve(self, buffer: memory.Buffer) -> None:
        while (task := self._work.get()) is not None:
            task(buffer)

    def _run(self, jobs: list, one: Callable, cancelled: Callable[[], bool]) -> None:  # type: ignore[type-arg]
        """Let every thread take jobs in order until none is left, one fails or the work is cancelled; raise
        the first failure."""
        if not jobs:
            return
        failures: list[BaseException] = []
        numbers = itertools.count()
        workers = min(len(self._threads), len(jobs))
        ended = itertools.count(1)
        all_ended = threading.Event()

        def task(buffer: memory.Buffer) -> None:
            try:
                while not failures and not cancelled():
                    number = next(numbers)  # atomic under the GIL
                    if number >= len(jobs):
                        break
                    one(buffer, jobs[number])
            except BaseException as error:  # handed to the caller below
                failures.append(error)
            finally:
                if next(ended) == workers:
                    all_ended.set()

        with self._one_at_a_time:
            for _ in range(workers):
                self._work.put(task)
            while not all_ended.is_set():
                try:
                    all_ended.wait()
                except BaseException as error:
                    # Ctrl-C: the caller closes files that the threads still write to
                    failures.append(error)
        if failures:
            raise failures[0]


def _round_up(count: int) -> int:
    return -(-count // memory.ALIGNMENT) * memory.ALIGNMENT


def _scatter(pieces: Sequence[FilePiece], starts: list[int], begin: int, count: int, address: int) -> None:
    end = begin + count
    index = max(bisect.bisect_right(starts, begin) - 1, 0)
    for piece in itertools.islice(pieces, index, None):
        if piece.offset >= end:
            break
        first = max(begin, piece.offset)
        last = min(end, piece.offset + piece.target.nbytes)
        if last > first:
            piece.target.write_from(address + first - begin, first - piece.offset, last - first)


def is_large(layout: FileLayout) -> bool:
    return layout.size >= _DIRECT_FROM


def opened(
    files: storage.Files, path: Path, layout: FileLayout, *, direct: bool = True, allocate: bool = True
) -> Output:
    """A file to be written, a large one with O_DIRECT and with space for all of it. The caller closes it."""
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW
    large = is_large(layout)
    fd, direct = open_direct(files, path, flags) if large and direct else (files.open(path, flags), False)
    if large and allocate:
        try:
            files.allocate(fd, layout.size)
        except OSError as error:
            if error.errno not in (errno.ENOTSUP, errno.EINVAL):
                files.close(fd)
                raise
    return Output(layout, fd, direct)


def open_direct(files: storage.Files, path: Path, flags: int) -> tuple[int, bool]:
    """Open with O_DIRECT where the file system takes it (tmpfs, NFS and overlays may not), otherwise
    without."""
    try:
        return files.open(path, flags | os.O_DIRECT), True
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
        return files.open(path, flags), False
