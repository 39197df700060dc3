"""One incarnation: start the command, receive signals and notices, reap children, and return when training
has ended.

The command's own process does not decide. A shell between the launcher and the training may be killed, or
continue with its next line; the launcher stays as long as the command or a training process below it lives.
It adopts orphans, being a subreaper (or PID 1).
"""

from __future__ import annotations

import logging
import os
import signal
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from lastcall.core.process import registry
from lastcall.launch import processes
from lastcall.launch.options import LaunchOptions
from lastcall.launch.shutdown import UNPROTECTED, Shutdown
from lastcall.launch.signal_inbox import RESET, Heard, SignalInbox
from lastcall.types import Notice

log = logging.getLogger("lastcall")
_TICK = 0.1  # seconds between two checks once there is something to check; none while all is quiet
_NOT_OF_THREADS = 0x20000000  # __WNOTHREAD
_LOOK = 0.02  # seconds until a second check
_SWEEP = 2.0  # seconds for what the command has left behind
_REMARK = 60.0  # seconds after which a command without a joined training process is reported
# seconds that a Python program which an ordinary end has left behind has to join, or to load torch
_JOIN = 15.0


@dataclass(frozen=True)
class Ending:
    """How an incarnation ended."""

    pid: int  # the command
    status: int  # its return code, negative for a signal
    members: tuple[registry.Member, ...] = ()
    notice: Notice | None = None  # the launcher's notice; a training process may have had one of its own
    interrupted: bool = False  # SIGINT came, and nothing after it
    statuses: Mapping[int, int] = field(default_factory=dict)  # the known return codes of training processes
    # ... and of those that were waited for and ended without joining
    left: Mapping[int, int] = field(default_factory=dict)
    refused: tuple[str, ...] = ()  # why programs could not start, as reported by them
    agents: bool = False  # torchrun, or the like, got the signal
    elsewhere: bool = False  # what the command runs cannot be seen from here


