"""One incarnation of the command under the drill: started, watched, signalled, and removed completely.

The drill is not `lastcall run`: it only does what a platform does, which is to start one process and to
signal it. It finds the training processes below in the registries: its own, and those that a `lastcall run`
in the command created and named in its children's environments.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path

from lastcall import errors
from lastcall.core.process import registry
from lastcall.core.process.registry import Member
from lastcall.drill.options import DrillOptions
from lastcall.launch import environment, processes
from lastcall.launch.processes import LiveProcess

_SEARCH = 0.5  # seconds between two searches for the registry of a `lastcall run` in the command
_DYING = 10.0  # seconds for the kernel to remove killed processes
_PR_SET_PDEATHSIG = 1
_TAIL = 64 * 1024
_libc = ctypes.CDLL(None)


class Incarnation:
    def __init__(
        self, options: DrillOptions, path: str, folder: Path, log: Path, more: Mapping[str, str] | None = None
    ) -> None:
        """OSError if the command cannot start. `folder` belongs to this incarnation; `more` is added to its
        environment."""
        self._strangers = {
            (process.pid, process.started) for process in processes.below(os.getpid()).values()
        }
        self._books = {str(folder): registry.Registry(folder)}
        self._seen: dict[tuple[int, int], Member] = {}
        self._searched = 0.0
        # when it was signalled, by both clocks, and which processes
        self.notice: tuple[float, float, list[int]] | None = None
        self._log = log
        with log.open("ab") as output:
            self._said = output.tell()
            self.began, self.began_wall = time.monotonic(), time.time()
            # A session of its own, so that a Ctrl-C in the terminal ends the drill, and the drill ends the
            # run.
            self.process = subprocess.Popen(
                options.command,
                executable=path,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env={**environment.switched_on(os.environ), "LASTCALL_REGISTRY": str(folder), **(more or {})},
                preexec_fn=_end_with_parent,
            )

    # ---- what is known of it -------------------------------------------------------------------------------

    def look(self) -> None:
        """Record what the training processes report. A `lastcall run` removes its registry at its end: what
        was seen is kept."""
        if time.monotonic() >= self._searched + _SEARCH:
            self._searched = time.monotonic()
            for process in self.tree().values():
                folder = _registry_of(process.pid)
                if folder is not None and folder not in self._books:
                    self._books[folder] = registry.Registry(Path(folder))
        for book in self._books.values():
            for member in book.members():
                self._seen[member.pid, member.started] = member

    @property
    def members(self) -> list[Member]:
        """Every training process that has joined, the dead included."""
        return list(self._seen.values())

    @property
    def roots(self) -> list[Path]:
        return sorted({Path(member.root) for member in self.members})

    def step(self, root: Path | None = None) -> int | None:
        """The step of the run, that of its slowest process; up to a second old, like the processes'
        reports."""
        return min((member.step for member in self._at_work(root)), default=None)

    @property
    def stepping(self) -> bool:
        """Whether every training process has completed a step of its own, or has finished."""
        members = self._at_work(None)
        return bool(members) and all(
            member.step > (member.resumed or 0) or member.outcome == "finished" for member in members
        )

    def _at_work(self, root: Path | None) -> list[Member]:
        wanted = [member for member in self.members if root is None or Path(member.root) == root]
        alive = [member for member in wanted if registry.alive(member)]
        return alive or wanted

    @property
    def finished(self) -> bool:
        """Whether training has finished."""
        return bool(self._seen) and all(member.outcome == "finished" for member in self.members)

    @property
    def unaware(self) -> list[Member]:
        """Active training processes: alive, and without an outcome."""
        return [member for member in self.members if member.outcome is None and registry.alive(member)]

    @property
    def has_spoken(self) -> bool:
        """Whether the command has written anything."""
        try:
            return self._log.stat().st_size > self._said
        except OSError:
            return False

    def tail(self, lines: int = 8) -> list[str]:
        """The last lines that this incarnation has written."""
        try:
            with self._log.open("rb") as file:
                size = file.seek(0, os.SEEK_END)
                file.seek(max(self._said, size - _TAIL))
                return file.read().decode(errors="replace").splitlines()[-lines:]
        except OSError:
            return []

    def tree(self) -> dict[int, LiveProcess]:
        """All processes of the command; orphans are adopted by the drill, which is a subreaper."""
        below = processes.below(os.getpid())
        return {pid: process for pid, process in below.items() if not self._is_strange(process, below)}

    def _is_strange(self, process: LiveProcess, below: Mapping[int, LiveProcess]) -> bool:
        """Whether it, or an ancestor of it, existed before this incarnation."""
        one: LiveProcess | None = process
        while one is not None:
            if (one.pid, one.started) in self._strangers:
                return True
            one = below.get(one.parent)
        return False

    # ---- what is done to it --------------------------------------------------------------------------------

    def tell(self, signum: int, to: str) -> tuple[float, float, list[int]]:
        """Signal it, once: a second SIGINT would mean "exit at once". Returns when, by both clocks, and which
        processes."""
        if self.notice is None:
            at = (time.time(), time.monotonic())
            self.notice = (*at, self._send(signum, to))
        return self.notice

    def _send(self, signum: int, to: str) -> list[int]:
        members = [member.pid for member in self.members if registry.alive(member)]
        with contextlib.suppress(ProcessLookupError, PermissionError):
            if to == "group":
                os.killpg(self.process.pid, signum)
            elif to == "training" and members:
                for pid in members:
                    os.kill(pid, signum)
                return members
            else:
                self.process.send_signal(signum)
        return [self.process.pid]

    def kill_rest(self) -> None:
        """SIGKILL whatever is left of it, repeatedly, since a process may be starting another at this
        moment."""
        ours: set[int] = set()
        until = time.monotonic() + _DYING
        while (left := self.tree()) or self.process.poll() is None:
            ours.update(left)
            processes.send(left.values(), signal.SIGKILL)
            if time.monotonic() > until:
                raise errors.LastcallError(
                    f"{processes.names(left)} cannot be killed: a dead disk or driver is blocking it. See: "
                    "cat /proc/PID/stack"
                )
            time.sleep(0.01)
        for pid in ours - {self.process.pid}:  # orphans have become our children
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)


def _end_with_parent() -> None:
    """In the child, before the command: if the drill is killed, the command gets a signal to stop."""
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)


def _registry_of(pid: int) -> str | None:
    """The registry in the environment that a process was started with."""
    try:
        words = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return None
    name = b"LASTCALL_REGISTRY="
    return next(
        (os.fsdecode(word[len(name) :]) for word in words if word.startswith(name) and len(word) > len(name)),
        None,
    )
