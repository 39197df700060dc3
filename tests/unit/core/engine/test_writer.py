from __future__ import annotations

import errno
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import xxhash

from helpers.core.bare_core import block, content, flip, noise
from lastcall import errors, memory, testing
from lastcall.core.engine import writer
from lastcall.storage import files as storage
from lastcall.types import Extent, FileLayout, FileRecord

SMALL = 8192  # a chunk, in most of these tests


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer, "CHUNK", SMALL)


@pytest.fixture
def engine() -> Iterator[writer.Engine]:
    made = writer.Engine(3)
    yield made
    made.close()


def layout(name: str, pieces: list[bytes]) -> FileLayout:
    extents, offset = [], 0
    for piece in pieces:
        extents.append(Extent(offset, block(piece)))
        offset += len(piece)
    return FileLayout(name, offset, tuple(extents))


def write(engine: writer.Engine, path: Path, pieces: list[bytes], direct: bool = False) -> FileRecord:
    flags = os.O_RDWR | os.O_CREAT
    fd, is_direct = (
        writer.open_direct(storage.Files(), path, flags) if direct else (os.open(path, flags), False)
    )
    output = writer.Output(layout(path.name, pieces), fd, is_direct)
    try:
        engine.write([output])
        os.ftruncate(fd, output.layout.size)
    finally:
        os.close(fd)
    assert output.record is not None
    return output.record


def read(
    engine: writer.Engine, path: Path, record: FileRecord, sizes: list[int], direct: bool = False
) -> list[bytes]:
    targets, pieces, offset = [block(bytes(size)) for size in sizes], [], 0
    for target in targets:
        pieces.append(writer.FilePiece(offset, target))
        offset += target.nbytes
    fd, is_direct = (
        writer.open_direct(storage.Files(), path, os.O_RDONLY)
        if direct
        else (os.open(path, os.O_RDONLY), False)
    )
    try:
        engine.read([writer.Input(fd, record, pieces, is_direct)])
    finally:
        os.close(fd)
    return [content(target) for target in targets]


BORDERS = [0, 1, 4095, 4096, 4097, SMALL - 1, SMALL, SMALL + 1, 3 * SMALL, 5 * SMALL + 17]


@pytest.mark.parametrize("direct", [False, True])
@pytest.mark.parametrize("size", BORDERS)
def test_bytes_come_back_for_sizes_around_the_borders_of_a_chunk(
    engine: writer.Engine, tmp_path: Path, size: int, direct: bool
) -> None:
    data = noise(size, size)
    record = write(engine, tmp_path / "f", [data], direct)
    assert (tmp_path / "f").read_bytes() == data
    assert record.size == size
    assert read(engine, tmp_path / "f", record, [size], direct) == [data]


@pytest.mark.parametrize("direct", [False, True])
def test_bytes_come_back_with_chunks_of_the_real_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, direct: bool
) -> None:
    monkeypatch.undo()
    assert writer.CHUNK % memory.ALIGNMENT == 0
    sizes = [writer.CHUNK - 1, writer.CHUNK + 2, 5]
    pieces = [noise(size, size) for size in sizes]
    engine = writer.Engine(4)
    record = write(engine, tmp_path / "f", pieces, direct)
    assert len(record.chunks) == 3
    assert read(engine, tmp_path / "f", record, sizes, direct) == pieces
    engine.close()


def test_digests_are_those_of_the_pieces_of_the_file(engine: writer.Engine, tmp_path: Path) -> None:
    data = noise(2 * SMALL + 100, 1)
    record = write(engine, tmp_path / "f", [data[:3000], data[3000:]])
    pieces = [data[begin : begin + SMALL] for begin in range(0, len(data), SMALL)]
    assert list(record.chunks) == [xxhash.xxh3_128_hexdigest(piece) for piece in pieces]
    assert record.digest == xxhash.xxh3_128_hexdigest("".join(record.chunks).encode())
    assert record.chunk == SMALL


@pytest.mark.parametrize("direct", [False, True])
def test_many_small_extents_share_a_chunk_and_one_spans_many(
    engine: writer.Engine, tmp_path: Path, direct: bool
) -> None:
    sizes = [1, 2, 3, 0, 700, 0, 4 * SMALL + 9, 0, 5, 64, 0]
    pieces = [noise(size, number) for number, size in enumerate(sizes)]
    record = write(engine, tmp_path / "f", pieces, direct)
    assert (tmp_path / "f").read_bytes() == b"".join(pieces)
    assert read(engine, tmp_path / "f", record, sizes, direct) == pieces


