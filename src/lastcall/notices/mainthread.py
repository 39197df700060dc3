"""Runs a small task in the main thread on behalf of another thread: `signal.signal` is allowed nowhere else.

Trainings run in side threads under Ray Train, in notebooks and in servers, while the main thread runs Python,
waits or is in a C call. What makes it run the task, and why all three are needed:

1. `Py_AddPendingCall`: the main thread runs the work between two bytecodes.
2. Waiting for a lock (`join`, `Event.wait`, `Queue.get`) it comes to no bytecode, but it runs pending calls
   when a signal
   interrupts the wait. So it gets a harmless one, which is ignored by default: SIGURG or SIGWINCH.
3. `sleep`, `select`, `waitpid` and `read` begin again after a signal (PEP 475), and look only for signals
   that CPython's own
   C handler has noted. So for that moment the signal gets this handler. CPython then finds no Python function
   to call and reports that to `sys.unraisablehook`, in the main thread: our hook suppresses it, and being
   Python, it is bytecode.

No signal ends a C call that ignores it: then the caller gets Unreachable, and the task is not run later
either.

Discarded: a Python function as the C handler (it would take the GIL inside a signal handler: a deadlock if
the main thread was just taking it, or in malloc); `PyThreadState_SetAsyncExc` (an exception in the middle of
foreign code).
"""

from __future__ import annotations

import _thread
import ctypes
import os
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

_QUIET = (signal.SIGURG, signal.SIGWINCH)  # ignored by default, so that a late one does no harm
# signals that may have CPython's C handler
_LIKELY = ("SIGINT", "SIGTERM", "SIGCHLD", "SIGHUP", "SIGUSR1", "SIGUSR2", "SIGALRM")
_BYTECODE_SECONDS = 0.02  # a main thread that runs Python has responded by then
_REMOVAL_SECONDS = 1.0  # how long a forked child waits, where the parent's removal never happens
_SETTLE_SECONDS = 0.01
# between two signals: one that comes just before the main thread begins to wait is lost
_FIRST_PAUSE, _LAST_PAUSE = 0.002, 0.1

# taking a task out means running or dropping it: the other side then finds it gone
_tasks: deque[_MainThreadTask] = deque()
_waking = threading.Lock()
_last_hook: _Hook | None = None

_api = ctypes.pythonapi
_api.PyOS_getsig.argtypes, _api.PyOS_getsig.restype = [ctypes.c_int], ctypes.c_void_p
_api.PyOS_setsig.argtypes, _api.PyOS_setsig.restype = [ctypes.c_int, ctypes.c_void_p], ctypes.c_void_p
_api.PyInterpreterState_Get.argtypes, _api.PyInterpreterState_Get.restype = [], ctypes.c_void_p
_api.PyInterpreterState_GetID.argtypes, _api.PyInterpreterState_GetID.restype = (
    [ctypes.c_void_p],
    ctypes.c_int64,
)
_PendingCall = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)


class Unreachable(RuntimeError):
    """The main thread did not run it in time, and never will."""


class _MainThreadTask:
    def __init__(self, work: Callable[[], object]) -> None:
        self.done = threading.Event()
        self.error: Exception | None = None
        self._work = work
        self._pid = os.getpid()

    def run(self) -> None:
        if os.getpid() != self._pid:
            return  # a forked child inherits the pending calls of its parent
        try:
            self._work()
        except Exception as error:
            self.error = error
        except BaseException as error:
            # Ctrl-C at this moment: it belongs to the main thread, which gets it again
            self.error = RuntimeError(f"interrupted by {error!r}")
            _thread.interrupt_main()
        finally:
            self.done.set()


def is_deaf(signum: int) -> bool:
    """Whether a signal is ignored or kills the process, including what C libraries have set, which Python
    does not see."""
    return (_api.PyOS_getsig(signum) or 0) in (int(signal.SIG_DFL), int(signal.SIG_IGN))


def call(work: Callable[[], object], seconds: float) -> None:
    """Run `work` in the main thread and wait for it; its exception is raised here. Unreachable after
    `seconds`."""
    if threading.current_thread() is threading.main_thread():
        work()
        return
    if _api.PyInterpreterState_GetID(_api.PyInterpreterState_Get()) != 0:
        raise Unreachable("signals belong to the main interpreter, and this is another one")
    deadline = time.monotonic() + seconds
    task = post(work)
    if not task.done.wait(min(_BYTECODE_SECONDS, seconds)) and _waking.acquire(timeout=seconds):
        try:
            _wake(task, deadline)
        finally:
            _waking.release()
    if not task.done.is_set():
        try:
            _tasks.remove(task)
        except ValueError:  # it is running right now
            task.done.wait()
        else:
            raise Unreachable(f"the main thread is in a call that did not end within {seconds:g} s")
    if task.error is not None:
        raise task.error


