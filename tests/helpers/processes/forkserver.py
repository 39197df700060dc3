"""Real processes for real signals, forked from one that has imported torch already (forkserver_child)."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[3]
PATIENCE = 90.0  # seconds until a test gives up; nothing is expected to take anywhere near it
WIDE = "400"  # columns: every sentence of a command is on one line
QUIET = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}


def environment(**more: str) -> dict[str, str]:
    """The environment of a child: ours, without settings of lastcall that somebody may have exported."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("LASTCALL_")}
    path = f"{ROOT / 'src'}:{ROOT / 'tests'}"
    return {**inherited, **QUIET, "PYTHONPATH": path, "COLUMNS": WIDE, **more}


def until(condition: Callable[[], bool], what: str, patience: float = PATIENCE) -> None:
    """Poll until it holds."""
    deadline = time.monotonic() + patience
    while not condition():
        if time.monotonic() > deadline:
            raise AssertionError(f"not in time: {what}")
        time.sleep(0.002)


class Child:
    """One process under test."""

    def __init__(self, nursery: Nursery, pid: int, stdout: Path, stderr: Path) -> None:
        self._nursery = nursery
        self.pid = pid
        self._stdout = stdout
        self._stderr = stderr
        self.code: int | None = None

    def poll(self) -> int | None:
        """Its return code, negative for a signal; None while it runs."""
        if self.code is None:
            self.code = self._nursery.ask(poll=self.pid)["code"]
        return self.code

    def wait(self, patience: float = PATIENCE) -> int:
        until(lambda: self.poll() is not None, f"the end of process {self.pid}\n{self.log()}", patience)
        assert self.code is not None
        return self.code

    def send(self, signum: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, signum)

    def send_group(self, signum: int) -> None:
        if self.poll() is None:
            try:
                os.killpg(self.pid, signum)
            except ProcessLookupError:  # it has not made itself a group of its own yet
                os.kill(self.pid, signum)

    def lines(self) -> list[str]:
        """What it has said, whole lines only."""
        text = self._stdout.read_text(errors="replace") if self._stdout.exists() else ""
        return text[: text.rfind("\n") + 1].splitlines()

    def log(self) -> str:
        return self._stderr.read_text(errors="replace") if self._stderr.exists() else ""

    def expect(self, *starts: str) -> str:
        """Wait for a line on stdout that starts with one of these; returns the line."""
        found: list[str] = []

        def seen() -> bool:
            found[:] = [line for line in self.lines() if line.startswith(starts)]
            if not found and self.poll() is not None:
                found[:] = [line for line in self.lines() if line.startswith(starts)]
                if not found:
                    raise AssertionError(
                        f"ended with {self.code} and no line {starts}: {self.lines()[-5:]}\n{self.log()}"
                    )
            return bool(found)

        until(seen, f"a line {starts}")
        return found[0]

    def expect_log(self, part: str) -> None:
        """Wait for a part of what it logs on stderr."""

        def seen() -> bool:
            if part in self.log():
                return True
            if self.poll() is not None and part not in self.log():
                raise AssertionError(f"ended with {self.code} and never logged {part!r}:\n{self.log()}")
            return False

        until(seen, f"a log line with {part!r}")

    def end(self) -> None:
        """Kill what is left of it and of its children."""
        try:
            os.killpg(self.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        if self.poll() is None:
            self.wait()


class Nursery:
    def __init__(self, imports: Sequence[str] = ()) -> None:
        """`imports`: modules that the children shall find imported, besides those that every script needs."""
        self._channel, theirs = socket.socketpair()
        server = Path(__file__).with_name("forkserver_child.py")
        self._process = subprocess.Popen(
            [sys.executable, "-X", "faulthandler", str(server), str(theirs.fileno()), *imports],
            pass_fds=[theirs.fileno()],
            env=environment(),
        )
        theirs.close()
        self._answers = self._channel.makefile("r")
        self._children: list[Child] = []
        self._count = 0

    def ask(self, **request: Any) -> dict[str, Any]:
        self._channel.sendall((json.dumps(request) + "\n").encode())
        answer = self._answers.readline()
        assert answer, "the nursery has died"
        result: dict[str, Any] = json.loads(answer)
        return result

    def start(self, folder: Path, script: Path, *arguments: object, **env: str) -> Child:
        """Run a script in a new process. Its output goes to files in `folder`."""
        self._count += 1
        stdout, stderr = folder / f"stdout-{self._count}", folder / f"stderr-{self._count}"
        argv = [str(script), *map(str, arguments)]
        answer = self.ask(argv=argv, env=env, cwd=str(folder), stdout=str(stdout), stderr=str(stderr))
        child = Child(self, answer["pid"], stdout, stderr)
        self._children.append(child)
        return child

    def write(self, folder: Path, source: str) -> Path:
        """A script of its own for one test."""
        script = folder / "script.py"
        script.write_text(textwrap.dedent(source))
        return script

    def run(self, folder: Path, script: Path, *arguments: object, **env: str) -> Child:
        """Run a script to its end."""
        child = self.start(folder, script, *arguments, **env)
        child.wait()
        return child

    def clear(self) -> None:
        """End what a test has left behind."""
        while self._children:
            self._children.pop().end()

    def close(self) -> None:
        self.clear()
        self._answers.close()
        self._channel.close()
        self._process.wait(PATIENCE)


@contextmanager
def opened(imports: Sequence[str] = ()) -> Iterator[Nursery]:
    nursery = Nursery(imports)
    try:
        yield nursery
    finally:
        nursery.close()
