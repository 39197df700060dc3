from __future__ import annotations

import errno
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from helpers.core.bare_core import State, World, mounted
from lastcall import errors, memory, testing
from lastcall.core.checkpoint.catalog import Catalog
from lastcall.core.engine import writer
from lastcall.core.save import spare_space
from lastcall.storage import files as storage

MB = 1024 * 1024


@pytest.fixture(params=["disk", "memory"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    """Once on a disk, once on tmpfs."""
    if request.param == "disk":
        yield tmp_path
    elif not os.access("/dev/shm", os.W_OK):
        pytest.skip("there is no /dev/shm here")
    else:
        with tempfile.TemporaryDirectory(dir="/dev/shm") as made:
            yield Path(made)


def preparation(
    root: Path, files: storage.Files | None = None, cancelled: Callable[[], bool] = lambda: False
) -> tuple[spare_space.Preparation, Catalog, World]:
    world = World(root, files)
    return spare_space.Preparation(world.catalog, world.engine, world.budget, cancelled), world.catalog, world


@pytest.fixture
def probes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measure with little."""
    monkeypatch.setattr(spare_space, "_PROBE", MB)
    monkeypatch.setattr(writer, "CHUNK", MB // 4)


def test_spares_are_written_for_every_large_file(folder: Path) -> None:
    prepare, catalog, world = preparation(folder / "run")
    with world:
        assert prepare.run([2 * MB, 100, MB + 5])
        assert catalog.spares.sizes() == [MB + 4096, 2 * MB]
        assert not catalog.preparing.exists()
        for spare in (catalog.private / "spare").iterdir():
            assert spare.stat().st_blocks * 512 >= spare.stat().st_size  # written, not only promised


def test_spares_that_are_there_are_not_written_again(folder: Path) -> None:
    prepare, catalog, world = preparation(folder / "run")
    with world:
        assert prepare.run([2 * MB, MB])
        before = {path.stat().st_ino for path in (catalog.private / "spare").iterdir()}
        assert prepare.run([2 * MB, MB])
        assert {path.stat().st_ino for path in (catalog.private / "spare").iterdir()} == before
        assert prepare.run([3 * MB, 2 * MB, MB])
        assert catalog.spares.sizes() == [MB, 2 * MB, 3 * MB]


@pytest.mark.parametrize(
    ("spares", "sizes", "missing"),
    [
        ([], [3, 2], [3, 2]),
        ([3], [3, 2], [2]),
        ([2], [3, 2], [3]),
        ([3, 3], [3, 2], []),
        ([9, 1], [3, 2, 1], [2]),
        ([2, 2], [1, 3], [3]),
        ([5], [], []),
    ],
)
def test_each_spare_serves_one_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, spares: list[int], sizes: list[int], missing: list[int]
) -> None:
    prepare, catalog, world = preparation(tmp_path / "run")
    with world:
        monkeypatch.setattr(catalog.spares, "sizes", lambda: [n * MB for n in spares])
        assert prepare._missing([n * MB for n in sizes]) == [n * MB for n in missing]


def test_the_fastest_way_of_writing_is_measured(
    folder: Path, probes: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepare, catalog, world = preparation(folder / "run")
    seen: list[int] = []
    monkeypatch.setattr(world.budget, "observe", lambda nbytes, seconds: seen.append(nbytes))
    with world:
        assert prepare.run([5 * MB])
        assert prepare.method in set(spare_space.Method)
        assert seen == [5 * MB]
        assert catalog.spares.sizes() == [5 * MB]


def test_a_small_state_is_not_worth_a_measurement(folder: Path, probes: None) -> None:
    prepare, _, world = preparation(folder / "run")
    with world:
        assert prepare.run([2 * MB - 4096])
        assert prepare.method is None


class Fussy(storage.Files):
    """A kernel that knows neither O_DIRECT here nor RWF_DONTCACHE."""

    def open(self, path: Path, flags: int, mode: int = 0o644) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return super().open(path, flags, mode)

    def pwrite(self, fd: int, views: Sequence[memoryview], offset: int, flags: int = 0) -> int:
        if flags:
            raise OSError(errno.ENOTSUP, os.strerror(errno.ENOTSUP))
        return super().pwrite(fd, views, offset)


def test_methods_that_are_not_known_here_are_passed_over(folder: Path, probes: None) -> None:
    prepare, catalog, world = preparation(folder / "run", Fussy())
    with world:
        assert prepare.run([5 * MB])
        assert prepare.method in (spare_space.Method.DIRECT, spare_space.Method.BUFFERED)
        assert catalog.spares.sizes() == [5 * MB]


@pytest.mark.parametrize("after", [0, 1, 3, 6, 13])
def test_a_notice_stops_the_preparation_and_leaves_no_trace(folder: Path, probes: None, after: int) -> None:
    looks = iter(range(1000))
    prepare, catalog, world = preparation(folder / "run", cancelled=lambda: next(looks) >= after)
    with world:
        assert not prepare.run([5 * MB])
        assert catalog.spares.sizes() == []
        assert not catalog.preparing.exists()


@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC])
@pytest.mark.parametrize("operation", ["open", "pwrite", "fsync", "close", "rename", "mkdir"])
def test_a_failing_disk_is_warned_about_and_nothing_is_left(
    tmp_path: Path, probes: None, caplog: pytest.LogCaptureFixture, operation: str, code: int
) -> None:
    files = testing.FaultyFiles(testing.Fault(operation, 1, code, lasting=True))
    prepare, catalog, world = preparation(tmp_path / "run", files)
    with world:
        assert not prepare.run([MB])
        assert catalog.spares.sizes() == []
        assert not catalog.preparing.exists()
    if operation in ("open", "pwrite", "fsync", "close"):
        assert f"Could not prepare space for the next checkpoint: [Errno {code}]" in caplog.text


def test_where_the_next_checkpoint_will_not_find_room_it_is_said_early(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Small(storage.Files):
        def free_bytes(self, path: Path) -> int:
            return 5 * MB

    prepare, catalog, world = preparation(tmp_path / "run", Small())
    with world:
        assert prepare.check([5 * MB - 128 * 1024])
        assert caplog.text == ""
        assert not prepare.check([5 * MB - 128 * 1024 + 1])
        assert not prepare.run([4 * MB, 4 * MB])
        assert catalog.spares.sizes() == []
    assert (
        f"needs 8.4 MB in {tmp_path / 'run'}, but only 5.2 MB are free: it will fail unless you make room"
        in caplog.text
    )


def test_a_small_state_that_fits_is_not_warned_about(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As full as a disk can be and still take it."""
    state = State(seed=1, sizes={"model": {"w": 100_000}, "optimizer": {"m": 100_000}}, frozen=())
    with mounted("tmpfs", "size=2m", tmp_path / "small") as disk:
        prepare, catalog, world = preparation(disk / "run")
        with world:
            world.save(state, 1)
            needed = sum(world.saver.sizes(state.capture(2)))
            with open(disk / "fill", "wb") as file:
                file.write(bytes((catalog.files.free_bytes(disk) - needed - 128 * 1024) // 4096 * 4096))
            assert prepare.check([needed]) and caplog.text == ""
            world.save(state, 2)
        testing.assert_resumable(disk / "run", 2, exact=True)


def test_room_that_is_kept_ready_counts_as_room(tmp_path: Path) -> None:
    class Full(storage.Files):
        def free_bytes(self, path: Path) -> int:
            return 2 * MB

    prepare, catalog, world = preparation(tmp_path / "run", Full())
    with world:
        (tmp_path / "old").write_bytes(bytes(3 * MB))
        assert not prepare.check([3 * MB])
        assert catalog.spares.give(tmp_path / "old")
        assert prepare.check([3 * MB])


def test_on_a_full_disk_the_warning_comes_early_and_nothing_is_lost(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    state = State(seed=1, sizes={"model": {"w": 3 * MB}, "optimizer": {"m": 2 * MB}}, frozen=())
    with mounted("tmpfs", "size=8m", tmp_path / "small") as disk:
        prepare, catalog, world = preparation(disk / "run")
        with world:
            world.save(state, 1)
            first = state.contents()
            state.step(2)
            assert not prepare.run(world.saver.sizes(state.capture(1)))
            assert "The next checkpoint needs 5.3 MB" in caplog.text
            assert "it will fail unless you make room" in caplog.text
            with pytest.raises(
                errors.NoSpaceError,
                match=r"checkpoint-1 is intact. It needs 5.\d MB, [\d.]+ "
                r"MB are free",
            ):
                world.save(state, 2)
            assert os.listdir(catalog.staging) == []
        testing.assert_resumable(disk / "run", 1, exact=True)
        found = State(sizes={"model": {"w": 3 * MB}, "optimizer": {"m": 2 * MB}})
        with World(disk / "run") as again:
            again.catalog.clean()
            assert again.restore(found) is not None
        assert found.contents() == first


def test_spares_give_way_when_a_save_would_not_fit_otherwise(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A disk that holds the checkpoint or the spares (of the wrong sizes), not both."""
    state = State(
        seed=1, sizes={"model": {"w": 2 * MB}, "optimizer": {"m": 2 * MB}, "other": {"x": 2 * MB}}, frozen=()
    )
    with mounted("tmpfs", "size=8m", tmp_path / "small") as disk:
        with World(disk / "run") as world:
            (disk / "old").write_bytes(bytes(6 * MB))
            assert world.catalog.spares.give(disk / "old", fresh=True)
            (disk / "fill").write_bytes(bytes(MB))
            world.save(state, 1)
            assert world.catalog.spares.sizes() == []
        testing.assert_resumable(disk / "run", 1, exact=True)


def test_a_method_names_the_flag_it_needs() -> None:
    flags = {method: method.flags for method in spare_space.Method}
    assert flags == {
        spare_space.Method.DIRECT: 0,
        spare_space.Method.DONTCACHE: storage.RWF_DONTCACHE,
        spare_space.Method.BUFFERED: 0,
    }


def test_spares_are_whole_blocks_so_that_direct_writes_fit(tmp_path: Path) -> None:
    prepare, catalog, world = preparation(tmp_path / "run")
    with world:
        assert prepare.run([MB + 1])
        assert catalog.spares.sizes() == [MB + memory.ALIGNMENT]


class WithoutInodes(testing.FaultyFiles):
    def free_inodes(self, path: Path) -> int | None:
        return 0


def test_h9_a_file_system_without_inodes_is_named_as_such(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with World(
        tmp_path / "run", WithoutInodes(testing.Fault("open", 1, errno.ENOSPC, lasting=True))
    ) as world:
        assert spare_space.warn_if_short(world.catalog, 1) and "only 0 inodes left" in caplog.text
        with pytest.raises(errors.NoSpaceError, match=r"The file system has no inodes left.*df -i"):
            world.save(State(), 1)


def test_h9_a_file_system_without_a_limit_of_inodes_is_not_warned_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with World(tmp_path / "run") as world:
        monkeypatch.setattr(world.files, "free_inodes", lambda path: None)
        assert not spare_space.warn_if_short(world.catalog, 1)
