from __future__ import annotations

import errno
import os
import signal
from pathlib import Path
from types import SimpleNamespace

import pytest

from helpers.core.bare_core import State, World, flip
from helpers.processes.scripts import Script
from lastcall import testing
from lastcall.storage import files as storage


def test_a_fake_clock_stands_still_until_it_is_told() -> None:
    clock = testing.FakeClock(5.0)
    assert (clock.now(), clock.wall()) == (5.0, 5.0)
    clock.sleep(1.5)
    clock.advance(2.0)
    assert (clock.now(), clock.wall()) == (8.5, 8.5)


def write(files: storage.Files, path: Path, data: bytes) -> None:
    storage.write_small(files, path, data)


def test_without_faults_it_is_a_plain_recorder(tmp_path: Path) -> None:
    files = testing.FaultyFiles()
    write(files, tmp_path / "f", b"data")
    assert dict(files.calls) == {"open": 1, "pwrite": 1, "fsync": 1, "close": 1}
    assert files.total == 4
    assert (tmp_path / "f").read_bytes() == b"data"


def test_every_operation_can_fail_and_is_not_done_then(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "f").write_bytes(b"data")
    fd = os.open(tmp_path / "f", os.O_RDWR)
    one, other = tmp_path / "f", tmp_path / "g"
    arguments: dict[str, tuple[object, ...]] = {
        "open": (one, os.O_RDONLY),
        "close": (os.dup(fd),),
        "pwrite": (fd, memoryview(b"x"), 0),
        "fsync": (fd,),
        "truncate": (fd, 0),
        "allocate": (fd, 100),
        "rename": (one, other),
        "exchange": (one, tmp_path / "folder"),
        "link": (one, other),
        "unlink": (one,),
        "mkdir": (other,),
        "rmdir": (tmp_path / "folder",),
    }
    assert set(arguments) == set(testing.OPERATIONS)
    for operation, values in arguments.items():
        for name in (operation, "any"):
            if operation == "close" and name == "any":
                values = (os.dup(fd),)
            files = testing.FaultyFiles(testing.Fault(name, 1, errno.ENOSPC))
            with pytest.raises(OSError) as caught:
                getattr(files, operation)(*values)
            assert caught.value.errno == errno.ENOSPC
            assert files.calls == {operation: 1}
    os.close(fd)
    assert sorted(os.listdir(tmp_path)) == ["f", "folder"]
    assert (tmp_path / "f").read_bytes() == b"data"


def test_only_the_chosen_call_fails_unless_the_fault_lasts(tmp_path: Path) -> None:
    def outcomes(fault: testing.Fault) -> list[bool]:
        files, seen = testing.FaultyFiles(fault), []
        for number in range(4):
            try:
                files.mkdir(tmp_path / f"{fault.lasting}-{fault.operation}-{number}")
                seen.append(True)
            except OSError:
                seen.append(False)
        return seen

    assert outcomes(testing.Fault("mkdir", 2)) == [True, False, True, True]
    assert outcomes(testing.Fault("mkdir", 2, lasting=True)) == [True, False, False, False]
    assert outcomes(testing.Fault("any", 3)) == [True, True, False, True]
    assert outcomes(testing.Fault("rmdir", 1, lasting=True)) == [True, True, True, True]


def test_a_failed_close_closes_all_the_same(tmp_path: Path) -> None:
    files = testing.FaultyFiles(testing.Fault("close", 1))
    fd = files.open(tmp_path / "f", os.O_RDWR | os.O_CREAT)
    with pytest.raises(OSError, match="Input/output"):
        files.close(fd)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)


@pytest.mark.parametrize(("length", "written"), [(1, 1), (2, 1), (100, 50), (10_000, 5000)])
def test_a_short_write_writes_half_and_says_so(tmp_path: Path, length: int, written: int) -> None:
    files = testing.FaultyFiles(testing.Fault("pwrite", 1, short=True))
    fd = files.open(tmp_path / "f", os.O_RDWR | os.O_CREAT)
    assert files.pwrite(fd, [memoryview(bytes(length))], 0) == written
    assert os.fstat(fd).st_size == written
    files.close(fd)


def test_a_short_fault_does_not_fail_other_operations(tmp_path: Path) -> None:
    files = testing.FaultyFiles(testing.Fault("any", 1, short=True, lasting=True))
    write(files, tmp_path / "f", b"data")
    assert (tmp_path / "f").read_bytes() == b"data"


def test_a_fault_can_be_the_end_of_the_process(tmp_path: Path) -> None:
    source = f"""
        from pathlib import Path
        from lastcall import testing
        files = testing.FaultyFiles(testing.Fault("mkdir", 2, kill=True))
        files.mkdir(Path({str(tmp_path / "one")!r}))
        files.mkdir(Path({str(tmp_path / "two")!r}))
        print("alive")
    """
    with Script(tmp_path, source) as script:
        assert script.wait() == -signal.SIGKILL
    assert (tmp_path / "one").is_dir()
    assert not (tmp_path / "two").exists()


def test_a_preemption_comes_once_when_its_step_is_reached() -> None:
    got: list[int] = []
    before = signal.signal(signal.SIGUSR1, lambda signum, _: got.append(signum))
    try:
        look = testing.preempt_at(3, signum=signal.SIGUSR1)
        for step in (1, 2):
            look(step)
        assert got == []
        look(4)
        look(5)
        assert got == [signal.SIGUSR1]
        testing.preempt_at(3, signum=signal.SIGUSR1, run=SimpleNamespace(step=3))
        assert got == [signal.SIGUSR1] * 2
    finally:
        signal.signal(signal.SIGUSR1, before)


@pytest.mark.parametrize("name", ["run", "none"])
def test_a_directory_without_a_checkpoint_is_not_resumable(tmp_path: Path, name: str) -> None:
    (tmp_path / "run").mkdir()
    with pytest.raises(AssertionError, match="holds no committed checkpoint"):
        testing.assert_resumable(tmp_path / name)


def test_assert_resumable_looks_at_step_exactness_and_every_byte(tmp_path: Path) -> None:
    root = tmp_path / "run"
    state = State(seed=1)
    with World(root) as world:
        world.save(state, 7)
        state.step(8)
        world.save(state, 8)
    assert testing.assert_resumable(str(root), step=8, exact=True).path == root / "checkpoint-8"
    with pytest.raises(AssertionError, match="is of step 8, not 7"):
        testing.assert_resumable(root, step=7)
    with pytest.raises(AssertionError, match="checkpoint-8 is exact"):
        testing.assert_resumable(root, exact=False)
    flip(root / "checkpoint-8" / "model.safetensors", -1)
    with pytest.raises(AssertionError, match=r"checkpoint-8 is damaged: model.safetensors: the bytes"):
        testing.assert_resumable(root)