def test_five_hundred_tensors_over_chunk_borders_come_back(engine: writer.Engine, tmp_path: Path) -> None:
    sizes = [(number * 37) % 211 for number in range(500)]
    pieces = [noise(size, number) for number, size in enumerate(sizes)]
    record = write(engine, tmp_path / "f", pieces)
    assert read(engine, tmp_path / "f", record, sizes) == pieces


def test_several_files_are_written_at_once(engine: writer.Engine, tmp_path: Path) -> None:
    pieces = {f"f{n}": noise(n * 5000, n) for n in range(6)}
    outputs = [
        writer.Output(layout(n, [data]), os.open(tmp_path / n, os.O_RDWR | os.O_CREAT))
        for n, data in pieces.items()
    ]
    engine.write(outputs)
    for output in outputs:
        assert output.fd is not None and output.record is not None
        os.close(output.fd)
        assert (tmp_path / output.layout.name).read_bytes() == pieces[output.layout.name]


def test_a_file_without_a_descriptor_is_only_digested(engine: writer.Engine, tmp_path: Path) -> None:
    output = writer.Output(layout("f", [noise(20_000, 1)]), None)
    engine.write([output])
    assert output.record == write(engine, tmp_path / "f", [noise(20_000, 1)])


def test_an_empty_target_beside_a_large_one_takes_nothing_from_it(
    engine: writer.Engine, tmp_path: Path
) -> None:
    data = noise(3 * SMALL, 1)
    record = write(engine, tmp_path / "f", [data])
    target = block(bytes(len(data)))
    fd = os.open(tmp_path / "f", os.O_RDONLY)
    engine.read(
        [writer.Input(fd, record, [writer.FilePiece(0, target), writer.FilePiece(0, block(b""))], False)]
    )
    os.close(fd)
    assert content(target) == data


def test_only_the_wanted_bytes_are_handed_out_but_all_are_checked(
    engine: writer.Engine, tmp_path: Path
) -> None:
    data = noise(4 * SMALL, 1)
    record = write(engine, tmp_path / "f", [data])
    target = block(bytes(SMALL))
    fd = os.open(tmp_path / "f", os.O_RDONLY)
    engine.read([writer.Input(fd, record, [writer.FilePiece(SMALL + 5, target)], False)])
    assert content(target) == data[SMALL + 5 : 2 * SMALL + 5]
    flip(tmp_path / "f", -1)
    with pytest.raises(errors.CheckpointError):
        engine.read([writer.Input(fd, record, [writer.FilePiece(SMALL + 5, target)], False)])
    os.close(fd)


@pytest.mark.parametrize("direct", [False, True])
@pytest.mark.parametrize("position", [0, 7, SMALL - 1, SMALL, 2 * SMALL + 3, 3 * SMALL, -1])
def test_a_flipped_byte_is_found_wherever_it_is(
    engine: writer.Engine, tmp_path: Path, position: int, direct: bool
) -> None:
    data = noise(3 * SMALL + 50, 1)
    record = write(engine, tmp_path / "f", [data])
    flip(tmp_path / "f", position)
    with pytest.raises(errors.CheckpointError, match="f: the bytes from .* do not match their digest"):
        read(engine, tmp_path / "f", record, [len(data)], direct)


def test_bytes_that_do_not_match_reach_no_target(engine: writer.Engine, tmp_path: Path) -> None:
    record = write(engine, tmp_path / "f", [noise(100, 1)])
    flip(tmp_path / "f", 50)
    target = block(b"\x11" * 100)
    fd = os.open(tmp_path / "f", os.O_RDONLY)
    with pytest.raises(errors.CheckpointError):
        engine.read([writer.Input(fd, record, [writer.FilePiece(0, target)], False)])
    os.close(fd)
    assert content(target) == b"\x11" * 100


@pytest.mark.parametrize("direct", [False, True])
@pytest.mark.parametrize("left", [0, 100, 4096, SMALL, SMALL + 100, 2 * SMALL + 4196, 3 * SMALL + 49])
def test_a_truncated_file_is_refused(engine: writer.Engine, tmp_path: Path, left: int, direct: bool) -> None:
    data = noise(3 * SMALL + 50, 1)
    record = write(engine, tmp_path / "f", [data])
    os.truncate(tmp_path / "f", left)
    with pytest.raises(errors.CheckpointError, match=f"ends at .*, {len(data)} were recorded"):
        read(engine, tmp_path / "f", record, [len(data)], direct)


