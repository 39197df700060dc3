"""The lock of a directory outlives what the training process does with the files in it, and does not outlive
the process."""

from __future__ import annotations

import fcntl
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from helpers.core.bare_core import State, World
from lastcall import clock, errors
from lastcall.core.checkpoint.catalog import Catalog
from lastcall.storage import locks
from lastcall.storage.files import Files

SECOND = """
import sys
from pathlib import Path
from lastcall.core.checkpoint.catalog import Catalog
from lastcall.storage.files import Files
catalog = Catalog(Path(sys.argv[1]), Files())
catalog.make()
print(catalog.try_lock())
"""


def second(root: Path) -> str:
    """Whether another process gets the lock."""
    return subprocess.run(
        [sys.executable, "-c", SECOND, str(root)], capture_output=True, text=True, check=True
    ).stdout.strip()


def test_c6_a_copy_of_the_directory_in_the_training_process_does_not_give_the_lock_away(
    tmp_path: Path,
) -> None:
    with World(tmp_path / "run"):
        shutil.copytree(tmp_path / "run", tmp_path / "backup")
        (tmp_path / "run" / ".lastcall" / "lock").read_bytes()
        assert second(tmp_path / "run") == "False"
    assert second(tmp_path / "run") == "True"


def test_c6_without_open_file_locks_a_posix_lock_serves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(fcntl, "F_OFD_SETLK")
    with World(tmp_path / "run"):
        assert second(tmp_path / "run") == "False"


def test_c6_a_forked_child_does_not_keep_the_lock_of_a_killed_parent(tmp_path: Path) -> None:
    ready, told = os.pipe()
    parent = os.fork()
    if parent == 0:
        world = World(tmp_path / "run")
        child = os.fork()
        if child == 0:
            assert not world.catalog.held
            os.write(told, f"{os.getpid()}\n".encode())
            time.sleep(60)
        time.sleep(60)
        os._exit(1)
    try:
        child = int(os.read(ready, 20))
        os.kill(parent, signal.SIGKILL)
        os.waitpid(parent, 0)
        assert second(tmp_path / "run") == "True"
    finally:
        os.kill(child, signal.SIGKILL)


def test_a_lock_is_let_go_of_once(tmp_path: Path) -> None:
    lock = locks.Lock(os.open(tmp_path / "lock", os.O_RDWR | os.O_CREAT))
    assert locks.take(lock.fd) and lock.held
    lock.release()
    assert not lock.held
    lock.release()  # its number may be another file's by now


def test_c7_a_lock_that_was_removed_is_taken_again(tmp_path: Path) -> None:
    with World(tmp_path / "run") as world:
        assert not world.catalog.make_again()
        shutil.rmtree(tmp_path / "run" / ".lastcall")
        assert world.catalog.make_again() and world.catalog.held
        assert second(tmp_path / "run") == "False"


def test_c7_a_file_system_that_is_gone_is_not_replaced_by_the_one_below(tmp_path: Path) -> None:
    with World(tmp_path / "run") as world:
        world.catalog._device = 12345  # as if a disk had been mounted there
        shutil.rmtree(tmp_path / "run")
        with pytest.raises(errors.SaveError, match="so is its file system.*Mount it again"):
            world.save(State(), 1)
        assert not (tmp_path / "run").exists()


def test_h4_the_lock_honours_the_umask(tmp_path: Path) -> None:
    before = os.umask(0o002)
    try:
        with World(tmp_path / "run"):
            assert (tmp_path / "run" / ".lastcall" / "lock").stat().st_mode & 0o777 == 0o664
    finally:
        os.umask(before)


def test_h4_what_the_group_may_write_in_the_directory_it_may_write_below_it(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run").chmod(0o2775)
    before = os.umask(0o022)
    try:
        with World(tmp_path / "run"):
            assert (tmp_path / "run" / ".lastcall").stat().st_mode & 0o070 == 0o070
            assert (tmp_path / "run" / ".lastcall" / "lock").stat().st_mode & 0o060 == 0o060
    finally:
        os.umask(before)


@pytest.mark.skipif(os.getuid() != 0, reason="becomes a second user")
def test_h4_a_second_user_who_may_not_write_is_told_what_to_do(tmp_path: Path) -> None:
    with World(tmp_path / "run"):
        pass
    for folder in (tmp_path, *tmp_path.parents):
        if folder != Path("/") and not folder.stat().st_mode & 0o001:
            folder.chmod(folder.stat().st_mode | 0o011)
    (tmp_path / "run" / ".lastcall").chmod(0o777)
    os.seteuid(65534)
    try:
        with pytest.raises(
            errors.ConfigError,
            match=r"lock cannot be opened .*EACCES.*belongs to user "
            r"0.*chmod -R g\+rwX",
        ):
            Catalog(tmp_path / "run", Files()).open(clock.Clock())
        with pytest.raises(errors.ConfigError, match=r"cannot be made .*EACCES.*belongs to user 0"):
            Catalog(tmp_path / "new" / "run", Files()).open(clock.Clock())
    finally:
        os.seteuid(0)
