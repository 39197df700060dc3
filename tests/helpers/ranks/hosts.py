"""Several hosts on one machine: network namespaces with addresses, names and shared memory of their own, on
one bridge, so that links can be cut and mended. The file system is the one of the machine, as the shared one
of a cluster is. Needs root, and iproute2."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from helpers.ranks import plan as ranks_plan

PORT = 29500  # each set of hosts has a network of its own, so no two of them can meet on it
_DRESS = 'hostname "$1"; mount --bind "$2" /etc/hosts; mount -t tmpfs tmpfs /dev/shm; shift 2; exec "$@"'


class Hosts:
    """Numbered from 0. Host 0 has the address 10.77.0.1, and so on."""

    def __init__(self, count: int, folder: Path) -> None:
        self.count = count
        self._tag = f"lc{os.getpid() % 100_000}"  # names of links have 15 characters at most
        self._names = folder / "hosts"
        lines = [f"{self.address(host)} {self.name(host)}" for host in range(count)]
        self._names.write_text("\n".join(["127.0.0.1 localhost", *lines, ""]))

    def name(self, host: int) -> str:
        return f"{self._tag}h{host}"

    def address(self, host: int) -> str:
        return f"10.77.0.{host + 1}"

    def command(self, host: int, command: Sequence[str]) -> list[str]:
        """What runs a command on a host."""
        # ip makes a mount namespace of its own, so that what _DRESS mounts is seen by this command only.
        inside = ["sh", "-ec", _DRESS, "sh", self.name(host), str(self._names), *command]
        return ["ip", "netns", "exec", self.name(host), "unshare", "--uts", *inside]

    def environment(self, host: int) -> dict[str, str]:
        """What brings a forked rank to a host, and has it find the others."""
        return {
            ranks_plan.HOST: f"{self.name(host)}:{self._names}",
            "GLOO_SOCKET_IFNAME": "eth0",
            "MASTER_ADDR": self.address(0),
        }

    def torchrun(self, host: int, ranks: int, *command: str) -> list[str]:
        """torchrun on one of the hosts; the first is the master."""
        where = [
            "--nnodes",
            str(self.count),
            "--node-rank",
            str(host),
            "--master-addr",
            self.address(0),
            "--master-port",
            str(PORT),
        ]
        return [
            str(Path(sys.executable).with_name("torchrun")),
            *where,
            "--nproc-per-node",
            str(ranks),
            *command,
        ]

    def cut(self, host: int) -> None:
        """Nothing goes in or out any more, and no connection is told so."""
        _ip("link", "set", self._link(host), "down")

    def mend(self, host: int) -> None:
        _ip("link", "set", self._link(host), "up")

    def build(self) -> None:
        _ip("link", "add", self._tag, "type", "bridge")
        _ip("link", "set", self._tag, "up")
        for host in range(self.count):
            name = self.name(host)
            _ip("netns", "add", name)
            _ip("link", "add", self._link(host), "type", "veth", "peer", "name", "eth0", "netns", name)
            _ip("link", "set", self._link(host), "master", self._tag, "up")
            _ip("-n", name, "addr", "add", f"{self.address(host)}/24", "dev", "eth0")
            _ip("-n", name, "link", "set", "lo", "up")
            _ip("-n", name, "link", "set", "eth0", "up")

    def remove(self) -> None:
        """Whatever there is of them."""
        for host in range(self.count):
            # and its end of the link, and so the other
            subprocess.run(["ip", "netns", "del", self.name(host)], capture_output=True)
            # sooner, if processes are left there
            subprocess.run(["ip", "link", "del", self._link(host)], capture_output=True)
        subprocess.run(["ip", "link", "del", self._tag], capture_output=True)

    def _link(self, host: int) -> str:
        return f"{self._tag}v{host}"


def _ip(*words: str) -> None:
    done = subprocess.run(["ip", *words], capture_output=True, text=True)
    if done.returncode:
        raise OSError(f"ip {' '.join(words)}: {done.stderr.strip()}")


@contextmanager
def network(count: int) -> Iterator[Hosts]:
    """Hosts for a test, which is skipped where they cannot be made."""
    for program, package in (("ip", "iproute2"), ("unshare", "util-linux")):
        if not shutil.which(program):
            pytest.skip(f"there is no {program} here: apt-get install -y {package}")
    with tempfile.TemporaryDirectory() as folder:
        hosts = Hosts(count, Path(folder))
        try:
            try:
                hosts.build()
            except OSError as error:
                pytest.skip(f"network namespaces cannot be made here: {error}")
            yield hosts
        finally:
            hosts.remove()
