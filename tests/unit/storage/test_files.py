from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from pathlib import Path

import pytest

from lastcall import testing
from lastcall.storage import files as storage


def test_descriptors_do_not_leak_into_child_programs(tmp_path: Path) -> None:
    files = storage.Files()
    fd = files.open(tmp_path / "f", os.O_RDWR | os.O_CREAT)
    assert not os.get_inheritable(fd)
    files.close(fd)


def test_bytes_are_written_and_read_at_offsets(tmp_path: Path) -> None:
    files = storage.Files()
    fd = files.open(tmp_path / "f", os.O_RDWR | os.O_CREAT)
    files.allocate(fd, 0)
    files.allocate(fd, 100)
    assert os.fstat(fd).st_size == 100
    assert files.pwrite(fd, [memoryview(b"abc")], 10) == 3
    files.truncate(fd, 12)
    files.fsync(fd)
    room = bytearray(8)
    assert files.pread(fd, memoryview(room), 9) == 3
    assert bytes(room[:3]) == b"\x00ab"
    files.close(fd)


def test_two_names_are_swapped_in_one_step(tmp_path: Path) -> None:
    for name in ("one", "other"):
        (tmp_path / name).mkdir()
        (tmp_path / name / f"in-{name}").touch()
    storage.Files().exchange(tmp_path / "one", tmp_path / "other")
    assert os.listdir(tmp_path / "one") == ["in-other"]
    assert os.listdir(tmp_path / "other") == ["in-one"]


def test_a_swap_with_nothing_names_what_is_missing(tmp_path: Path) -> None:
    (tmp_path / "one").mkdir()
    with pytest.raises(FileNotFoundError) as caught:
        storage.Files().exchange(tmp_path / "one", tmp_path / "none")
    assert caught.value.filename == str(tmp_path / "one")
    assert (tmp_path / "one").is_dir()


@pytest.mark.parametrize("code", [errno.EINVAL, errno.ENOTSUP])
def test_a_file_system_that_cannot_sync_folders_is_taken_as_it_is(tmp_path: Path, code: int) -> None:
    testing.FaultyFiles(testing.Fault("fsync", 1, code)).sync_directory(tmp_path)


def test_a_folder_that_cannot_be_synced_is_an_error_and_leaves_nothing_open(tmp_path: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(OSError, match="Input/output"):
        testing.FaultyFiles(testing.Fault("fsync", 1, errno.EIO)).sync_directory(tmp_path)
    assert len(os.listdir("/proc/self/fd")) == before


def test_everything_is_written_though_each_write_is_short(tmp_path: Path) -> None:
    files = testing.FaultyFiles(testing.Fault("pwrite", 1, short=True, lasting=True))
    storage.write_small(files, tmp_path / "f", b"0123456789")
    assert (tmp_path / "f").read_bytes() == b"0123456789"
    assert files.calls["pwrite"] > 2
    assert files.calls["fsync"] == 1


def test_a_write_that_makes_no_progress_is_an_error(tmp_path: Path) -> None:
    class Stuck(storage.Files):
        def pwrite(self, fd: int, views: Sequence[memoryview], offset: int, flags: int = 0) -> int:
            return 0

    with pytest.raises(OSError, match="no progress"):
        storage.write_small(Stuck(), tmp_path / "f", b"x")


def test_a_small_file_replaces_what_was_there(tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(b"something longer")
    storage.write_small(storage.Files(), tmp_path / "f", b"short")
    assert (tmp_path / "f").read_bytes() == b"short"


def test_a_tree_is_removed_and_what_its_links_point_to_is_not(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "precious").touch()
    tree = tmp_path / "tree"
    (tree / "deep" / "deeper").mkdir(parents=True)
    (tree / "deep" / "file").touch()
    (tree / "link").symlink_to(outside)
    (tree / "broken").symlink_to(tmp_path / "nowhere")
    storage.remove_tree(storage.Files(), tree)
    assert not tree.exists()
    assert (outside / "precious").exists()


def test_a_link_in_the_place_of_the_tree_is_removed_and_not_followed(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "precious").touch()
    (tmp_path / "tree").symlink_to(outside)
    storage.remove_tree(storage.Files(), tmp_path / "tree")
    assert not os.path.lexists(tmp_path / "tree")
    assert (outside / "precious").exists()


def test_the_first_free_name_skips_broken_links_too(tmp_path: Path) -> None:
    (tmp_path / "a").touch()
    (tmp_path / "b").symlink_to(tmp_path / "nowhere")
    assert storage.first_free(tmp_path, ["a", "b", "c"]) == tmp_path / "c"


def test_a_copy_has_the_same_bytes_and_another_inode(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"bytes")
    storage.copy_file(tmp_path / "a", tmp_path / "b")
    assert (tmp_path / "b").read_bytes() == b"bytes"
    assert (tmp_path / "a").stat().st_ino != (tmp_path / "b").stat().st_ino


def test_a_hard_link_of_a_link_does_not_reach_its_target(tmp_path: Path) -> None:
    (tmp_path / "target").touch()
    (tmp_path / "link").symlink_to(tmp_path / "target")
    storage.Files().link(tmp_path / "link", tmp_path / "second")
    assert (tmp_path / "second").is_symlink()


def test_free_bytes_are_those_of_the_file_system(tmp_path: Path) -> None:
    assert 0 < storage.Files().free_bytes(tmp_path) < 1 << 60
