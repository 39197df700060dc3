"""A machine within the machine, for a cluster:

nothing of it is left when it ends, and two can be there at once (see warden.py).
"""

from __future__ import annotations

import itertools
import json
import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from helpers.kube.api import until

_WARDEN = Path(__file__).with_name("warden.py")


class Machine:
    """Networks, all below 10.N: .0 services, .1 pods, .2 between this machine (`outside`) and that one
    (`inside`)."""

    def __init__(self, path: str) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="kube-"))
        self._path = path
        self._programs: dict[str, subprocess.Popen[bytes]] = {}
        self._warden = subprocess.Popen(
            [sys.executable, "-S", str(_WARDEN), str(self.folder)],
            stdin=subprocess.PIPE,
            start_new_session=True,
        )
        try:
            self.expect(lambda: (self.folder / "first").exists(), "a machine with namespaces of its own")
            self._first = _child(_child(self._warden.pid))
            self.network = self._connect()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        assert self._warden.stdin is not None
        self._warden.stdin.close()
        self._warden.wait()
        for program in self._programs.values():
            program.wait()

    def _connect(self) -> str:
        taken = json.dumps(json.loads(_said("ip", "-json", "route")))
        numbers = random.sample(range(64, 250), 186)
        name, network = next(
            (f"kube{n}", f"10.{n}")
            for n in numbers
            if f'"10.{n}.' not in taken and _link(f"kube{n}", self._first)
        )
        for words in (
            f"addr add {network}.2.1/24 dev {name}", f"link set {name} up", f"route add {network}.0.0/16 via "
                                                                            f"{network}.2.2",
        ):  # fmt: skip
            _said("ip", *words.split())
        self.inside, self.outside = f"{network}.2.2", f"{network}.2.1"
        for words in (
            f"addr add {self.inside}/24 dev eth0", "link set eth0 up", f"addr add {network}.0.1/32 dev lo",
            f"route add default via {self.outside}",
        ):  # fmt: skip
            self.run("ip", *words.split())
        return network

    def start(self, name: str, *words: object) -> None:
        """A server. It ends with the machine."""
        with (self.folder / f"{name}.log").open("wb") as log:
            self._programs[name] = subprocess.Popen(
                self._entered(name, *words),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                env=self._environment(),
            )

    def run(self, *words: object) -> str:
        done = subprocess.run(
            self._entered(*words),
            capture_output=True,
            text=True,
            env=self._environment(),
            timeout=300,
            check=False,
        )
        assert done.returncode == 0, f"{words} ended with {done.returncode}:\n{done.stdout}{done.stderr}"
        return done.stdout

    def expect(self, condition: Callable[[], bool], what: str) -> None:
        """Wait for it while the servers live."""

        def holds() -> bool:
            for name, program in {"the warden": self._warden, **self._programs}.items():
                assert program.poll() is None, (
                    f"{name} has ended with {program.returncode} before: {what}\n{self.log(name)}"
                )
            return condition()

        until(holds, lambda: f"{what}\n{self.log(next(reversed(self._programs), ''))}")

    def pids(self) -> list[int]:
        """All processes in there, as they are numbered out here."""
        inside = Path(f"/proc/{self._first}/ns/pid").readlink()
        return [
            int(entry.name)
            for entry in Path("/proc").iterdir()
            if entry.name.isdigit() and _namespace(entry) == inside
        ]

    def log(self, name: str) -> str:
        path = self.folder / f"{name}.log"
        return path.read_text(errors="replace")[-6000:] if path.exists() else ""

    def _entered(self, *words: object) -> list[str]:
        return [
            "nsenter",
            f"--target={self._first}",
            "--mount",
            "--pid",
            "--net",
            f"--wd={self.folder}",
            *map(str, words),
        ]

    def _environment(self) -> dict[str, str]:
        return {"PATH": self._path, "HOME": str(self.folder), "TMPDIR": "/tmp", "LANG": "C.UTF-8"}


def _link(name: str, pid: int) -> bool:
    """A pair of interfaces, one here and one there; not if there is one of this name, of another cluster."""
    words = ["ip", "link", "add", name, "type", "veth", "peer", "name", "eth0", "netns", str(pid)]
    return subprocess.run(words, capture_output=True, check=False).returncode == 0


def _namespace(entry: Path) -> Path | None:
    try:
        return (entry / "ns" / "pid").readlink()
    except OSError:  # it is gone
        return None


def _child(pid: int) -> int:
    children = itertools.chain.from_iterable(
        task.joinpath("children").read_text().split() for task in Path(f"/proc/{pid}/task").iterdir()
    )
    return int(next(children))


def _said(*words: str) -> str:
    done = subprocess.run(words, capture_output=True, text=True, check=False, env={**os.environ, "LANG": "C"})
    assert done.returncode == 0, f"{' '.join(words)}: {done.stderr}"
    return done.stdout
