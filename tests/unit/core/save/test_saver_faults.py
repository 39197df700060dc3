"""Saves that go wrong: each error by itself, then a fault at every file operation in turn."""

from __future__ import annotations

import errno
import os
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from helpers.core.bare_core import State, World, restored
from lastcall import errors, testing
from lastcall.core.checkpoint.retention import Keep
from lastcall.core.engine import writer
from lastcall.core.restore import restore
from lastcall.core.save import saver
from lastcall.core.save.spare_space import Method
from lastcall.storage import files as storage


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer, "CHUNK", 8192)
    monkeypatch.setattr(writer, "_DIRECT_FROM", 4096)  # small files are written as large ones are


@pytest.fixture
def state() -> State:
    return State(seed=1)


def test_after_an_error_it_is_tried_again_and_said_so(
    tmp_path: Path, state: State, caplog: pytest.LogCaptureFixture
) -> None:
    with World(
        tmp_path / "run", testing.FaultyFiles(testing.Fault("fsync", 3), testing.Fault("pwrite", 30))
    ) as world:
        world.save(state, 1)
    assert "Saving step 1 failed (Input/output error); retrying" in caplog.text
    assert restored(tmp_path / "run") == state.contents()


def test_a_lasting_error_is_given_up_after_three_attempts(tmp_path: Path, state: State) -> None:
    files = testing.FaultyFiles(testing.Fault("fsync", 1, lasting=True))
    with World(tmp_path / "run", files) as world:
        with pytest.raises(
            errors.SaveError,
            match="checkpoint-1 could not be saved .Input/output error.; nothing was committed",
        ):
            world.save(state, 1)
        assert files.calls["fsync"] == saver.ATTEMPTS
        assert os.listdir(world.catalog.staging) == []


def test_there_is_no_second_attempt_after_the_deadline(tmp_path: Path, state: State) -> None:
    clock = testing.FakeClock()

    class Slow(testing.FaultyFiles):
        def fsync(self, fd: int) -> None:
            clock.advance(60)
            super().fsync(fd)

    files = Slow(testing.Fault("fsync", 2))
    with World(tmp_path / "run", files, clock) as world:
        with pytest.raises(errors.SaveError):
            world.save(state, 1, deadline=clock.now() + 100)
        assert files.calls["fsync"] == 2


def test_a_full_disk_says_how_much_is_missing_and_what_is_intact(
    tmp_path: Path, state: State, caplog: pytest.LogCaptureFixture
) -> None:
    with World(tmp_path / "run") as world:
        world.save(state, 1)
    files = testing.FaultyFiles(testing.Fault("pwrite", 1, errno.ENOSPC, lasting=True))
    with World(tmp_path / "run", files) as world:
        spare = tmp_path / "old"
        spare.write_bytes(bytes(3_000_000))
        assert world.catalog.spares.give(spare)
        state.step(2)
        with pytest.raises(errors.NoSpaceError) as caught:
            world.save(state, 2)
        assert world.catalog.spares.sizes() == []
    said = str(caught.value)
    assert said.startswith(
        "checkpoint-2 could not be saved (No space left on device); checkpoint-1 is intact. It needs 0.1 MB"
    )
    assert f"make room in {tmp_path / 'run'}" in said
    assert "released 3 MB of spare space" in caplog.text


def test_spare_space_that_is_given_back_can_save_the_save(tmp_path: Path, state: State) -> None:
    files = testing.FaultyFiles(testing.Fault("allocate", 1, errno.ENOSPC))
    with World(tmp_path / "run", files) as world:
        world.save(state, 1)
    assert restored(tmp_path / "run") == state.contents()


def test_a_file_system_that_opens_for_direct_writes_and_refuses_them_is_written_through_the_cache(
    tmp_path: Path, state: State
) -> None:
    class Fussy(storage.Files):
        def pwrite(self, fd: int, views: Sequence[memoryview], offset: int, flags: int = 0) -> int:
            if flags or (os.readlink(f"/proc/self/fd/{fd}").endswith(".safetensors") and direct(fd)):
                raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
            return super().pwrite(fd, views, offset, flags)

    def direct(fd: int) -> bool:
        with open(f"/proc/self/fdinfo/{fd}") as facts:
            return bool(int(facts.read().split("flags:")[1].split()[0], 8) & os.O_DIRECT)

    for method in (Method.DIRECT, Method.DONTCACHE):
        with World(tmp_path / method.value, Fussy()) as world:
            world.saver.method = method
            world.save(state, 1)
            assert world.saver.method is Method.BUFFERED
            world.save(state, 2)
        assert restored(tmp_path / method.value) == state.contents()


def test_a_file_system_without_preallocation_is_written_all_the_same(tmp_path: Path, state: State) -> None:
    for code in (errno.ENOTSUP, errno.EINVAL):
        files = testing.FaultyFiles(testing.Fault("allocate", 1, code, lasting=True))
        with World(tmp_path / str(code), files) as world:
            world.save(state, 1)
            assert files.calls["allocate"] == 3


