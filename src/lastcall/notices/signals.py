"""Receives signals within milliseconds, whatever the main thread is doing.

Discarded, with what was measured (research/perf-detail.md, part D):

- A plain Python handler that sets a flag: it runs when the main thread comes back to bytecode, 3 s late
  inside a 3 s C
  call, never inside a hung collective.
- A thread in `sigwait`, or a signalfd: needs the signal blocked in every thread of the process, but importing
  torch has
  started threads already. Killed by SIGTERM 32 times out of 32.
- Work inside the handler itself: an exception or a lock there lands in the middle of an optimizer step.

So `signal.set_wakeup_fd`: CPython's C handler writes the signal's number to a socket at once, and a thread of
ours reads it (0.3 ms). The Python handler, whenever it runs, writes to the same socket, which covers a
library that has taken the wakeup fd away from us (asyncio does).

Handlers and the wakeup fd are the main thread's to change. A listener of another thread has it do so
(mainthread.py).
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import threading
from collections import Counter, deque
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any

from lastcall.notices import mainthread

_log = logging.getLogger("lastcall")

_STOP = 0  # no signal has this number
_SETTLED = 0x7E  # settle(): everything before this byte has been reported
# a chained handler raised: the thread logs it, since logging inside a signal handler may interrupt itself
_TELL = 0x7F
# added to the signal's number by the Python handler, to tell its bytes from those of the C handler
_HANDLED = 0x80
_JOIN_SECONDS = 2.0
_SETTLE_SECONDS = 1.0
_LOOK_SECONDS = 0.5  # between two checks whether the signals are still ours
_START_SECONDS = 5.0  # until a main thread that is busy in C must have run our installation,
_STOP_SECONDS = 1.0  # or to restore: the grace may be running, and our handlers do no harm

_live: SignalListener | None = None
# Stopped while the main thread was in a C call: C still writes to their sockets, which must not be collected
_kept: list[SignalListener] = []
_fork_hook_registered = False


class SignalListener:
    """Calls `on_signal(signum, count)` on a thread of its own for each signal that comes. One may be live in
    a process.

    Counting: the C handler reports every delivery at once, the Python handler later, and once for several
    that came while the main thread was in C. So a report of the Python handler counts only if the C handler
    has not reported since the last one. One signal never counts twice, and a second Ctrl-C counts even while
    the main thread is stuck; two within microseconds may count as three, which changes nothing: two is when a
    person is taken at their word.
    """

    def __init__(self, signals: Sequence[str], on_signal: Callable[[int, int], None]) -> None:
        unknown = [name for name in signals if name not in signal.Signals.__members__]
        if unknown:
            raise ValueError(f"no such signals: {', '.join(unknown)}; use names like SIGTERM or SIGUSR1")
        self.deferred: BaseException | None = None  # what a chained handler raised last
        self._signums = tuple(signal.Signals[name] for name in signals)
        self._on_signal = on_signal
        self._handler = self._handle  # one object, so that we know our own handler when we see it
        self._previous: dict[int, Any] = {}
        self._unblocked: set[int] = set()
        self._raised: deque[tuple[int, BaseException]] = deque()
        self._pid = -1
        self._state = "new"  # then "live", then "stopped" or "ignoring" (or "dead" in a forked child)
        self._former = -1  # the wakeup fd that was there before us,
        # and a duplicate: its owner may close it, and a checkpoint file may then get the number
        self._forward = -1
        self._armed = True
        self._rearming = False
        self._settled = threading.Event()
        self._stopping = False
        self._taken_back: set[int] = set()  # signals that somebody had made us deaf to
        # told to on_signal already, but the Python handler has still to run for them
        self._owed: set[int] = set()

    def start(self) -> None:
        """Start listening. RuntimeError if that is impossible: the caller can continue without notices from
        signals."""
        global _live
        if _live is not None:
            raise RuntimeError("another SignalListener is live in this process: stop() it first")
        if self._state != "new":
            raise RuntimeError("this SignalListener was already used: create a new one")
        _register_fork_hook()
        self._pid = os.getpid()
        self._reader, self._writer = socket.socketpair()
        self._writer.setblocking(False)
        _live = self  # at once: if the main thread is busy, installing may take seconds
        try:
            mainthread.call(self._install, _START_SECONDS)
        except (
            ValueError,
            OSError,
            RuntimeError,
        ) as error:  # a subinterpreter, a stuck main thread, or SIGKILL, which cannot be caught
            if self._previous:
                with contextlib.suppress(ValueError, RuntimeError):
                    mainthread.call(self._restore, _STOP_SECONDS)
            self._close()
            _live = None
            names = ", ".join(signum.name for signum in self._signums)
            raise RuntimeError(f"cannot listen to {names}: {error}") from error
        self._state = "live"
        self._thread = threading.Thread(target=self._listen, name="lastcall-signals", daemon=True)
        self._thread.start()

    def rearm(self) -> bool:
        """Take the wakeup fd again if it is unset. True if it is ours.

        asyncio clears the fd when it closes a loop that used it; from then on signals are received late,
        through the Python handler, until this is called. Outside of the main thread it returns the last known
        answer, and makes the main thread check again when it can.
        """
        if self._state != "live" or os.getpid() != self._pid:
            return False
        if threading.current_thread() is threading.main_thread():
            self._armed = self._rearm()
        elif not self._rearming:
            self._rearming = True
            mainthread.post(self._rearm_later)
        return self._armed

    def _rearm_later(self) -> None:
        self._rearming = False
        if self._state == "live":
            self._armed = self._rearm()

    def _rearm(self) -> bool:
        present = signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
        if present in (-1, self._writer.fileno()):
            return True
        signal.set_wakeup_fd(present, warn_on_full_buffer=False)
        return False

    def settle(self) -> None:
        """Returns when on_signal was called for all earlier signals, or after a moment."""
        if self._state == "live" and threading.current_thread() is not self._thread:
            self._settled.clear()
            self._wake(_SETTLED)
            self._settled.wait(_SETTLE_SECONDS)

    def stop(self, *, ignore: bool = False) -> None:
        """Stop, forward pending signals, and restore everything. With `ignore`, the signals are left ignored:
        for a process that has saved and is exiting, where a second SIGTERM would only change the exit code.

        From a side thread while the main thread is in a C call: our handlers stay, and the next signal
        restores the previous ones.
        """
        global _live
        if self._state != "live":
            return
        self._stopping = True
        restored = True
        try:
            mainthread.call(lambda: self._restore(signal.SIG_IGN if ignore else None), _STOP_SECONDS)
        except mainthread.Unreachable:
            restored = False
        self._state = "ignoring" if ignore else "stopped"
        self._wake(_STOP)
        if threading.current_thread() is not self._thread:
            self._thread.join(_JOIN_SECONDS)
        if restored and not self._thread.is_alive():
            self._close()
        else:
            _kept.append(self)
        if _live is self:
            _live = None

    def _install(self) -> None:
        for signum in self._signums:
            self._previous[signum] = signal.signal(signum, self._handler)
        self._former = signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
        if self._former != -1:
            with contextlib.suppress(OSError):
                self._forward = os.dup(self._former)
        # A blocked signal would never arrive: a process can inherit that from its parent.
        self._unblocked = signal.pthread_sigmask(signal.SIG_UNBLOCK, self._signums) & set(self._signums)

    def _restore(self, instead: signal.Handlers | None = None) -> None:
        """Undo _install, main thread only. Handlers that others have since installed stay."""
        former = self._former if _same_file(self._former, self._forward) else -1
        present = signal.set_wakeup_fd(former)
        if present != self._writer.fileno():
            signal.set_wakeup_fd(present)
        for signum, previous in self._previous.items():
            if signal.getsignal(signum) is self._handler:
                # None: C code had installed one, which Python cannot put back
                signal.signal(signum, instead or (signal.SIG_DFL if previous is None else previous))
        if instead is None:
            signal.pthread_sigmask(signal.SIG_BLOCK, self._unblocked)

    def _close(self) -> None:
        self._reader.close()
        self._writer.close()
        if self._forward != -1:
            os.close(self._forward)
            self._forward = -1

    def _wake(self, byte: int) -> None:
        with contextlib.suppress(OSError):
            self._writer.send(bytes([byte]))

    def _handle(self, signum: int, frame: FrameType | None) -> None:
        """The Python handler, in the main thread."""
        if os.getpid() != self._pid:
            return  # a child between fork and its hook
        if self._state == "live":
            self._wake(_HANDLED | signum)
            self._chain(signum, frame)
        elif self._state == "stopped":  # in a side thread, while this one could not put the handlers back
            self._restore()
            if signum not in self._owed:
                os.kill(self._pid, signum)

    def _chain(self, signum: int, frame: FrameType | None) -> None:
        previous = self._previous.get(signum)
        if not callable(previous) or previous is signal.default_int_handler:
            return
        try:
            previous(signum, frame)
        except BaseException as error:  # SystemExit and KeyboardInterrupt above all
            self.deferred = error
            self._raised.append((signum, error))
            self._wake(_TELL)

    def _listen(self) -> None:
        counts: Counter[int] = Counter()
        # The signal may be forwarded to a socket without a reader: an error here must not kill the process
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGPIPE})
        self._reader.settimeout(_LOOK_SECONDS)
        while True:
            try:
                data = self._reader.recv(512)
            except TimeoutError:
                self._look()
                continue
            if not data:
                return
            for byte in data:
                if byte == _STOP:
                    return
                if byte == _TELL:
                    self._log_raised()
                    continue
                if byte == _SETTLED:
                    self._settled.set()
                    continue
                signum = byte & ~_HANDLED
                if not byte & _HANDLED:
                    self._pass_on(byte)
                    self._owed.add(signum)
                elif signum in self._owed:
                    self._owed.discard(signum)
                    continue
                if signum in self._signums:
                    counts[signum] += 1
                    self._tell(signum, counts[signum])

    def hears(self, signum: int) -> bool:
        """Whether our handler is still installed."""
        return self._state == "live" and signal.getsignal(signum) is self._handler

    def _look(self) -> None:
        """A script or a library may have set one of our signals to be ignored or to kill since: then it would
        be lost."""
        if self._stopping or self._state != "live":
            return
        if any(mainthread.is_deaf(signum) for signum in self._signums):
            mainthread.post(self._take_back)

    def _take_back(self) -> None:
        """In the main thread. The new setting is restored at the end."""
        if self._stopping or self._state != "live" or os.getpid() != self._pid:
            return
        for signum in self._signums:
            if not mainthread.is_deaf(signum):
                continue
            found = signal.getsignal(signum)
            self._previous[signum] = found if found in (signal.SIG_DFL, signal.SIG_IGN) else signal.SIG_DFL
            signal.signal(signum, self._handler)
            if signum not in self._taken_back:
                self._taken_back.add(signum)
                _log.warning(
                    "%s was set to %s inside the block, so notices would have been lost: lastcall listens to "
                    "it again. "
                    "To keep that setting, remove the signal from LASTCALL_SIGNALS",
                    signum.name,
                    "be ignored" if self._previous[signum] is signal.SIG_IGN else "kill the process",
                )

    def _tell(self, signum: int, count: int) -> None:
        try:
            self._on_signal(signum, count)
        except Exception:
            _log.exception("handling %s failed; still listening", signal.Signals(signum).name)

    def _pass_on(self, byte: int) -> None:
        if self._forward != -1:
            # full, or its reader is gone: CPython itself would drop it, too
            with contextlib.suppress(OSError):
                os.write(self._forward, bytes([byte]))

    def _log_raised(self) -> None:
        while self._raised:
            signum, error = self._raised.popleft()
            _log.warning(
                "the previous %s handler raised %r; deferred, because it would interrupt the current step",
                signal.Signals(signum).name,
                error,
            )

    def _forget_in_child(self) -> None:
        self._state = "dead"
        with contextlib.suppress(ValueError):
            self._former = -1  # the loop it belongs to is the parent's: bytes of ours would wake it there
            self._restore()
        self._close()


def _same_file(one: int, other: int) -> bool:
    try:
        return os.path.samestat(os.fstat(one), os.fstat(other))
    except OSError:
        return False


def _register_fork_hook() -> None:
    global _fork_hook_registered
    if not _fork_hook_registered:
        _fork_hook_registered = True
        os.register_at_fork(after_in_child=_after_fork_in_child)


def _after_fork_in_child() -> None:
    """A child shares our socket: its signals would be taken for ours (ai2cm/ace#1425)."""
    global _live
    if _live is not None:
        _kept.append(_live)
        _live = None
    while _kept:
        _kept.pop()._forget_in_child()
