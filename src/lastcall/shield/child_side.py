"""The child's side of child_shield.py: holds signals back in a child process while its parent still needs it.

Imports no torch: a spawned child that has nothing to do with torch imports this module as well.

Here, unlike in the training process, a thread in `sigwaitinfo` works: the child was started with the signals
blocked, so every thread it ever has blocks them too. It is also the only way to learn who sent a signal
before it takes effect.
"""

from __future__ import annotations

import _thread
import contextlib
import multiprocessing
import os
import signal
import subprocess
import threading
from collections.abc import Callable
from typing import Any, NoReturn

from lastcall.core.process import exits

_POLL_SECONDS = 0.5  # how soon a child that holds a signal back notices that its parent has gone

# Sent by the owner after a SIGTERM of its own. Blocked in the child and, harmlessly, in all that come from
# it.
OWNERS_WORD = signal.SIGRTMAX - 5

_current: Shield | None = None  # of this process
_fork_hook_registered = False


class Shield:
    """Holds `signals` back in this process. One that the owner sent, or the process itself, takes effect at
    once; any other (the group's SIGTERM, a Ctrl-C) is kept, and takes effect when the owner has gone."""

    def __init__(self, signals: frozenset[int], quiet: bool, owner: int) -> None:
        self.signals = signals
        # a DataLoader's worker: exits with 0 when its owner ends it, as with torch's own handler
        self.quiet = quiet
        self.owner = owner  # its parent, except under a fork server, where the parent is the server
        self._served = os.getppid() != owner
        self._held: int | None = None
        self._told = False
        self._lifted = False

    def begin(self) -> None:
        """Main thread of the child, before any code of the user runs."""
        global _current
        signal.pthread_sigmask(signal.SIG_BLOCK, self.signals | {OWNERS_WORD})
        self._handlers = {signum: signal.getsignal(signum) for signum in self.signals}
        self._interruptible = _make_interruptible()
        self._thread = threading.Thread(target=self._watch, name="lastcall-shield", daemon=True)
        self._thread.start()
        _current = self
        _keep_out_of_grandchildren()

    def lift(self) -> None:
        """Become an ordinary process again and deliver what was held back; main thread."""
        global _current
        _current = None
        self._lifted = True
        if self._thread.ident is not None:
            signal.pthread_kill(self._thread.ident, OWNERS_WORD)
        self._thread.join()
        signal.pthread_sigmask(signal.SIG_UNBLOCK, self.signals)
        if self._held is not None:
            os.kill(os.getpid(), self._held)

    def _watch(self) -> None:
        while True:
            info = self._wait()
            if self._lifted:
                if info is not None and info.si_signo in self.signals and info.si_pid != os.getpid():
                    self._held = self._held or info.si_signo
                return
            if info is not None and info.si_pid in (self.owner, os.getpid()):
                self._take_effect(signal.SIGTERM if info.si_signo == OWNERS_WORD else info.si_signo)
                continue
            if info is not None and info.si_signo != OWNERS_WORD:
                self._held = self._held or info.si_signo
            if self._held is not None and self._orphaned():
                held, self._held = self._held, None
                self._take_effect(held)

    def _wait(self) -> signal.struct_siginfo | None:
        if self._held is None:
            return signal.sigwaitinfo(self.signals | {OWNERS_WORD})
        return signal.sigtimedwait(self.signals | {OWNERS_WORD}, _POLL_SECONDS)

    def _orphaned(self) -> bool:
        if not self._served:
            return os.getppid() != self.owner
        parent = multiprocessing.parent_process()
        return parent is not None and not parent.is_alive()

    def _take_effect(self, signum: int) -> None:
        handler = signal.getsignal(signum)
        # torch gives its workers a C handler, which Python does not see: only one set since then is their own
        if callable(handler) and (not self.quiet or handler is not self._handlers[signum]):
            if signum == signal.SIGTERM and self._told:
                return  # child_shield.py sends it twice: the second would interrupt what the first started
            self._told = signum == signal.SIGTERM
            _thread.interrupt_main(signal.Signals(signum))
            if self._interruptible:
                signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGURG)
            return
        self._die(signum)

    def _die(self, signum: int) -> NoReturn:
        if self.quiet:
            os._exit(0)
        exits.die_of(signum, flush=False)  # as it would without us: what the child has not flushed is lost


def lift() -> bool:
    """Make a shielded child an ordinary process again. False if this is none."""
    if _current is None:
        return False
    _current.lift()
    return True


def _make_interruptible() -> bool:
    """Make sure that SIGURG interrupts a sleeping main thread, so that it runs the handler of a signal that
    another thread has received. By default it is ignored, without interrupting anything."""
    if signal.getsignal(signal.SIGURG) != signal.SIG_DFL:
        return False
    try:
        signal.signal(signal.SIGURG, lambda signum, frame: None)
    except ValueError:
        return False
    return True


def _keep_out_of_grandchildren() -> None:
    """Programs that the child starts inherit its blocked signals but no shield: without this, nothing but
    SIGKILL would end them. multiprocessing children of the child are shielded in their turn
    (child_shield.py)."""
    global _fork_hook_registered
    if _fork_hook_registered:
        return
    _fork_hook_registered = True
    os.register_at_fork(after_in_child=_unblock_after_fork)
    launch: Callable[..., Any] = subprocess.Popen._execute_child  # type: ignore[attr-defined]

    def unblocked(*args: Any, **kwargs: Any) -> Any:
        if _current is None:
            return launch(*args, **kwargs)
        before = signal.pthread_sigmask(signal.SIG_UNBLOCK, _current.signals)
        try:
            return launch(*args, **kwargs)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    subprocess.Popen._execute_child = unblocked  # type: ignore[attr-defined]


def _unblock_after_fork() -> None:
    global _current
    shield, _current = _current, None
    if shield is not None:
        with contextlib.suppress(OSError):
            signal.pthread_sigmask(signal.SIG_UNBLOCK, shield.signals)
