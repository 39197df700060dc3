"""Real Ray clusters on this machine: several `ray start --block`, each of which is a node that can be told to
go as a pod is told.

A cluster has a folder of its own below /tmp (the names of its sockets are short), ports of its own, and a
reaper.
"""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Iterator
from pathlib import Path

from helpers.processes import forkserver as nursery
from helpers.processes.reaper import Reaper
from helpers.servers.ports import free_ports

# seconds until a test gives up: two cores start many interpreters here, each of which imports torch
PATIENCE = 300.0
BIN = Path(sys.executable).parent
_OBJECT_STORE = 100_000_000
_SETTINGS = {
    "RAY_AUTH_MODE": "disabled",  # else a token is written into the home directory
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_DEDUP_LOGS": "0",
    "RAY_prestart_worker_first_driver": "0",  # one idle interpreter for each CPU of each node
    "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": "120",
    "RAY_memory_monitor_refresh_ms": "0",
    "RAY_worker_niceness": "0",  # 15 unless told otherwise: on a busy machine the workers then starve
}


class Cluster:
    """A head, and the nodes that are added to it. Leaving the block kills all of it."""

    def __init__(self, *, dashboard: bool = False, cpus: int = 4, **env: str) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="ray-"))
        self._reaper = Reaper(self.folder)
        self._env = env
        (self._port, self._dashboard_port) = free_ports(2)
        self.address = f"127.0.0.1:{self._port}"
        self.dashboard = f"http://127.0.0.1:{self._dashboard_port}" if dashboard else None
        self.nodes: list[Node] = []
        self.drivers: list[Driver] = []
        try:
            self.head = self._start(cpus, {}, "--head", f"--port={self._port}", *self._dashboard_options())
            until(self._answers, lambda: f"an answer of the head\n{self.head.said()}")
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Cluster:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _dashboard_options(self) -> tuple[str, ...]:
        if self.dashboard is None:
            return ("--include-dashboard=false",)
        return (
            "--include-dashboard=true",
            "--dashboard-host=127.0.0.1",
            f"--dashboard-port={self._dashboard_port}",
        )

    def _answers(self) -> bool:
        assert self.head.process.poll() is None, f"the head has ended\n{self.head.said()}"
        with socket.socket() as trial:
            return trial.connect_ex(("127.0.0.1", self._port)) == 0 and self.head.raylet() is not None

    def add(self, cpus: int = 1, **resources: float) -> Node:
        """One more node. `resources` are names of our own, by which a run is bound to certain nodes."""
        return self.add_several(1, cpus, **resources)[0]

    def free(self, resource: str) -> list[Node]:
        """The nodes that have it and stay."""
        return [
            node
            for node in self.nodes
            if resource in node.resources and not node.going and node.process.poll() is None
        ]

    def add_several(self, count: int, cpus: int = 1, **resources: float) -> list[Node]:
        """They start beside each other."""
        nodes = [
            self._start(cpus, resources, f"--address={self.address}", "--include-log-monitor=false")
            for _ in range(count)
        ]
        for node in nodes:
            until(node.registered, lambda node=node: f"a node that is up\n{node.said()}")
        return nodes

    def _start(self, cpus: int, resources: dict[str, float], *options: str) -> Node:
        words = [
            str(BIN / "ray"),
            "start",
            "--block",
            "--node-ip-address=127.0.0.1",
            f"--num-cpus={cpus}",
            "--dashboard-agent-listen-port=0",
            f"--resources={json.dumps(resources)}",
            f"--object-store-memory={_OBJECT_STORE}",
            "--temp-dir",
            str(self.folder),
            *options,
        ]
        out = self.folder / f"node-{len(self.nodes)}.out"
        with out.open("wb") as file:
            process = subprocess.Popen(
                words,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                start_new_session=True,
                env=self.environment(),
            )
        node = Node(process, out, resources)
        self.nodes.append(node)
        return node

    def environment(self, **more: str) -> dict[str, str]:
        """Of a node, and of a driver. Nothing of a Ray or a lastcall that somebody has set up in the shell of
        the tests."""
        inherited = {
            name: value for name, value in nursery.environment().items() if not name.startswith("RAY_")
        }
        path = f"{BIN}:{inherited.get('PATH', os.defpath)}"
        inherited.pop("PYTHONPATH")  # the package is installed, as it is on a cluster
        return {**inherited, "PATH": path, **_SETTINGS, **self._reaper.mark, **self._env, **more}

    def run(self, script: Path, *arguments: object, **env: str) -> Driver:
        """Start a driver, as a person would at a shell of the head."""
        out = self.folder / f"driver-{len(self.drivers)}.out"
        with out.open("wb") as file:
            process = subprocess.Popen(
                [sys.executable, "-u", str(script), *map(str, arguments)],
                stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT, start_new_session=True,
                env=self.environment(RAY_ADDRESS=self.address, **env),
            )  # fmt: skip
        driver = Driver(process, out)
        self.drivers.append(driver)
        return driver

    def command(self, *words: object, **env: str) -> subprocess.CompletedProcess[str]:
        """A program of the ray package, for example: drain-node, job."""
        address = {"RAY_ADDRESS": self.dashboard or self.address}
        return subprocess.run(
            [str(BIN / "ray"), *map(str, words)],
            capture_output=True,
            text=True,
            env=self.environment(**{**address, **env}),
            timeout=PATIENCE,
            check=False,
        )

    def node_of(self, pid: int) -> Node:
        """The node on which a worker runs: the `ray start` among its ancestors."""
        above = set(_ancestors(pid))
        return next(node for node in self.nodes if node.process.pid in above)

    def drain(self, node: Node, seconds: float) -> None:
        """As an autoscaler does before it takes a node away: nobody is signalled."""
        node.going = True
        done = self.command(
            "drain-node",
            f"--node-id={node.node_id()}",
            "--reason=DRAIN_NODE_REASON_PREEMPTION",
            "--reason-message=test",
            f"--deadline-remaining-seconds={int(seconds)}",
            f"--address={self.address}",
            RAY_ADDRESS=self.address,
        )
        assert done.returncode == 0, done.stdout + done.stderr

    def logs(self) -> str:
        """What all workers and controllers of the cluster have said, whether it reached a driver or not."""
        files = sorted(self.folder.glob("session_*/logs/worker-*"))
        return "".join(path.read_text(errors="replace") for path in files)

    def close(self) -> None:
        self._reaper.close()
        for process in [*(node.process for node in self.nodes), *(driver.process for driver in self.drivers)]:
            process.wait()


