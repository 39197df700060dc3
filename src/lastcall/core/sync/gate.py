"""The mutation gate: a rescue waits for the optimizer step in progress to end, and keeps the next one out.

`begun`, `steps` and `closed` are plain attributes, because they are touched at every optimizer step. The
order matters: the training thread announces itself first and checks second, the rescue shuts first and checks
second, so under the GIL at least one of the two sees the other.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable

from lastcall import clock as clocks

_gates: weakref.WeakSet[Gate] = weakref.WeakSet()


class Gate:
    __slots__ = ("__weakref__", "_lock", "_opened", "allowed", "begun", "closed", "on_hold", "steps")

    def __init__(self) -> None:
        self.begun = 0  # optimizer steps begun; nested ones count
        self.steps = 0  # optimizer steps completed
        self.closed = 0  # how many keep it shut: a rescue, a copy for the guardian
        # a shut gate lets steps pass until so many are completed: for a rank that is behind the others
        self.allowed = 0
        # called in the training thread when it finds the gate open again
        self.on_hold: Callable[[], None] = lambda: None
        self._opened = threading.Event()
        self._lock = threading.Lock()
        _gates.add(self)

    @property
    def depth(self) -> int:
        """Optimizer steps in progress."""
        return self.begun - self.steps

    def settle(self) -> None:
        """No mutation can be in progress here: one that raised never reported its end."""
        self.begun = self.steps

    def enter(self) -> None:
        """A mutation begins. Does not return while the gate is closed."""
        self.begun += 1
        if self.closed and self.depth == 1:  # a nested one belongs to the step that close() is waiting for
            self._hold()

    def leave(self) -> None:
        """A mutation ended."""
        self.steps += 1

    def close(self, clock: clocks.Clock, until: float) -> bool:
        """Shut the gate and wait for the mutation in progress to end. False, with the gate open again, if it
        does not by then."""
        self.shut()
        while self.depth > 0:
            if clock.now() >= until:
                self.open()
                return False
            clock.sleep(0.001)
        return True

    def shut(self) -> None:
        """Shut the gate, without waiting for a mutation in progress. Each call is paired with one open()."""
        with self._lock:
            self._opened.clear()
            self.closed += 1

    def open(self) -> None:
        with self._lock:
            self.closed -= 1
            if self.closed == 0:
                self._opened.set()

    def let(self, steps: int) -> None:
        """Let steps pass the shut gate until `steps` are completed."""
        with self._lock:
            self.allowed = steps
            self._opened.set()

    def _hold(self) -> None:
        # Outside while it waits: otherwise close() would wait for a step that waits for it.
        self.begun -= 1
        while self.closed and self.steps >= self.allowed:
            self._opened.wait(1.0)
            if self.closed and self.steps >= self.allowed:
                self._opened.clear()  # set for a step that was let pass
        if not self.closed:
            self.on_hold()
        self.begun += 1
        if self.closed and self.steps >= self.allowed:
            self._hold()


def _open_in_child() -> None:
    """The thread that keeps a gate shut belongs to the parent: a forked child that trains would wait for it
    for ever."""
    for gate in _gates:
        gate.closed = gate.allowed = 0
        gate._lock = threading.Lock()
        gate._opened = threading.Event()
        gate.on_hold = lambda: None


os.register_at_fork(after_in_child=_open_in_child)
