"""What the launcher receives: signals and notices from its own threads, one at a time, in the main thread.

The signals are blocked and waited for, so that none interrupts anything and none is lost between two waits.
This works here and not in a training process, because the launcher is a small program of its own: every
thread is started after the mask is set (compare notices/signals). It works for PID 1 of a container, too,
where the kernel drops signals that have no handler unless they are blocked.
"""

from __future__ import annotations

import queue
import signal
import threading
from collections.abc import Collection
from dataclasses import dataclass

from lastcall.types import Notice

_ALWAYS = (signal.SIGTERM, signal.SIGCHLD, signal.SIGCONT)
_UNLESS_IGNORED = (
    signal.SIGINT,
    signal.SIGHUP,
    signal.SIGQUIT,
    signal.SIGUSR1,
    signal.SIGUSR2,
    signal.SIGTSTP,
)
RESET = (signal.SIGPIPE, signal.SIGXFSZ)  # ignored by Python; a command expects the original disposition


@dataclass(frozen=True)
class Heard:
    signum: int
    # sent by a terminal to every process of the foreground job; otherwise sent to this process only
    from_kernel: bool


class SignalInbox:
    """One for the life of the launcher. The mask is never put back: a second SIGTERM during the exit must not
    change the exit code."""

    def __init__(self, notices: Collection[int] = ()) -> None:
        """`notices`: the signals that were configured by name. These are received even under nohup."""
        # nohup, and a shell that starts a job in the background, have some signals ignored. Blocked ones are
        # kept all the same: leave these out.
        self._signals = {
            *_ALWAYS,
            *(signum for signum in _UNLESS_IGNORED if signal.getsignal(signum) is not signal.SIG_IGN),
        }
        for signum in map(signal.Signals, set(notices) - self._signals):
            if signal.getsignal(signum) is signal.SIG_IGN:
                # the kernel drops an ignored signal even if it is blocked
                signal.signal(signum, signal.SIG_DFL)
            self._signals.add(signum)
        # The parent may ignore SIGCHLD: the kernel would then reap the children, and their exit codes would
        # be lost.
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        # as it was: what the command gets
        self.mask = signal.pthread_sigmask(signal.SIG_BLOCK, self._signals)
        self._news: queue.SimpleQueue[Notice] = queue.SimpleQueue()
        self._main = threading.main_thread().ident

    def tell(self, notice: Notice) -> None:
        """Deliver a source's notice; from any thread."""
        self._news.put(notice)
        if self._main is not None:
            # wakes the main thread; an extra wake-up does no harm
            signal.pthread_kill(self._main, signal.SIGCHLD)

    def wait(self, seconds: float | None = None) -> Heard | Notice | None:
        """The next signal or notice; None when the time is over."""
        try:
            return self._news.get_nowait()
        except queue.Empty:
            pass
        info = (
            signal.sigwaitinfo(self._signals)
            if seconds is None
            else signal.sigtimedwait(self._signals, max(0.0, seconds))
        )
        if info is None:
            return None
        try:
            return (
                self._news.get_nowait()
                if info.si_signo == signal.SIGCHLD
                else Heard(info.si_signo, info.si_code > 0)
            )
        except queue.Empty:
            return Heard(signal.SIGCHLD, True)
