from __future__ import annotations

import mmap
import os
import signal
from pathlib import Path

import pytest

from helpers.core.bare_core import mounted
from helpers.processes.scripts import Script
from lastcall import testing
from lastcall.storage import files as storage
from lastcall.storage import spare


@pytest.fixture
def pool(tmp_path: Path) -> spare.SparePool:
    return spare.SparePool(tmp_path / "spare", storage.Files())


def file(path: Path, size: int) -> Path:
    path.write_bytes(b"x" * size)
    return path


def fill(pool: spare.SparePool, folder: Path, *sizes: int) -> None:
    for number, size in enumerate(sizes):
        assert pool.give(file(folder / f"file-{number}", size))


def test_a_pool_without_a_folder_is_empty(pool: spare.SparePool, tmp_path: Path) -> None:
    assert pool.sizes() == []
    assert not pool.take(10, tmp_path / "new")
    assert pool.clear() == 0
    pool.trim(1, 1)


def test_a_file_given_is_the_file_taken(pool: spare.SparePool, tmp_path: Path) -> None:
    inode = file(tmp_path / "old", 100).stat().st_ino
    assert pool.give(tmp_path / "old")
    assert not (tmp_path / "old").exists()
    assert pool.sizes() == [100]
    assert pool.take(100, tmp_path / "new")
    assert (tmp_path / "new").stat().st_ino == inode
    assert pool.sizes() == []


@pytest.mark.parametrize(("wanted", "got"), [(1, 10), (10, 10), (11, 20), (25, 30), (31, 30), (1000, 30)])
def test_the_best_fitting_spare_is_taken(
    pool: spare.SparePool, tmp_path: Path, wanted: int, got: int
) -> None:
    fill(pool, tmp_path, 20, 10, 30)
    assert pool.take(wanted, tmp_path / "new")
    assert (tmp_path / "new").stat().st_size == got


def test_the_largest_spares_are_kept_within_count_and_bytes(pool: spare.SparePool, tmp_path: Path) -> None:
    fill(pool, tmp_path, 10, 20, 30, 40)
    pool.trim(3, 1000)
    assert pool.sizes() == [20, 30, 40]
    pool.trim(3, 65)
    assert pool.sizes() == [20, 40]
    assert pool.clear() == 60
    assert pool.sizes() == []


def test_a_file_with_a_second_name_is_not_recycled(pool: spare.SparePool, tmp_path: Path) -> None:
    file(tmp_path / "old", 10)
    os.link(tmp_path / "old", tmp_path / "second")
    assert not pool.give(tmp_path / "old")
    assert (tmp_path / "old").read_bytes() == b"x" * 10
    os.unlink(tmp_path / "second")
    assert pool.give(tmp_path / "old")


@pytest.mark.parametrize("flags", [os.O_RDONLY, os.O_WRONLY, os.O_RDWR])
def test_a_file_that_this_process_has_open_is_not_recycled(
    pool: spare.SparePool, tmp_path: Path, flags: int
) -> None:
    fd = os.open(file(tmp_path / "old", 10), flags)
    assert not pool.give(tmp_path / "old")
    os.close(fd)
    assert pool.give(tmp_path / "old")


def test_a_file_that_this_process_has_mapped_is_not_recycled(pool: spare.SparePool, tmp_path: Path) -> None:
    fd = os.open(file(tmp_path / "old", 10), os.O_RDONLY)
    mapped = mmap.mmap(fd, 10, mmap.MAP_PRIVATE, mmap.PROT_READ)
    os.close(fd)
    assert not pool.give(tmp_path / "old")
    mapped.close()
    assert pool.give(tmp_path / "old")


READER = """
    import ctypes, os, signal, sys
    fd = os.open({path!r}, os.O_RDONLY)
    if {mapped}:
        libc = ctypes.CDLL(None, use_errno=True)
        libc.mmap.restype = ctypes.c_void_p
        libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
        where = libc.mmap(None, 4096, 1, {sharing}, fd, 0)
        os.close(fd)
        assert not any(os.readlink(f"/proc/self/fd/{{n}}") == {path!r} for n in range(20) if os.path.lexists(f"/proc/self/fd/{{n}}"))
        assert ctypes.string_at(where, 1) == b"x"
    print("reading", flush=True)
    signal.pause()
"""  # noqa: E501


@pytest.mark.parametrize(
    ("mapped", "sharing"), [(False, 0), (True, mmap.MAP_SHARED), (True, mmap.MAP_PRIVATE)]
)
def test_a_file_that_another_process_reads_is_not_recycled(
    pool: spare.SparePool, tmp_path: Path, mapped: bool, sharing: int
) -> None:
    old = file(tmp_path / "old", 8192)
    with Script(tmp_path, READER.format(path=str(old), mapped=mapped, sharing=sharing)) as reader:
        reader.expect("reading")
        assert not spare.unread(old)
        assert not pool.give(old)
        assert old.exists()
        reader.send(signal.SIGKILL)
        reader.wait()
        assert pool.give(old)