def post(work: Callable[[], object]) -> _MainThreadTask:
    """Run `work` when the main thread next runs Python, without waiting. From any thread."""
    task = _MainThreadTask(work)
    _tasks.append(task)
    # refused if 32 are waiting: then one of ours may be among them, or _wake retries
    _api.Py_AddPendingCall(_serve, None)
    return task


def _serve_all(_: object) -> int:
    while _tasks:
        try:
            task = _tasks.popleft()
        except IndexError:  # it was given up at this moment
            break
        task.run()
    return 0


# lives as long as the module: freed while it is being called, it would crash
_serve = _PendingCall(_serve_all)


def _wake(task: _MainThreadTask, deadline: float) -> None:
    """Interrupt the main thread's wait until the task is done, then undo the changes to the process."""
    signum = next(
        (one for one in _QUIET if signal.getsignal(one) == signal.SIG_DFL and not _api.PyOS_getsig(one)), None
    )
    main = threading.main_thread().ident
    if signum is None or main is None:  # a foreign handler: wait for bytecode
        task.done.wait(max(0.0, deadline - time.monotonic()))
        return
    hook = _quiet()
    _api.PyOS_setsig(signum, _handler_of_cpython() or _harmless())
    pause = _FIRST_PAUSE
    try:
        while not task.done.is_set() and (left := deadline - time.monotonic()) > 0:
            _api.Py_AddPendingCall(_serve, None)
            signal.pthread_kill(main, signum)
            task.done.wait(min(pause, left))
            pause = min(2 * pause, _LAST_PAUSE)
    finally:
        _api.PyOS_setsig(signum, None)  # drops one that is still on its way
        # A garbage collection may run Python, and with it a removal, between CPython's noting that there is
        # no function and its asking for the hook: a line on stderr that would puzzle people.
        time.sleep(_SETTLE_SECONDS)
        hook.removal = post(hook.remove)


class _Hook:
    """Suppresses reports about our own signals; everything else goes to the previous hook."""

    def __init__(self) -> None:
        self.removal: _MainThreadTask | None = None
        self._words = {f"Signal {int(signum)} ignored due to race condition" for signum in _QUIET}
        self._former = sys.unraisablehook
        self._ours = self._hear  # one object, so that it can be compared
        sys.unraisablehook = self._ours

    def _hear(self, unraisable: Any) -> None:
        if isinstance(unraisable.exc_value, OSError) and str(unraisable.exc_value) in self._words:
            _serve_all(None)
        else:
            self._former(unraisable)

    def remove(self) -> None:
        """In the main thread, when no more signals come."""
        # one may have been noted while the task was running: it is reported now, to our hook
        _api.PyErr_CheckSignals()
        if sys.unraisablehook is self._ours:
            sys.unraisablehook = self._former

    def stay(self) -> bool:
        """Cancel the removal. False if the hook is already gone."""
        if self.removal is None:
            return False
        try:
            _tasks.remove(self.removal)
        except ValueError:  # done, or this very moment: it would remove the new hook
            self.removal.done.wait(_REMOVAL_SECONDS)
            return False
        return sys.unraisablehook is self._ours


def _quiet() -> _Hook:
    """The installed hook: the last one, if the main thread has not removed it yet."""
    global _last_hook
    if _last_hook is None or not _last_hook.stay():
        _last_hook = _Hook()
    return _last_hook


class _DlInfo(ctypes.Structure):
    """Dl_info of dladdr(3)."""

    _fields_ = (
        ("file", ctypes.c_char_p),
        ("base", ctypes.c_void_p),
        ("name", ctypes.c_char_p),
        ("address", ctypes.c_void_p),
    )


def _handler_of_cpython() -> int | None:
    """The address of CPython's C handler, read from a signal that has it; None if there is none (SIGINT of a
    background job)."""
    home = _library_of(ctypes.cast(_api.PyErr_CheckSignals, ctypes.c_void_p).value)
    for name in _LIKELY:
        if callable(signal.getsignal(signal.Signals[name])):
            address: int | None = _api.PyOS_getsig(signal.Signals[name])
            # a C library may have put its own in its place
            if address and home is not None and _library_of(address) == home:
                return address
    return None


def _harmless() -> int | None:
    """A C function that may be interrupted anywhere and changes nothing: it ends waiting for locks, at
    least."""
    return ctypes.cast(ctypes.CDLL(None).abs, ctypes.c_void_p).value


def _library_of(address: int | None) -> int | None:
    place = _DlInfo()
    found = ctypes.CDLL(None).dladdr(ctypes.c_void_p(address), ctypes.byref(place))
    return place.base if found else None