@pytest.mark.parametrize("chunk", [SMALL + 4096, 1 << 40, 4095, 1])
def test_a_record_with_chunks_that_do_not_fit_the_buffers_is_refused(
    engine: writer.Engine, tmp_path: Path, chunk: int
) -> None:
    (tmp_path / "f").write_bytes(b"x")
    with pytest.raises(errors.CheckpointError, match=f"chunks of {chunk} bytes"):
        read(engine, tmp_path / "f", FileRecord("f", 1, "", chunk, ("",)), [1])


def test_smaller_chunks_of_an_earlier_version_are_read(
    engine: writer.Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = noise(20_000, 1)
    with monkeypatch.context() as patch:
        patch.setattr(writer, "CHUNK", 4096)
        record = write(engine, tmp_path / "f", [data])
    assert read(engine, tmp_path / "f", record, [len(data)], True) == [data]


class ShortReads(storage.Files):
    def pread(self, fd: int, data: memoryview, offset: int) -> int:
        return super().pread(fd, data[: max(1, len(data) // 3)], offset)


@pytest.mark.parametrize("direct", [False, True])
def test_short_reads_are_continued(tmp_path: Path, engine: writer.Engine, direct: bool) -> None:
    class Aligned(ShortReads):
        def pread(self, fd: int, data: memoryview, offset: int) -> int:
            return storage.Files.pread(self, fd, data[:4096], offset)

    data = noise(2 * SMALL + 77, 1)
    record = write(engine, tmp_path / "f", [data])
    reader = writer.Engine(2, Aligned() if direct else ShortReads())
    assert read(reader, tmp_path / "f", record, [len(data)], direct) == [data]
    reader.close()


def test_a_sector_that_cannot_be_read_is_damage_and_other_errors_are_not(
    tmp_path: Path, engine: writer.Engine
) -> None:
    class Broken(storage.Files):
        code = errno.EIO

        def pread(self, fd: int, data: memoryview, offset: int) -> int:
            raise OSError(self.code, os.strerror(self.code))

    record = write(engine, tmp_path / "f", [b"data"])
    files = Broken()
    reader = writer.Engine(1, files)
    with pytest.raises(errors.CheckpointError, match="f: cannot be read at 0"):
        read(reader, tmp_path / "f", record, [4])
    files.code = errno.EACCES
    with pytest.raises(PermissionError):
        read(reader, tmp_path / "f", record, [4])
    reader.close()


@pytest.mark.parametrize("direct", [False, True])
def test_short_writes_are_continued(tmp_path: Path, engine: writer.Engine, direct: bool) -> None:
    files = testing.FaultyFiles(
        testing.Fault("pwrite", 1, short=True), testing.Fault("pwrite", 3, short=True)
    )
    faulty = writer.Engine(2, files)
    data = noise(3 * SMALL + 77, 1)
    record = write(faulty, tmp_path / "f", [data], direct)
    faulty.close()
    assert files.calls["pwrite"] >= 5  # for four chunks
    assert (tmp_path / "f").read_bytes() == data
    assert read(engine, tmp_path / "f", record, [len(data)]) == [data]


@pytest.mark.parametrize("number", [1, 2, 3, 4])
def test_an_error_in_any_chunk_reaches_the_caller_and_the_engine_goes_on(tmp_path: Path, number: int) -> None:
    engine = writer.Engine(2, testing.FaultyFiles(testing.Fault("pwrite", number, errno.EIO)))
    data = noise(4 * SMALL, 1)
    fd = os.open(tmp_path / "f", os.O_RDWR | os.O_CREAT)
    output = writer.Output(layout("f", [data]), fd)
    with pytest.raises(OSError, match="Input/output") as caught:
        engine.write([output])
    assert caught.value.errno == errno.EIO
    assert output.record is None
    engine.write([output])
    assert output.record is not None
    os.close(fd)
    assert (tmp_path / "f").read_bytes() == data
    engine.close()


class Source:
    """A source that calls back before it is read."""

    nbytes = SMALL

    def __init__(self, call: object) -> None:
        self._call = call

    def read_into(self, address: int, offset: int, nbytes: int) -> None:
        self._call()  # type: ignore[operator]


def test_an_error_of_a_source_reaches_the_caller(engine: writer.Engine) -> None:
    def fail() -> None:
        raise RuntimeError("the device is gone")

    output = writer.Output(FileLayout("f", SMALL, (Extent(0, Source(fail)),)), None)
    with pytest.raises(RuntimeError, match="the device is gone"):
        engine.write([output])
    assert output.record is None


def test_after_a_cancel_only_complete_files_have_a_record() -> None:
    engine = writer.Engine(1)
    looks = iter(range(100))
    outputs = [writer.Output(layout(f"f{n}", [noise(3 * SMALL, n)]), None) for n in range(3)]
    engine.write(outputs, lambda: next(looks) >= 4)
    engine.close()
    assert [output.record is not None for output in outputs] == [True, False, False]
    assert [sum(chunk is not None for chunk in output.chunks) for output in outputs] == [3, 1, 0]


def test_a_cancel_before_the_beginning_writes_nothing(tmp_path: Path, engine: writer.Engine) -> None:
    fd = os.open(tmp_path / "f", os.O_RDWR | os.O_CREAT)
    output = writer.Output(layout("f", [b"x" * SMALL]), fd)
    engine.write([output], lambda: True)
    os.close(fd)
    assert output.record is None
    assert (tmp_path / "f").read_bytes() == b""


class Interrupt(BaseException):
    """What Ctrl-C is, without pytest stopping."""


def test_ctrl_c_returns_only_when_no_thread_writes_any_more(engine: writer.Engine) -> None:
    reading, go_on, ended = threading.Event(), threading.Event(), threading.Event()

    def slow() -> None:
        reading.set()
        go_on.wait(60)
        ended.set()

    def handler(*_: object) -> None:
        go_on.set()
        raise Interrupt

    def strike() -> None:
        reading.wait(60)
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGUSR1)

    before = signal.signal(signal.SIGUSR1, handler)
    striker = threading.Thread(target=strike)
    try:
        striker.start()
        with pytest.raises(Interrupt):
            engine.write([writer.Output(FileLayout("f", SMALL, (Extent(0, Source(slow)),)), None)])
        assert ended.is_set()
    finally:
        striker.join()
        signal.signal(signal.SIGUSR1, before)
    output = writer.Output(layout("f", [b"x"]), None)
    engine.write([output])
    assert output.record is not None


def test_plain_copies_run_on_the_engines_threads(engine: writer.Engine) -> None:
    names: list[str] = []
    engine.copy([lambda: names.append(threading.current_thread().name)] * 20)
    assert len(names) == 20
    assert all(name.startswith("lastcall-writer-") for name in names)

    def fail() -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        engine.copy([fail])
    engine.copy([])


def test_work_of_several_callers_takes_turns(engine: writer.Engine, tmp_path: Path) -> None:
    pieces = {f"f{n}": noise(6 * SMALL + n, n) for n in range(4)}
    threads = [
        threading.Thread(target=write, args=(engine, tmp_path / n, [data])) for n, data in pieces.items()
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {name: (tmp_path / name).read_bytes() for name in pieces} == pieces


def test_a_closed_engine_has_no_threads_left() -> None:
    before = threading.active_count()
    engine = writer.Engine(5)
    assert threading.active_count() == before + 5
    engine.close()
    assert threading.active_count() == before


class NoDirect(storage.Files):
    def __init__(self, code: int) -> None:
        self._code = code

    def open(self, path: Path, flags: int, mode: int = 0o644) -> int:
        if flags & os.O_DIRECT:
            raise OSError(self._code, os.strerror(self._code))
        return super().open(path, flags, mode)


@pytest.mark.parametrize("code", [errno.EINVAL, errno.ENOTSUP])
def test_a_file_system_without_direct_writes_is_written_through_the_cache(tmp_path: Path, code: int) -> None:
    fd, direct = writer.open_direct(NoDirect(code), tmp_path / "f", os.O_RDWR | os.O_CREAT)
    os.close(fd)
    assert not direct


def test_other_errors_of_opening_are_not_hidden(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="No space"):
        writer.open_direct(NoDirect(errno.ENOSPC), tmp_path / "f", os.O_RDWR | os.O_CREAT)