def test_no_descriptor_is_left_open_after_any_failure(tmp_path: Path, state: State) -> None:
    with World(tmp_path / "run", threads=1) as world:
        for operation in ("open", "close", "pwrite", "fsync", "truncate", "allocate"):
            before = len(os.listdir("/proc/self/fd"))
            files = testing.FaultyFiles(testing.Fault(operation, 3, lasting=True))
            world.saver._files = world.catalog.files = files
            world.engine._files = files
            with pytest.raises(errors.SaveError):
                world.save(state, 1)
            assert len(os.listdir("/proc/self/fd")) == before, operation


# ---- faults at every operation in turn ---------------------------------------------------------------------


def prepared(root: Path) -> tuple[State, dict[int, dict[str, object]]]:
    """A directory with two committed checkpoints and one spare; the state of a third step is ready to be
    saved."""
    state, seen = State(seed=1), {}
    with World(root, threads=1) as world:
        for step in (1, 2):
            state.step(step)
            world.save(state, step)
            seen[step] = state.contents()
        (root / "old").write_bytes(bytes(40_000))
        world.catalog.spares.give(root / "old")
    state.step(3)
    seen[3] = state.contents()
    return state, seen


def attempt(
    root: Path, *faults: testing.Fault
) -> tuple[bool, testing.FaultyFiles, dict[int, dict[str, object]]]:
    state, seen = prepared(root)
    files = testing.FaultyFiles(*faults)
    with World(root, files, threads=1) as world:
        try:
            world.save(state, 3)
        except errors.SaveError:
            saved = False
        else:
            saved = True
            world.catalog.prune(Keep(2))
    return saved, files, seen


def check(root: Path, saved: bool, seen: dict[int, dict[str, object]]) -> int:
    entry = testing.assert_resumable(root)
    assert entry.record.step in ((3,) if saved else (2, 3))
    with World(root, threads=1) as world:
        for older in world.catalog.entries():
            restore.verify(older, world.engine)
        assert saved or {older.record.step for older in world.catalog.entries()} >= {1, 2}
    assert restored(root) == seen[entry.record.step]
    testing.assert_resumable(root, entry.record.step)
    return entry.record.step


@pytest.fixture(scope="module")
def operations(quick: Path) -> int:
    """How many file operations a save with the pruning after it makes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(writer, "CHUNK", 8192)
        patch.setattr(writer, "_DIRECT_FROM", 4096)
        saved, files, _ = attempt(quick / "count")
    assert saved
    return files.total


@pytest.fixture(scope="module")
def quick(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Memory, where there is some: hundreds of saves with an fsync each take minutes on a disk."""
    if os.access("/dev/shm", os.W_OK):
        with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
            yield Path(folder)
    else:
        yield tmp_path_factory.mktemp("quick")


@pytest.mark.parametrize(
    "fault", [{"errno": errno.EIO}, {"errno": errno.ENOSPC}, {"short": True}], ids=["EIO", "ENOSPC", "short"]
)
def test_a_fault_at_any_operation_costs_at_most_an_attempt(
    quick: Path, operations: int, fault: dict[str, int], request: pytest.FixtureRequest
) -> None:
    assert operations > 30
    for number in range(1, operations + 1):
        root = quick / f"{request.node.callspec.id}-{number}"
        saved, _, seen = attempt(root, testing.Fault("any", number, **fault))  # type: ignore[arg-type]
        assert saved, f"operation {number}"
        check(root, saved, seen)
        storage.remove_tree(storage.Files(), root)


@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC], ids=["EIO", "ENOSPC"])
def test_a_fault_that_lasts_leaves_the_previous_one_or_the_new_one(
    quick: Path, operations: int, code: int, request: pytest.FixtureRequest
) -> None:
    outcomes = []
    for number in range(1, operations + 1):
        root = quick / f"lasting-{request.node.callspec.id}-{number}"
        saved, _, seen = attempt(root, testing.Fault("any", number, code, lasting=True))
        outcomes.append((saved, check(root, saved, seen)))
        storage.remove_tree(storage.Files(), root)
    assert outcomes[0] == (False, 2)
    assert outcomes[-1] == (True, 3)


@pytest.mark.parametrize(
    "operation", ["open", "close", "pwrite", "fsync", "truncate", "allocate", "rename", "mkdir", "unlink"]
)
def test_one_kind_of_operation_that_fails_for_good_leaves_what_was_there(quick: Path, operation: str) -> None:
    root = quick / f"kind-{operation}"
    saved, files, seen = attempt(root, testing.Fault(operation, 1, lasting=True))
    assert files.calls[operation] > 0
    check(root, saved, seen)
    assert not saved