class Node:
    """One `ray start --block`: what PID 1 of a pod is under KubeRay."""

    def __init__(self, process: subprocess.Popen[bytes], out: Path, resources: Collection[str]) -> None:
        self.process = process
        self.resources = frozenset(resources)
        self.going = False  # it was told to go, or Ray was told that it will
        self._out = out

    def said(self) -> str:
        return self._out.read_text(errors="replace")

    def raylet(self) -> int | None:
        return next((pid for pid in _children(self.process.pid) if b"/raylet/raylet" in _command(pid)), None)

    def node_id(self) -> str:
        pid = self.raylet()
        assert pid is not None, self.said()
        found = re.search(rb"--node_id=([0-9a-f]+)", _command(pid))
        assert found is not None
        return found[1].decode()

    def registered(self) -> bool:
        assert self.process.poll() is None, f"a node has ended\n{self.said()}"
        return "Ray runtime started" in self.said() and self.raylet() is not None

    def terminate(self) -> None:
        """The pod is deleted: SIGTERM to PID 1, and to nobody else."""
        self.going = True
        self.process.send_signal(signal.SIGTERM)

    def wait(self) -> int:
        return self.process.wait(PATIENCE)


class Driver:
    """A script with a trainer in it. Its output holds that of the train workers."""

    def __init__(self, process: subprocess.Popen[bytes], out: Path) -> None:
        self.process = process
        self._out = out

    def said(self) -> str:
        return self._out.read_text(errors="replace")

    def wait(self, patience: float = PATIENCE) -> int:
        until(
            lambda: self.process.poll() is not None,
            lambda: f"the end of the driver\n{self.said()[-8000:]}",
            patience,
        )
        return self.process.returncode

    def until(self, condition: Callable[[], bool], what: str, patience: float = PATIENCE) -> None:
        """Wait for it while the driver lives."""

        def holds() -> bool:
            ended = self.process.poll() is not None
            if condition():
                return True
            assert not ended, (
                f"the driver ended with {self.process.returncode} before: {what}\n{self.said()[-8000:]}"
            )
            return False

        until(holds, lambda: f"{what}\n{self.said()[-8000:]}", patience)


def until(condition: Callable[[], bool], what: Callable[[], str], patience: float = PATIENCE) -> None:
    """Poll until it holds. `what` is asked for at the end of the patience only, since it may read logs."""
    deadline = time.monotonic() + patience
    while not condition():
        assert time.monotonic() < deadline, f"not in time: {what()}"
        time.sleep(0.05)


def _stat(pid: int) -> list[str]:
    """State, parent and so on; nothing if there is no such process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    except OSError:
        return []


def _ancestors(pid: int) -> Iterator[int]:
    while pid > 1:
        yield pid
        pid = int((_stat(pid) or ["", "0"])[1])


def _children(pid: int) -> list[int]:
    numbers = (int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit())
    return [number for number in numbers if (_stat(number) or ["", "0"])[1] == str(pid)]


def _command(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""
