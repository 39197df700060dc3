"""`lastcall run` around what is not protected, what is left behind, and a closed stdout."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from e2e.scripts.launch_harness import MEMBER, Launched
from helpers.processes.forkserver import environment

WARNING = (
    "No process below this launcher is protected: no training process has joined, so a notice saves nothing."
)
HANDLES = (
    "import signal, sys, time; signal.signal(signal.SIGTERM, lambda *_: sys.exit(0)); print('up', "
    "flush=True); time.sleep(1000)"
)


def test_b11_no_0_for_what_a_notice_has_interrupted(tmp_path: Path) -> None:
    with Launched(tmp_path, [sys.executable, "-c", HANDLES]) as launched:
        launched.expect("up")
        launched.send()
        assert launched.wait() == 143, launched.log()
    assert launched.log().count(WARNING) == 1
    assert "Exit code 143: got SIGTERM, but no process of the command was protected" in launched.log()


def test_b11_an_unprotected_torchrun_job_is_143(tmp_path: Path) -> None:
    (tmp_path / "work.py").write_text("import time\nprint('up', flush=True)\ntime.sleep(1000)\n")
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "1", tmp_path / "work.py"]
    with Launched(tmp_path, torchrun) as launched:
        launched.expect("up")
        launched.send()
        assert launched.wait() == 143, launched.log()
    assert WARNING in launched.log()


def remarked(folder: Path, *command: object, **env: str) -> str:
    """What is logged of a command that outlives the minute, which is half a second here."""
    source = (
        "import sys\nfrom lastcall.launch import supervisor\nfrom lastcall.cli.main import "
        "main\nsupervisor._REMARK = 0.5\n"
    )
    words = [
        sys.executable,
        "-c",
        source + "sys.exit(main())",
        "run",
        "--cloud",
        "none",
        "--",
        *map(str, command),
    ]
    done = subprocess.run(
        words, capture_output=True, text=True, env=environment(**env), cwd=folder, check=False, timeout=90
    )
    assert done.returncode == 0, done.stderr
    return done.stderr


def test_b11_after_a_minute_it_says_that_nothing_is_protected(tmp_path: Path) -> None:
    assert remarked(tmp_path, "sleep", "1.5").count(WARNING) == 1
    assert WARNING not in remarked(tmp_path, "sleep", "1", LASTCALL_ENABLED="0")


@pytest.mark.parametrize("ending", ["& exit 0", "& disown; true"])
def test_h3_a_command_that_ends_before_its_training_has_joined_is_waited_for(
    tmp_path: Path, ending: str
) -> None:
    with Launched(tmp_path, ["bash", "-c", f"{' '.join(MEMBER)} run --late go {ending}"]) as launched:
        launched.expect("started")
        launched.expect_log("The command has ended (exit code 0), but process")
        (tmp_path / "go").touch()
        launched.expect("joined")
        launched.send()
        assert launched.wait() == 75, launched.log()
        assert "left saved" in launched.lines()


DAEMON = """
import os, runpy, sys
if os.fork():
    os._exit(0)
os.setsid()
if os.fork():
    os._exit(0)
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0])
"""


def test_h3_a_double_fork_is_waited_for(tmp_path: Path) -> None:
    (tmp_path / "daemon.py").write_text(DAEMON)
    with Launched(
        tmp_path, [sys.executable, tmp_path / "daemon.py", MEMBER[1], "run", "--late", "go"]
    ) as launched:
        pid = int(launched.expect("started"))
        launched.expect_log("The command has ended (exit code 0), but process")
        (tmp_path / "go").touch()
        launched.expect("joined")
        subprocess.run(["kill", str(pid)], check=True)
        assert launched.wait() == 75, launched.log()


def test_h3_what_dies_before_it_has_joined_is_no_success(tmp_path: Path) -> None:
    with Launched(
        tmp_path, ["bash", "-c", f"{sys.executable} -c 'import time; time.sleep(1); 1 / 0' & exit 0"]
    ) as launched:
        assert launched.wait() == 1, launched.log()
    assert "the command ended with exit code 0, but process" in launched.log()


@pytest.mark.parametrize("closed", [">&-", ">&- 2>&-", "<&- >&- 2>&-"])
def test_h1_a_closed_stdout_changes_no_exit_code(tmp_path: Path, closed: str) -> None:
    for command, code in (
        ("true", 0),
        ("bash -c 'exit 75'", 75),
        ("bash -c 'kill -TERM $$'", 143),
        ("no-such-command", 127),
    ):
        line = f"exec {sys.executable} -m lastcall run --cloud none -- {command} {closed}"
        assert (
            subprocess.run(
                ["bash", "-c", line], env=environment(), cwd=tmp_path, check=False, timeout=60
            ).returncode
            == code
        )


TRAINS = """
import time, torch, lastcall
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
with lastcall.protect("run", model=model, optimizer=optimizer) as run:
    for step in run.steps(10**6):
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        print("step", step, flush=True)
        time.sleep(0.01)
"""


def test_h9_nohup_keeps_no_sighup_from_a_launcher_that_is_configured_for_it(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(TRAINS)
    with Launched(
        tmp_path, [sys.executable, "train.py"], before=["nohup"], LASTCALL_SIGNALS="SIGTERM,SIGHUP"
    ) as launched:
        launched.expect("step 3")
        launched.send(signal.SIGHUP)
        assert launched.wait() == 75, launched.log()


def test_d4_three_hundred_idle_connections_do_not_keep_a_launcher_from_its_75(tmp_path: Path) -> None:
    """On 7dc1fbe the launcher ran out of descriptors, and left with 1."""
    with Launched(tmp_path, [*MEMBER, "run"], before=["prlimit", "--nofile=256:256"]) as launched:
        launched.expect("joined")
        address = ("127.0.0.1", listening(launched.pid))
        idle = [socket.create_connection(address, timeout=10) for _ in range(300)]
        try:
            launched.send()
            assert launched.wait() == 75, launched.log()
        finally:
            for link in idle:
                link.close()


def listening(pid: int) -> int:
    """The port on which this process listens, as the kernel's tables have it."""
    own = {os.readlink(link) for link in Path(f"/proc/{pid}/fd").iterdir() if os.path.lexists(link)}
    for line in (Path("/proc/net/tcp").read_text() + Path("/proc/net/tcp6").read_text()).splitlines():
        fields = line.split()
        if fields[3] == "0A" and f"socket:[{fields[9]}]" in own:
            return int(fields[1].rpartition(":")[2], 16)
    raise AssertionError(f"process {pid} does not listen")
