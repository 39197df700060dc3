"""A process whose launcher is gone is told so, once; and nobody else is."""

from __future__ import annotations

import dataclasses
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from lastcall.clock import Clock
from lastcall.core.notice.launcher_link import PAUSE, LauncherLink
from lastcall.core.process import orphans, registry
from lastcall.core.process.identity import Process
from lastcall.types import Notice

GRACE = 30.0
ELDER = "input()"
FOUND = (
    "from lastcall.core.process import orphans; import sys; "
    "print([p.pid for _, p in orphans.RequiredAncestors.of_start()._ancestors], flush=True); input()"
)


@pytest.fixture(autouse=True)
def nobody_above(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LASTCALL_REGISTRY", raising=False)
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)


@contextmanager
def running(*command: str, **env: str) -> Iterator[subprocess.Popen[str]]:
    """A process that waits for the end of its input."""
    words = command or (sys.executable, "-c", ELDER)
    process = subprocess.Popen(
        words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env={**os.environ, **env}
    )
    with process:
        yield process
        process.kill()


def as_process(pid: int) -> Process:
    started = registry.process_start(pid)
    assert started is not None
    return dataclasses.replace(Process.own(), pid=pid, started=started)


@pytest.fixture
def book(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> registry.Registry:
    folder = tmp_path / "registry"
    folder.mkdir()
    monkeypatch.setenv("LASTCALL_REGISTRY", str(folder))
    return registry.Registry(folder)


def joined(root: Path) -> LauncherLink:
    outside = LauncherLink(root, root / ".lastcall", Clock(), GRACE)
    outside.tell(step=0)
    return outside


def check_orphan(notice: Notice | None, reason: str) -> None:
    assert notice is not None and notice.deadline is not None
    assert (notice.source, notice.reason, notice.signum) == ("orphan", reason, None)
    assert notice.deadline - notice.at == GRACE


# ---- lastcall run ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cleaned", [False, True], ids=["its folder is there", "its folder is gone"])
def test_the_end_of_the_launcher_is_told_once(tmp_path: Path, book: registry.Registry, cleaned: bool) -> None:
    with running() as launcher:
        book.sign(dataclasses.asdict(as_process(launcher.pid)))
        outside = joined(tmp_path)
        assert outside.notice() is None
        if cleaned:
            shutil.rmtree(book.folder)
            assert outside.notice() is None, "a folder that has vanished is no proof"
        launcher.kill()
        os.waitid(os.P_PID, launcher.pid, os.WEXITED | os.WNOWAIT)  # a zombie still has its number
        check_orphan(outside.notice(), f"the launcher (process {launcher.pid}) is gone")
        assert outside.notice() is None


def test_a_launcher_that_was_killed_before_the_training_began_is_gone(
    tmp_path: Path, book: registry.Registry
) -> None:
    with running() as launcher:
        book.sign(dataclasses.asdict(as_process(launcher.pid)))
    check_orphan(joined(tmp_path).notice(), f"the launcher (process {launcher.pid}) is gone")


def test_a_launcher_that_left_as_it_should_before_the_training_joined_is_no_loss(
    tmp_path: Path, book: registry.Registry
) -> None:
    """It takes its folder along. What it leaves is a daemon, and was meant to be left."""
    with running() as launcher:
        book.sign(dataclasses.asdict(as_process(launcher.pid)))
        outside = LauncherLink(tmp_path, tmp_path / ".lastcall", Clock(), GRACE)
        shutil.rmtree(book.folder)
    outside.tell(step=0)
    assert outside.notice() is None


def test_the_launchers_own_notice_comes_before_its_end(tmp_path: Path, book: registry.Registry) -> None:
    posted = Notice("aws", "spot interruption", 10.0, 130.0)
    with running() as launcher:
        book.sign(dataclasses.asdict(as_process(launcher.pid)))
        book.post(posted)
    outside = joined(tmp_path)
    assert outside.notice() == posted
    check_orphan(outside.notice(), f"the launcher (process {launcher.pid}) is gone")


def test_a_number_that_another_process_has_now_is_not_the_launcher(
    tmp_path: Path, book: registry.Registry
) -> None:
    with running() as other:
        before = dataclasses.replace(as_process(other.pid), started=1)
        book.sign(dataclasses.asdict(before))
        check_orphan(joined(tmp_path).notice(), f"the launcher (process {other.pid}) is gone")


@pytest.mark.parametrize(
    "signed",
    [
        {},
        {"pid": 1},
        {"host": "", "pid": 2**22 + 1, "started": 1},
        {"host": "another", "pid": 2**22 + 1, "started": 1},
        {"host": Process.own().host, "pid": "7", "started": 1},
        {"unknown": 1},
    ],
)
def test_a_launcher_of_which_nothing_is_known_orphans_nobody(
    tmp_path: Path, book: registry.Registry, signed: dict[str, object]
) -> None:
    book.sign(signed)
    assert joined(tmp_path).notice() is None


def test_a_registry_that_nobody_has_signed_orphans_nobody(tmp_path: Path, book: registry.Registry) -> None:
    """That of an older lastcall, or of one that found its disk full."""
    assert joined(tmp_path).notice() is None


def test_a_launcher_that_cannot_be_looked_at_is_not_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    """/proc with hidepid, and training under another user."""
    with running() as launcher:
        process = as_process(launcher.pid)
        monkeypatch.setattr(registry, "process_start", lambda pid: None)
        elders = orphans.RequiredAncestors()
        elders.add_launcher(dataclasses.asdict(process))
        assert elders.gone() == ""


# ---- torchrun ----------------------------------------------------------------------------------------------

AGENT = """
import os, subprocess, sys
subprocess.run(sys.argv[1:], env={**os.environ, "TORCHELASTIC_RUN_ID": "seven"})
"""
# the last command is not the only one, so it stays in between
SCRIPT_BETWEEN = ("sh", "-c", '"$@"; true', "sh")


@pytest.mark.parametrize("between", [(), SCRIPT_BETWEEN], ids=["directly", "through a script"])
def test_torchrun_is_found_above_its_worker(between: tuple[str, ...]) -> None:
    with running(sys.executable, "-c", AGENT, *between, sys.executable, "-c", FOUND) as agent:
        assert agent.stdout is not None
        assert agent.stdout.readline().strip() == f"[{agent.pid}]"


def test_the_end_of_torchrun_is_told(tmp_path: Path) -> None:
    with running() as agent:
        elders = orphans.RequiredAncestors(("torchrun", as_process(agent.pid)))
        assert elders.gone() == ""
    assert elders.gone() == f"torchrun (process {agent.pid}) is gone"


def test_a_shell_above_is_nobody_to_be_outlived_by(tmp_path: Path) -> None:
    """nohup python train.py &"""
    with running(*SCRIPT_BETWEEN, sys.executable, "-c", FOUND) as shell:
        assert shell.stdout is not None
        assert shell.stdout.readline().strip() == "[]"


# ---- multiprocessing ---------------------------------------------------------------------------------------


def _child(ours: Connection, root: str) -> None:
    outside = LauncherLink(Path(root), Path(root), Clock(), GRACE)
    ours.send(outside.notice())
    while (notice := outside.notice()) is None:
        Clock().sleep(0.01)
    ours.send(notice)


def _parent(ours: Connection, root: str) -> None:
    multiprocessing.get_context("spawn").Process(target=_child, args=(ours, root)).start()
    signal.pause()


def test_a_multiprocessing_child_is_told_of_the_end_of_its_parent(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    mine, theirs = context.Pipe()
    parent = context.Process(target=_parent, args=(theirs, str(tmp_path)))
    parent.start()
    assert mine.recv() is None
    parent.kill()
    check_orphan(mine.recv(), f"the parent process (process {parent.pid}) is gone")
    parent.join()


# ---- the pause ---------------------------------------------------------------------------------------------


def test_a_pause_is_news_for_as_long_as_it_lasts(tmp_path: Path) -> None:
    outside = LauncherLink(tmp_path, tmp_path, Clock(), GRACE)
    assert outside.notice() is None
    (tmp_path / PAUSE).touch()
    for _ in range(2):
        notice = outside.notice()
        assert notice is not None and notice.source == "pause"
    (tmp_path / PAUSE).unlink()
    assert outside.notice() is None