class Supervisor:
    def __init__(
        self,
        options: LaunchOptions,
        book: registry.Registry,
        inbox: SignalInbox,
        signals: Collection[int] = (signal.SIGTERM,),
        strangers: Collection[tuple[int, int]] = (),
    ) -> None:
        self._options = options
        self._book = book
        self._inbox = inbox
        self._signals = signals  # those that are notices
        self._shutdown = Shutdown(options, book, strangers)
        self._pid = -1
        self._status: int | None = None
        self._statuses: dict[int, int] = {}
        self._interrupted = False
        self._told = False
        self._began = time.monotonic()
        self._ended = 0.0  # when the command ended
        self._remarked = False
        self._awaited: set[int] = set()  # those that were left behind and may train
        self._left: dict[int, int] = {}

    def start(self, path: str, environ: Mapping[str, str], more: Sequence[str] = ()) -> None:
        """`more`: extra arguments of this incarnation. OSError if the command cannot start."""
        # Not subprocess: it would close file descriptors that the command was given, and unblocking signals
        # needs code between fork and exec there.
        self._remarked = environ.get("LASTCALL_ENABLED", "1").strip().lower() in ("0", "false", "no", "off")
        self._began = time.monotonic()
        self._pid = os.posix_spawn(
            path, (*self._options.command, *more), environ, setsigmask=self._inbox.mask, setsigdef=RESET
        )

    def run(self) -> Ending:
        """From the start to the end."""
        while not self._over():
            heard = self._inbox.wait(self._patience())
            if heard is not None:
                self._act(heard)
            self._shutdown.tick()
            self._remark()
        assert self._status is not None
        again = self._options.restart != "never" and (
            self._status != 0 or any(m.outcome == "saved" for m in self._book.members())
        )
        if self._shutdown.notice is not None or again:
            self._sweep()
        return Ending(
            self._pid,
            self._status,
            tuple(self._book.members()),
            self._shutdown.notice,
            self._interrupted,
            dict(self._statuses),
            dict(self._left),
            tuple(self._book.refusals()),
            self._shutdown.agents,
            self._shutdown.elsewhere,
        )

    def _patience(self) -> float | None:
        """How long nothing needs to be checked."""
        if self._shutdown.notice is not None or self._status is not None:
            return _TICK
        return None if self._remarked else max(0.0, self._began + _REMARK - time.monotonic())

    def _remark(self) -> None:
        """A minute has passed: is anything below protected?"""
        if self._remarked or time.monotonic() < self._began + _REMARK:
            return
        self._remarked = True
        if self._shutdown.notice is None and not self._book.members() and self._status is None:
            tree = self._shutdown.tree()
            if not any(map(processes.is_elsewhere, tree.values())):
                log.warning("After %.0f s: %s", _REMARK, UNPROTECTED)

    def _over(self) -> bool:
        self._reap()
        if self._status is None:
            return False
        alive = self._going_on()
        if not alive and self._may_have_left_some():
            time.sleep(_LOOK)  # a process that changes its parent while /proc is read is seen below neither
            alive = self._going_on()
        if alive and not self._told:
            self._told = True
            log.warning(
                "The command has ended (%s), but %s below it still %s: waiting for the end",
                processes.described(self._status),
                processes.names(alive),
                "runs" if len(alive) == 1 else "run",
            )
        if not alive:
            self._reap()  # those that ended between the two checks
        return not alive

    def _going_on(self) -> list[int]:
        return [member.pid for member in self._shutdown.members()] or self._unjoined()

    def _may_have_left_some(self) -> bool:
        """Whether the command ended, on its own or by a kill, in a way that leaves programs behind which may
        be about to train."""
        killed = self._status is not None and self._status < 0
        return self._shutdown.notice is None and (killed or (self._status == 0 and not self._book.members()))

    def _unjoined(self) -> list[int]:
        """Python programs below the command that may be about to train, if it was killed or exited with 0
        before a process joined (`python train.py & exit 0`). In the latter case those that neither join nor
        load torch are daemons, and meant to be left."""
        if not self._may_have_left_some():
            return []
        killed = self._status != 0
        tree = self._shutdown.tree()
        folder = str(self._book.folder)
        late = time.monotonic() > self._ended + _JOIN
        found = [
            process.pid
            for process in tree.values()
            if process.is_python
            and not processes.is_servant(process, tree)
            and processes.carries(process, "LASTCALL_REGISTRY", folder)
            and (killed or not late or processes.has_loaded(process.pid, "libtorch"))
        ]
        self._awaited.update(found)
        return found

    def _reap(self) -> None:
        """Reaps every zombie, including adopted ones. Orphans become children of the main thread; what a
        source of notices starts on a thread of its own (scontrol) is its own to wait for."""
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
                self._ended = time.monotonic()
            elif pid in self._awaited:
                self._left[pid] = code
            if (self._book.folder / f"member-{pid}.json").exists():
                self._statuses[pid] = code

    def _act(self, heard: Heard | Notice) -> None:
        if isinstance(heard, Notice):
            self._interrupted = False
            self._shutdown.begin(heard)
        elif heard.signum == signal.SIGCHLD:
            return
        elif heard.signum == signal.SIGCONT:
            processes.send(self._shutdown.tree().values(), signal.SIGCONT)
        elif heard.signum == signal.SIGTSTP:
            if heard.from_kernel:  # Ctrl-Z: the whole job stops, and the shell waits to see it of us
                os.kill(os.getpid(), signal.SIGSTOP)
            else:  # outside a terminal this stops only the processes that got it; the launcher keeps running
                processes.send(self._shutdown.tree().values(), signal.SIGTSTP)
        elif heard.signum == signal.SIGINT:
            self._interrupted = self._shutdown.notice is None
            # otherwise the terminal has signalled every process, and a second one means "exit at once"
            if not heard.from_kernel:
                self._shutdown.forward(heard.signum, self._pid)
        elif (notice := as_notice(heard, self._signals, self._options.grace)) is not None:
            self._interrupted = False
            self._shutdown.begin(notice)
        elif not heard.from_kernel:
            self._shutdown.forward(heard.signum, self._pid)

    def _sweep(self) -> None:
        """Processes that the command left behind must not outlive a notice or overlap with the next
        incarnation."""
        left = self._shutdown.tree()
        if not left:
            return
        log.info("Sending SIGTERM to what the command left behind, %s", processes.names(left))
        processes.send(left.values(), signal.SIGTERM)
        began = time.monotonic()
        while (left := self._shutdown.tree()) and time.monotonic() < began + 2 * _SWEEP:
            if time.monotonic() > began + _SWEEP:
                processes.send(left.values(), signal.SIGKILL)
            heard = self._inbox.wait(_TICK / 2)
            # too late for this incarnation, in time to prevent the next
            if heard is not None and self._shutdown.notice is None:
                self._shutdown.notice = as_notice(heard, self._signals, self._options.grace)
            self._reap()


def as_notice(heard: Heard | Notice, signals: Collection[int], grace: float) -> Notice | None:
    """The notice that this signal is, if it is one."""
    if isinstance(heard, Notice):
        return heard
    if heard.signum not in signals or heard.signum == signal.SIGINT:
        return None
    now = time.monotonic()
    return Notice("signal", signal.Signals(heard.signum).name, now, now + grace, heard.signum)
