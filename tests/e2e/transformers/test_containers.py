"""Two containers with one volume: their processes have the same numbers, and their files must not have the
same names."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from helpers.processes import containers
from helpers.processes import interruption_chain as chain
from helpers.processes.forkserver import environment, until
from helpers.servers.ports import free_port

SCRIPT = """
import os
from helpers.kubeflow.functions import train

print("process", os.getpid(), flush=True)
train(epochs=100, pause=0.2)
"""
ENVIRON = {
    "LASTCALL_ENABLED": "1",
    "LASTCALL_KILL_WAIT_SECONDS": "0",
    "OMP_NUM_THREADS": "1",
    "GLOO_SOCKET_IFNAME": "lo",
}


class Container:
    def __init__(self, folder: Path, rank: int, port: int) -> None:
        ranks = {
            "RANK": str(rank),
            "LOCAL_RANK": "0",
            "WORLD_SIZE": "2",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
        }
        environ = {**environment(), **ENVIRON, **ranks, "LASTCALL_DIRECTORY": str(folder / "volume")}
        self._said, self._log = folder / f"said-{rank}", folder / f"log-{rank}"
        with self._said.open("w") as said, self._log.open("w") as log:
            command = [*containers.ALONE, sys.executable, "-c", SCRIPT]
            self._process = subprocess.Popen(command, env=environ, cwd=folder, stdout=said, stderr=log)

    def expect(self, words: str) -> None:
        until(lambda: words in self._said.read_text(), f"{words}: {self.log()}")

    def send(self, signum: int) -> None:
        (first,) = Path(f"/proc/{self._process.pid}/task/{self._process.pid}/children").read_text().split()
        os.kill(int(first), signum)

    def wait(self) -> int:
        return self._process.wait(60)

    def log(self) -> str:
        return self._log.read_text()

    def end(self) -> None:
        self._process.kill()
        self._process.wait()


@pytest.mark.parametrize("told", [(0,), (0, 1)])
def test_ranks_with_the_same_process_numbers_save_together(tmp_path: Path, told: tuple[int, ...]) -> None:
    containers.need()
    port = free_port()
    pods = [Container(tmp_path, rank, port) for rank in (0, 1)]
    try:
        for container in pods:
            container.expect("process 1\n")
            container.expect("step 3\n")
        for rank in told:
            pods[rank].send(signal.SIGTERM)
        codes = [container.wait() for container in pods]
        assert codes == [chain.SAVED, chain.SAVED], [container.log() for container in pods]
        (record,) = chain.records(tmp_path / "volume")
        assert (record["kind"], record["world"], record["exact"]) == ("jit", 2, True)
    finally:
        for container in pods:
            container.end()
