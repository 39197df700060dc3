"""One incarnation: start the command, hear signals and notices, reap what ends, and come back when the training has ended.

The command's own process is not what counts. A shell between us and the training may be killed, or go on to its next line; we stay as
long as the command or a training process below it lives. Orphans come to us, because this process is a subreaper (or PID 1).
"""

from __future__ import annotations

import logging
import os
import signal
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from lastcall.core import registry
from lastcall.launch import processes
from lastcall.launch.ears import RESET, Ears, Heard
from lastcall.launch.options import Options
from lastcall.launch.stopping import Stopping
from lastcall.types import Notice

log = logging.getLogger("lastcall")
_TICK = 0.1  # seconds between two looks, once there is something to look after; while all is quiet there are none
_NOT_OF_THREADS = 0x20000000  # __WNOTHREAD
_SWEEP = 2.0  # seconds for what the command has left behind


@dataclass(frozen=True)
class Ending:
    """How an incarnation ended."""

    pid: int  # the command
    status: int  # its return code, negative for a signal
    members: tuple[registry.Member, ...] = ()
    notice: Notice | None = None  # what the launcher was told; a training process may have had a notice of its own
    interrupted: bool = False  # SIGINT came, and nothing after it
    statuses: Mapping[int, int] = field(default_factory=dict)  # the return codes of training processes, as far as they are known


class Supervisor:
    def __init__(
        self,
        options: Options,
        book: registry.Registry,
        ears: Ears,
        signals: Collection[int] = (signal.SIGTERM,),
        strangers: Collection[tuple[int, int]] = (),
    ) -> None:
        self._options = options
        self._book = book
        self._ears = ears
        self._signals = signals  # those that are notices
        self._stopping = Stopping(options, book, strangers)
        self._pid = -1
        self._status: int | None = None
        self._statuses: dict[int, int] = {}
        self._interrupted = False
        self._told = False

    def start(self, path: str, environ: Mapping[str, str]) -> None:
        """OSError where the command cannot be started."""
        # Not subprocess: it would close file descriptors that the command was given, and unblocking signals needs code between fork
        # and exec there.
        self._pid = os.posix_spawn(path, self._options.command, environ, setsigmask=self._ears.mask, setsigdef=RESET)

    def run(self) -> Ending:
        """From the start to the end."""
        while not self._over():
            quiet = self._stopping.notice is None and self._status is None
            heard = self._ears.wait(None if quiet else _TICK)
            if heard is not None:
                self._act(heard)
            self._stopping.tick()
        assert self._status is not None
        again = self._options.restart != "never" and (self._status != 0 or any(m.outcome == "saved" for m in self._book.members()))
        if self._stopping.notice is not None or again:
            self._sweep()
        return Ending(
            self._pid, self._status, tuple(self._book.members()), self._stopping.notice, self._interrupted, dict(self._statuses)
        )

    def _over(self) -> bool:
        self._reap()
        if self._status is None:
            return False
        alive = [member.pid for member in self._stopping.members()] or self._unjoined()
        if alive and not self._told:
            self._told = True
            log.warning(
                "The command has ended (%s), but %s below it %s on: waiting for the end",
                processes.described(self._status), processes.names(alive), "goes" if len(alive) == 1 else "go",
            )  # fmt: skip
        return not alive

    def _unjoined(self) -> list[int]:
        """Where the command was killed: Python programs below it that may be about to train. Those that an ordinary end leaves behind
        are daemons, and were meant to be left."""
        if self._status is None or self._status >= 0 or self._stopping.notice is not None:
            return []
        tree = self._stopping.tree()
        folder = str(self._book.folder)
        return [
            process.pid
            for process in tree.values()
            if process.is_python and not processes.is_servant(process, tree) and processes.carries(process, "LASTCALL_REGISTRY", folder)
        ]

    def _reap(self) -> None:
        """Every zombie, whoever its parent was. Orphans become children of the main thread; what a source of notices starts on a thread
        of its own (scontrol) is its own to wait for."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG | _NOT_OF_THREADS)
            except ChildProcessError:
                return
            if pid == 0:
                return
            code = os.waitstatus_to_exitcode(status)
            if pid == self._pid:
                self._status = code
            if (self._book.folder / f"member-{pid}.json").exists():
                self._statuses[pid] = code

    def _act(self, heard: Heard | Notice) -> None:
        if isinstance(heard, Notice):
            self._interrupted = False
            self._stopping.begin(heard)
        elif heard.signum == signal.SIGCHLD:
            return
        elif heard.signum == signal.SIGCONT:
            processes.send(self._stopping.tree().values(), signal.SIGCONT)
        elif heard.signum == signal.SIGTSTP:
            if heard.from_kernel:  # Ctrl-Z: the whole job stops, and the shell waits to see it of us
                os.kill(os.getpid(), signal.SIGSTOP)
            else:  # outside a terminal this stops only who wants it, so we stay
                processes.send(self._stopping.tree().values(), signal.SIGTSTP)
        elif heard.signum == signal.SIGINT:
            self._interrupted = self._stopping.notice is None
            if not heard.from_kernel:  # otherwise the terminal has told everybody, and a second one means "leave at once"
                self._stopping.forward(heard.signum, self._pid)
        elif (notice := as_notice(heard, self._signals, self._options.grace)) is not None:
            self._interrupted = False
            self._stopping.begin(notice)
        elif not heard.from_kernel:
            self._stopping.forward(heard.signum, self._pid)

    def _sweep(self) -> None:
        """What the command has left behind must not outlive a notice, nor meet the next incarnation."""
        left = self._stopping.tree()
        if not left:
            return
        log.info("SIGTERM to what the command has left behind, %s", processes.names(left))
        processes.send(left.values(), signal.SIGTERM)
        began = time.monotonic()
        while (left := self._stopping.tree()) and time.monotonic() < began + 2 * _SWEEP:
            if time.monotonic() > began + _SWEEP:
                processes.send(left.values(), signal.SIGKILL)
            heard = self._ears.wait(_TICK / 2)
            if heard is not None and self._stopping.notice is None:  # too late for this incarnation, in time to prevent the next
                self._stopping.notice = as_notice(heard, self._signals, self._options.grace)
            self._reap()


def as_notice(heard: Heard | Notice, signals: Collection[int], grace: float) -> Notice | None:
    """The notice that this is, if it is one."""
    if isinstance(heard, Notice):
        return heard
    if heard.signum not in signals or heard.signum == signal.SIGINT:
        return None
    now = time.monotonic()
    return Notice("signal", signal.Signals(heard.signum).name, now, now + grace, heard.signum)