def test_where_readers_may_go_unseen_only_fresh_files_become_spares(
    pool: spare.SparePool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(spare, "_LOCAL", frozenset())
    assert not pool.give(file(tmp_path / "old", 10))
    assert (tmp_path / "old").exists()
    assert pool.give(file(tmp_path / "new", 20), fresh=True)
    assert pool.take(20, tmp_path / "taken")


def test_on_an_overlay_a_file_that_is_mapped_and_closed_is_not_recycled(tmp_path: Path) -> None:
    for name in ("lower", "upper", "work"):
        (tmp_path / name).mkdir()
    options = f"lowerdir={tmp_path}/lower,upperdir={tmp_path}/upper,workdir={tmp_path}/work"
    with mounted("overlay", options, tmp_path / "merged") as merged:
        old = file(merged / "old", 8192)
        with Script(tmp_path, READER.format(path=str(old), mapped=True, sharing=mmap.MAP_PRIVATE)) as reader:
            reader.expect("reading")
            assert not spare.SparePool(merged / "spare", storage.Files()).give(old)
            assert old.read_bytes() == b"x" * 8192


def test_a_spare_that_somebody_opened_or_linked_meanwhile_is_not_taken(
    pool: spare.SparePool, tmp_path: Path
) -> None:
    fill(pool, tmp_path, 10, 20, 30)
    opened, linked, left = sorted((tmp_path / "spare").iterdir(), key=lambda path: path.stat().st_size)
    fd = os.open(opened, os.O_RDONLY)
    os.link(linked, tmp_path / "backup")
    inode = left.stat().st_ino
    assert pool.take(5, tmp_path / "new")
    assert (tmp_path / "new").stat().st_ino == inode
    assert not pool.take(5, tmp_path / "other")
    os.close(fd)


def test_a_link_is_neither_given_nor_taken(pool: spare.SparePool, tmp_path: Path) -> None:
    precious = file(tmp_path / "precious", 10)
    (tmp_path / "link").symlink_to(precious)
    assert not pool.give(tmp_path / "link")
    fill(pool, tmp_path, 5)
    (tmp_path / "spare" / "link").symlink_to(precious)
    assert pool.sizes() == [5]


def test_a_folder_that_is_a_link_to_somewhere_is_not_a_pool(pool: spare.SparePool, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    precious = file(tmp_path / "elsewhere" / "precious", 10)
    (tmp_path / "spare").symlink_to(tmp_path / "elsewhere")
    assert pool.sizes() == []
    assert not pool.take(10, tmp_path / "new")
    assert not pool.give(file(tmp_path / "old", 10))
    assert pool.clear() == 0
    assert precious.exists()
    assert os.listdir(tmp_path / "elsewhere") == ["precious"]


@pytest.mark.parametrize("operation", ["rename", "mkdir", "unlink"])
def test_a_failing_disk_costs_only_the_spares(tmp_path: Path, operation: str) -> None:
    faulty = spare.SparePool(
        tmp_path / "spare", testing.FaultyFiles(testing.Fault(operation, 1, lasting=True))
    )
    old = file(tmp_path / "old", 10)
    if operation == "unlink":
        assert faulty.give(old)
        faulty.trim(0, 0)
        assert faulty.sizes() == [10]
    else:
        assert not faulty.give(old)
        assert old.exists()
        assert not faulty.take(10, tmp_path / "new")


def test_a_spare_that_cannot_be_moved_stays(pool: spare.SparePool, tmp_path: Path) -> None:
    fill(pool, tmp_path, 10)
    faulty = spare.SparePool(tmp_path / "spare", testing.FaultyFiles(testing.Fault("rename", 1)))
    assert not faulty.take(10, tmp_path / "new")
    assert faulty.sizes() == [10]


def test_what_is_not_there_is_not_unread(tmp_path: Path) -> None:
    assert not spare.unread(tmp_path / "nothing")
    (tmp_path / "folder").mkdir()
    assert not spare.unread(tmp_path / "folder")


HUNTED = """
    import os, sys
    from pathlib import Path
    from lastcall.storage import spare
    path = Path({path!r})
    if os.fork() == 0:
        while os.getppid() != 1 and not os.path.exists({stop!r}):
            try:
                os.close(os.open(path, os.O_RDONLY | os.O_NONBLOCK))  # breaks the lease while it is held
            except BlockingIOError:
                pass
        os._exit(0)
    answers = [spare.unread(path) for _ in range(20_000)]
    Path({stop!r}).touch()
    os.wait()
    print("survived", any(answers), flush=True)
"""


def test_looking_at_a_file_that_is_being_opened_does_not_kill_this_process(tmp_path: Path) -> None:
    old = file(tmp_path / "old", 10)
    with Script(tmp_path, HUNTED.format(path=str(old), stop=str(tmp_path / "stop"))) as hunted:
        assert hunted.wait() == 0
        assert hunted.expect("survived") == "True"
