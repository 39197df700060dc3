"""The machine within the machine, on which the cluster runs: nothing of it may outlive the tests."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from helpers.kube.api import until
from helpers.processes.scripts import gone

_SCRIPT = """
import os, time
from helpers.kube.machine import Machine
machine = Machine(os.environ["PATH"] + ":/usr/sbin:/sbin")
machine.start("sh", "-c", "setsid sleep 1000 & mount -t tmpfs tmpfs /mnt; exec sleep 2000")
machine.expect(lambda: "sleep 2000" in machine.run("ps", "axo", "args=").splitlines(), "a server")
print(machine.folder, machine.network, *machine.pids(), flush=True)
time.sleep(1000)
"""


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGKILL])
def test_processes_mounts_and_network_end_with_the_tests_however_these_end(signum: signal.Signals) -> None:
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[1])}
    with subprocess.Popen(
        [sys.executable, "-c", _SCRIPT], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=env
    ) as tests:
        assert tests.stdout is not None
        try:
            folder, network, *pids = tests.stdout.readline().split()
            assert len(pids) >= 3 and not any(gone(int(pid)) for pid in pids)
            assert f"{network}.2.1" in said("ip", "address")
            tests.send_signal(signum)
        except BaseException:
            tests.kill()  # else its end would be waited for
            raise
    until(lambda: all(gone(int(pid)) for pid in pids), lambda: f"the end of {pids}")
    until(lambda: not Path(folder).exists(), lambda: f"the end of {folder}")
    until(
        lambda: f"{network}." not in said("ip", "address") + said("ip", "route"),
        lambda: f"the end of {network}",
    )
    assert folder not in Path("/proc/mounts").read_text()


def said(*words: str) -> str:
    return subprocess.run(words, capture_output=True, text=True, check=True).stdout
