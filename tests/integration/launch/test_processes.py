"""Who is who below the launcher."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from helpers.processes.forkserver import until
from lastcall.launch import processes
from lastcall.launch.processes import LiveProcess


def process(pid: int, parent: int, *argv: str) -> LiveProcess:
    return LiveProcess(pid, parent, pid, argv)


@pytest.mark.parametrize(
    "argv",
    [
        ("/venv/bin/python", "/venv/bin/torchrun", "--nproc-per-node", "2", "train.py"),
        ("/usr/bin/python3.11", "-u", "-m", "torch.distributed.run", "train.py"),
        ("python3", "-m", "torch.distributed.launch", "train.py"),
        ("python", "-X", "faulthandler", "-W", "error", "/venv/bin/torchrun", "train.py"),
        ("/venv/bin/python", "/venv/bin/accelerate", "launch", "train.py"),
        ("python", "-m", "accelerate.commands.launch", "train.py"),
        ("torchrun", "train.py"),
    ],
)
def test_agents_are_known_by_their_command_line(argv: tuple[str, ...]) -> None:
    assert process(2, 1, *argv).is_agent


@pytest.mark.parametrize(
    "argv",
    [
        (),
        ("python", "train.py", "torchrun"),
        ("python", "-u", "train.py", "--launcher", "torch.distributed.run"),
        ("bash", "-c", "torchrun train.py"),
        ("python", "-c", "torchrun"),
        ("python", "/venv/bin/accelerate", "config"),
        ("python", "-m"),
        ("python", "-X"),
    ],
)
def test_others_are_not_agents(argv: tuple[str, ...]) -> None:
    assert not process(2, 1, *argv).is_agent


def test_servants_of_python_are_told_from_programs() -> None:
    tree = {
        one.pid: one
        for one in (
            process(2, 1, "bash", "run.sh"),
            # a subshell has its parent's command line, too, but it is no Python
            process(3, 2, "bash", "run.sh"),
            process(4, 3, "python", "train.py"),
            process(5, 4, "python", "train.py"),
            process(6, 4, "python", "-c", "from multiprocessing.spawn import spawn_main; spawn_main(7)"),
            process(7, 4, "python", "-c", "from multiprocessing.resource_tracker import main;main(8)"),
            process(8, 4, "python", "-c", "from multiprocessing.forkserver import main; main(9)"),
            process(9, 4, "python", "other.py"),
            process(10, 4, "ffmpeg"),
        )
    }
    assert [pid for pid, one in tree.items() if processes.is_servant(one, tree)] == [5, 6, 7, 8]


def test_an_agent_above_is_found_through_any_number_of_generations() -> None:
    tree = {
        one.pid: one
        for one in (
            process(2, 1, "torchrun"),
            process(3, 2, "bash"),
            process(4, 3, "python"),
            process(5, 1, "python"),
        )
    }
    assert processes.has_agent_above(4, tree)
    assert not processes.has_agent_above(2, tree)
    assert not processes.has_agent_above(5, tree)
    assert not processes.has_agent_above(99, tree)


def test_the_tree_below_is_what_lives_there() -> None:
    child = subprocess.Popen(
        ["bash", "-c", "sleep 1000 & (sleep 1000; true) & (exit 0) & echo up; wait"], stdout=subprocess.PIPE
    )
    try:
        assert child.stdout is not None and child.stdout.readline() == b"up\n"
        until(lambda: len(processes.below(child.pid)) == 3, "two sleepers and a subshell")
        argvs = sorted(one.argv for one in processes.below(child.pid).values())
        assert argvs.count(("sleep", "1000")) == 2
        assert child.pid in processes.below(os.getpid())
        processes.send(processes.below(child.pid).values(), signal.SIGKILL)
        until(lambda: not processes.below(child.pid), "the end of all")
    finally:
        child.kill()
        child.communicate()


def test_a_process_that_is_gone_or_another_one_by_now_is_not_signalled() -> None:
    child = subprocess.Popen(["sleep", "1000"])
    try:
        (real,) = (one for one in processes.below(os.getpid()).values() if one.pid == child.pid)
        other = LiveProcess(real.pid, real.parent, real.started + 1, real.argv)
        assert processes.send([other, LiveProcess(2**22 + 1, 1, 5, ())], signal.SIGKILL) == []
        assert processes.send([real], signal.SIGKILL) == [child.pid]
    finally:
        child.kill()
        assert child.wait() == -signal.SIGKILL


def test_who_catches_a_signal_is_seen_from_outside(tmp_path: Path) -> None:
    source = (
        "import signal; signal.signal(signal.SIGUSR1, lambda *_: None); print('up', flush=True); "
        "signal.pause()"
    )
    child = subprocess.Popen(
        [sys.executable, "-c", source], stdout=subprocess.PIPE, env={"LASTCALL_REGISTRY": "/here"}
    )
    try:
        assert child.stdout is not None
        child.stdout.readline()
        assert processes.catches(child.pid, signal.SIGUSR1)
        assert not processes.catches(child.pid, signal.SIGUSR2)
        assert not processes.catches(2**22 + 1, signal.SIGUSR1)
        one = processes.below(os.getpid())[child.pid]
        assert processes.carries(one, "LASTCALL_REGISTRY", "/here")
        assert not processes.carries(one, "LASTCALL_REGISTRY", "/her")
        assert not processes.carries(LiveProcess(2**22 + 1, 1, 5, ()), "LASTCALL_REGISTRY", "/here")
    finally:
        child.kill()
        child.communicate()


def test_return_codes_and_crowds_in_words() -> None:
    assert [processes.described(status) for status in (0, 3, -9, -99)] == [
        "exit code 0",
        "exit code 3",
        "SIGKILL",
        "signal 99",
    ]
    assert [processes.names(pids) for pids in ([], [7], [8, 7])] == [
        "no process",
        "process 7",
        "processes 7, 8",
    ]
