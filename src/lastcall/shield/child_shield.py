"""Keeps DataLoader workers and other multiprocessing children alive until the run has saved.

A launcher, a scheduler or Ctrl-C signals the whole process group. torch lets a worker die of a SIGTERM that
its parent did not send, and then raises RuntimeError in the parent, in the middle of training.

Discarded: ignoring the signals in the child (torch installs its own handler afterwards, and
`Process.terminate()` would do nothing); wrapping `_worker_loop` and the iterators' `__init__` (two private
names in torch, two more in torchdata, and children of other kinds left out). Every child, of whatever loader,
pool or executor, comes through `Process.start`, so that is the one thing wrapped here: the signals are
blocked in the starting thread for as long as it takes (fork and spawn both hand the mask on; the other
threads of the parent still hear them), and the child finds its Shield with the process object that it gets:
unpickled when spawned, in multiprocessing's after-fork hook when forked.

What holds where:

- fork, spawn: no gap; a signal is held back from the first instruction of the child on.
- forkserver: the same, if the server was started while this is installed. One that was started before is not
  shielded:
  the group's SIGTERM ends it, and torch's workers follow within five seconds.
- A plain `os.fork` or a `subprocess` is not touched: lastcall cannot know what it is for, and a program that
  ignores
  SIGTERM is worse than one that dies of it.
"""

from __future__ import annotations

import functools
import multiprocessing
import os
import signal
import time
import weakref
from collections.abc import Callable, Sequence
from multiprocessing import process, resource_tracker, util
from typing import Any

from lastcall.shield import child_side

_REQUEST = "_lastcall_shield"
_KILL_SECONDS = 1.0

_original: Any = process.BaseProcess.start
# another library's wrapper that was around ours at the last uninstall() and still calls it
_above: Any = None
_active: frozenset[int] = frozenset()  # what is shielded now
_server_mask: frozenset[int] = frozenset()  # what a fork server of ours blocks, and so do all its children
_hook: ShieldRequest | None = (
    None  # multiprocessing keeps its after-fork hooks for as long as the object lives
)
_dismissal_pid = -1


class WorkerShield:
    """Shields the children that are started between install() and uninstall(). One may be installed in a
    process: a second install() is refused, since two sets of signals would mean two kinds of children."""

    def __init__(self) -> None:
        self._pid = -1

    def install(self, signals: Sequence[int]) -> None:
        """In a process that is itself shielded, that shield is removed first: a protected run needs its
        notices."""
        if child_side.lift():
            _uninstall()
        if _active:
            raise RuntimeError("a WorkerShield is already installed: uninstall() it first")
        _install(frozenset(signals))
        self._pid = os.getpid()

    def uninstall(self) -> None:
        """Living children stay shielded. Nothing happens in a forked child, or if it was not installed."""
        if self._pid == os.getpid():
            self._pid = -1
            _uninstall()


class ShieldRequest:
    """Travels to the child with its Process object. Unpickled there, it is the child's shield at work."""

    def __init__(self, signals: frozenset[int], inherited: frozenset[int], quiet: bool) -> None:
        self.signals = signals
        self.inherited = inherited
        self.quiet = quiet

    def __reduce__(self) -> tuple[Callable[..., ShieldRequest], tuple[Any, ...]]:
        return _arrive, (self.signals, self.inherited, self.quiet, os.getpid())


def _install(signals: frozenset[int]) -> None:
    global _active, _hook, _original
    _active = signals
    present: Any = process.BaseProcess.start
    # to wrap _above again would make the two call each other
    if present is not _start and present is not _above:
        _original = present
        process.BaseProcess.start = _start  # type: ignore[method-assign]
    _hook = ShieldRequest(signals, frozenset(), False)
    util.register_after_fork(_hook, _after_fork)
    _register_dismissal()


def _register_dismissal() -> None:
    global _dismissal_pid
    if _dismissal_pid != os.getpid():
        _dismissal_pid = os.getpid()
        # Before multiprocessing ends the daemons and waits for them, and before it unlinks the semaphores of
        # their queues (priority 0, the newest first): a worker that is still starting would die of that with
        # a traceback.
        util.Finalize(None, _dismiss, exitpriority=1)


def _uninstall() -> None:
    global _active, _hook, _above
    _active = frozenset()
    _hook = None
    present: Any = process.BaseProcess.start
    if present is not _start:
        _above = present
    # Children of a fork server that blocks signals need to be told to unblock them, for as long as that
    # server lives.
    elif not _server_mask:
        process.BaseProcess.start = _original  # type: ignore[method-assign]


def _start(self: process.BaseProcess) -> None:
    """Replaces Process.start."""
    global _server_mask
    method = getattr(self, "_start_method", None) or multiprocessing.get_start_method()
    inherited = _server_mask if method == "forkserver" else frozenset()
    if not _active and not inherited:
        _original(self)
        return
    quiet = getattr(getattr(self, "_target", None), "__name__", "") == "_worker_loop"  # torch's, torchdata's
    setattr(self, _REQUEST, ShieldRequest(_active, inherited | _active, quiet))
    held_back = _active | {child_side.OWNERS_WORD} if _active else _active
    before = signal.pthread_sigmask(signal.SIG_BLOCK, held_back)
    try:
        if method != "fork":
            # Starting the tracker unblocks SIGINT and SIGTERM in this thread (CPython 3.11)
            resource_tracker.ensure_running()
            signal.pthread_sigmask(signal.SIG_BLOCK, held_back)
        if method == "forkserver":
            _server_mask |= _active
        _original(self)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    if signal.SIGTERM in _active:
        popen = self._popen  # type: ignore[attr-defined]
        popen.terminate = functools.partial(_terminate, weakref.proxy(popen))


def _after_fork(hook: ShieldRequest) -> None:
    """In a child that multiprocessing forked."""
    request = getattr(process.current_process(), _REQUEST, None)
    parent = process.parent_process()
    if (
        isinstance(request, ShieldRequest)
        and request.signals
        and parent is not None
        and parent.pid is not None
    ):
        child_side.Shield(request.signals, request.quiet, parent.pid).begin()
        _register_dismissal()


def _arrive(signals: frozenset[int], inherited: frozenset[int], quiet: bool, owner: int) -> ShieldRequest:
    """In a child that was spawned, or comes from a fork server."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, inherited - signals)
    if signals:
        child_side.Shield(signals, quiet, owner).begin()
        _install(signals)  # its own children inherit what it blocks
    return ShieldRequest(signals, inherited, quiet)


def _terminate(popen: Any) -> None:
    """Replaces terminate() of a shielded child. Two SIGTERMs that are pending at once become one, with the
    sender of the first: ours would be mistaken for the group's, and joining the child would wait forever.
    Real-time ones queue."""
    popen._send_signal(signal.SIGTERM)
    popen._send_signal(child_side.OWNERS_WORD)


def _dismiss() -> None:
    """End DataLoader workers at exit, just before multiprocessing does it, and kill those that do not respond
    (still importing torch, or in a C call that keeps the interpreter lock): multiprocessing would wait for
    them."""
    workers = [
        child
        for child in process.active_children()
        if getattr(getattr(child, _REQUEST, None), "quiet", False)
    ]
    for worker in workers:
        worker.terminate()
    deadline = time.monotonic() + _KILL_SECONDS
    for worker in workers:
        worker.join(max(0.0, deadline - time.monotonic()))
    left = [worker for worker in workers if worker.is_alive()]
    if left:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # torch would report each of them as an error
    for worker in left:
        worker.kill()
