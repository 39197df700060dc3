"""The phases of a notice: one enum, one table of the changes that are allowed, one function that makes them.

    QUIET -> WAITING -> HOLDING -> BOUNDARY -> SAVING -> COMMITTED | FAILED -> LEAVING
    BOUNDARY, or any before it -> INSTANT -> SAVING_ASIDE -> COMMITTED | FAILED
    COMMITTED | FAILED -> QUIET where training may continue;  any before COMMITTED -> DISMISSED where lastcall
    has nothing to save

Two threads make the changes: the agent, which answers the notice, and the training thread, which comes to a
boundary. A change is checked and made under one lock, so of two threads that want the same change one makes
it, and the other learns that. Every change is an event. docs/architecture.md has the drawing; a test compares
it with the table.
"""

from __future__ import annotations

import enum
import threading
from collections.abc import Callable, Collection


class Phase(enum.Enum):
    QUIET = "quiet"  # no notice, or one that is not being answered yet
    WAITING = "waiting"  # the kill wait: training continues
    HOLDING = "holding"  # training is held at its next boundary until the ranks have agreed where to save
    BOUNDARY = "boundary"  # the next boundary saves; with many ranks, the agreed one
    SAVING = "saving"  # the training thread saves
    INSTANT = "instant"  # no boundary in time: the gate is shut, the ranks agree on the last completed step
    SAVING_ASIDE = "saving aside"  # the agent saves from its own thread
    COMMITTED = "committed"  # a checkpoint answers the notice
    FAILED = "failed"  # nothing could be committed
    LEAVING = "leaving"  # the process is on its way out
    # lastcall has nothing to save: training finished on all ranks first, or the script answers notices itself
    DISMISSED = "dismissed"


_P = Phase
ALLOWED: dict[Phase, frozenset[Phase]] = {
    # SAVING from QUIET and WAITING: training raised with a notice pending, and its thread saves at once.
    _P.QUIET: frozenset({_P.WAITING, _P.HOLDING, _P.SAVING, _P.FAILED}),
    _P.WAITING: frozenset({_P.HOLDING, _P.SAVING, _P.FAILED, _P.DISMISSED}),
    _P.HOLDING: frozenset({_P.BOUNDARY, _P.INSTANT, _P.SAVING, _P.FAILED, _P.DISMISSED}),
    # HOLDING: the agreed boundary did not come, and the ranks agree on another way to save.
    _P.BOUNDARY: frozenset({_P.SAVING, _P.INSTANT, _P.HOLDING, _P.COMMITTED, _P.FAILED, _P.DISMISSED}),
    # INSTANT: the save at the agreed boundary failed, and the ranks save the last completed step instead.
    _P.SAVING: frozenset({_P.COMMITTED, _P.FAILED, _P.INSTANT}),
    # SAVING: the training thread came to a boundary first. BOUNDARY: nothing can be saved from the side; a
    # boundary may still come.
    _P.INSTANT: frozenset({_P.SAVING_ASIDE, _P.SAVING, _P.BOUNDARY, _P.COMMITTED, _P.FAILED, _P.DISMISSED}),
    _P.SAVING_ASIDE: frozenset({_P.COMMITTED, _P.FAILED, _P.BOUNDARY}),
    # SAVING: the side save is not whole, and a late boundary saves a better one.
    _P.COMMITTED: frozenset({_P.LEAVING, _P.QUIET, _P.SAVING}),
    # COMMITTED: the ranks gave up on a boundary that was committed all the same.
    _P.FAILED: frozenset({_P.LEAVING, _P.QUIET, _P.COMMITTED}),
    _P.LEAVING: frozenset(),
    _P.DISMISSED: frozenset(),
}

# The kill wait is over: a boundary must be looked at.
OPEN = frozenset(Phase) - {_P.QUIET, _P.WAITING, _P.DISMISSED}
# Everything possible has been tried.
CONCLUDED = frozenset({_P.COMMITTED, _P.FAILED, _P.LEAVING, _P.DISMISSED})


class Phases:
    """`phase` may be read without a lock; it changes only here."""

    def __init__(self, emit: Callable[..., None] = lambda kind, **facts: None) -> None:
        self.phase = Phase.QUIET
        self.because = ""  # of the last change
        self.closed = False  # the session ends: no thread waits any more
        self._emit = emit
        self._changed = threading.Condition()

    @property
    def open(self) -> bool:
        return self.phase in OPEN

    @property
    def concluded(self) -> bool:
        return self.phase in CONCLUDED

    def enter(self, phase: Phase, because: str = "") -> None:
        """A change that the caller knows to be allowed."""
        if not self.try_enter(phase, because):
            raise RuntimeError(f"a notice cannot go from {self.phase} to {phase}")

    def try_enter(
        self, phase: Phase, because: str = "", *, only_from: Collection[Phase] | None = None
    ) -> bool:
        """Make this change if it is allowed from where the notice is now (and that is one of `only_from`).
        False if the other thread has made another one first."""
        with self._changed:
            if phase not in ALLOWED[self.phase] or (only_from is not None and self.phase not in only_from):
                return False
            self.phase = phase
            self.because = because
            # under the lock, so that events have the order of the changes
            self._emit("phase", phase=phase.value, because=because)
            self._changed.notify_all()
        return True

    def wait_while(self, phases: Collection[Phase], timeout: float | None = None) -> Phase:
        """Until the phase is another, the session ends, or the time is over. Returns the phase then."""
        with self._changed:
            self._changed.wait_for(lambda: self.phase not in phases or self.closed, timeout)
            return self.phase

    def wait_closed(self, timeout: float) -> bool:
        """Whether the session has ended by then."""
        with self._changed:
            return self._changed.wait_for(lambda: self.closed, timeout)

    def close(self) -> None:
        with self._changed:
            self.closed = True
            self._changed.notify_all()
