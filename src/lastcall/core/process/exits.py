"""How a process leaves: the code that tells the platform what happened, and ways out that need no main
thread.

`sys.exit` in a side thread only ends that thread, and `signal.signal` is refused there. Both ways out here
work from any thread, because they are needed exactly when the main thread is stuck in a C call.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import logging
import os
import signal
import sys
import threading
import time
from typing import NoReturn

from lastcall.core.process import logs
from lastcall.types import Notice

log = logging.getLogger("lastcall")
_FLUSH_SECONDS = 1.0
_SPARE = 1.0  # seconds before the deadline at which a process that is still there leaves by force
_LEAST = 0.2  # seconds that a process has to end on its own, however late it is


def code(notice: Notice, saved: bool, exit_code: int) -> int:
    """The exit code after a notice was served; the table is in docs/reference/exit-codes.md."""
    if notice.signum == signal.SIGINT:
        return 128 + signal.SIGINT  # a user asked: no scheduler should restart the run, saved or not
    if saved:
        return exit_code
    return 1 if notice.signum is None else 128 + notice.signum


def die_of(signum: int, *, flush: bool = True) -> NoReturn:
    """Die of the signal itself, so that the parent sees it in the wait status. From any thread."""
    if flush:
        _flush()
    # SIG_DFL; Python's own signal.signal works in the main thread only
    ctypes.CDLL(None).signal(signum, None)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signum})
    # To this thread: one that the kernel gives to another thread may come later than the exit below
    signal.pthread_kill(threading.get_ident(), signum)
    # PID 1 of a container is not killed by its own signals, and some signals kill no process: then use a
    # shell's exit code
    os._exit(128 + signum)


def leave(code: int) -> NoReturn:
    """End the process now, whatever the main thread is doing: no finalizers, but nothing of the log is
    lost."""
    _flush()
    os._exit(code)


def see_out(code: int, deadline: float) -> None:
    """Training has stopped, and the process leaves with this code before the deadline: whether or not the
    program catches Preempted, and whatever its threads, exit functions and the interpreter's own teardown
    still do. Not in a test that catches it on purpose."""
    if "pytest" not in sys.modules:
        hurry_out(code, deadline)
        insist(code)


def hurry_out(code: int, deadline: float) -> None:
    """Leave with this code shortly before the deadline (on the monotonic clock), if the process is still
    there."""
    if "pytest" in sys.modules:
        return
    limit = max(deadline - _SPARE, time.monotonic() + _LEAST)
    threading.Thread(target=_hurry, args=(code, limit), name="lastcall-exit", daemon=True).start()


def _hurry(code: int, limit: float) -> None:
    while (left := limit - time.monotonic()) > 0:
        time.sleep(left)
    log.warning(
        "This process has saved but does not exit (a running thread, an exit function?): leaving "
        "with exit code %d",
        code,
    )
    leave(code)


def insist(code: int) -> None:
    """Force this exit code, whatever the program still does. Functions that others have registered for the
    exit run before."""
    atexit.register(_insisted, code, os.getpid())


def _insisted(code: int, pid: int) -> None:
    atexit.unregister(_insisted)
    if os.getpid() != pid:
        return  # a child that was forked since, with its own exit code
    with contextlib.suppress(BaseException):
        atexit._run_exitfuncs()
    leave(code)


def _flush() -> None:
    """Flush logging and stdio, but not for long: the stuck main thread may hold one of their locks."""
    thread = threading.Thread(target=_flush_all, name="lastcall-flush", daemon=True)
    try:
        thread.start()
    except RuntimeError:  # too late for threads: the interpreter is shutting down and flushes anyway
        return
    thread.join(_FLUSH_SECONDS)


def _flush_all() -> None:
    logs.drain(_FLUSH_SECONDS / 2)
    for reference in list(logging._handlerList):  # type: ignore[attr-defined]
        handler = reference()
        if handler is not None:
            with contextlib.suppress(Exception):
                handler.flush()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
