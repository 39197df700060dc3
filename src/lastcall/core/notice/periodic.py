"""Checkpoints without a notice: when one is due, and how it is written while training goes on."""

from __future__ import annotations

import logging
import threading
from typing import TYPE_CHECKING

from lastcall import errors
from lastcall.core.engine.snapshot import Arena, without
from lastcall.core.save.saver import Request, with_groups
from lastcall.types import Capture, Kind

if TYPE_CHECKING:
    from lastcall.core.session import Boundary, Session

log = logging.getLogger("lastcall")
_NEVER = 1 << 62


class Periodic:
    def __init__(self, session: Session, arena: Arena) -> None:
        self._session = session
        self._config = session.periodic
        self.arena = arena
        self.wanted = session.periodic.save_strategy != "no"  # copies will be needed: memory is kept for them
        self.best: float | None = None  # of the monitored metric, so far
        self._owed = False  # a save was due while another was being written, or inside a step
        self._thread: threading.Thread | None = None
        self._given_up = False
        self.writing: Boundary | None = None  # the boundary that is being saved

    # ---- when ------------------------------------------------------------------------------------------------------------------

    def at_boundary(self, epoch_end: bool) -> None:
        if self._owed or (self._due(epoch_end) and self._better()):
            self._save_what_is_due()

    @property
    def owed(self) -> bool:
        return self._owed

    def next_step(self) -> int:
        if self._config.save_strategy == "steps" and self._config.save_steps:
            return (self._session.subject.step // self._config.save_steps + 1) * self._config.save_steps
        return _NEVER

    def _due(self, epoch_end: bool) -> bool:
        session = self._session
        if session.committed == session.subject.boundary:
            return False
        if self._config.save_strategy == "epoch":
            return epoch_end
        if self._config.save_strategy == "steps" and self._config.save_steps and not epoch_end:
            return session.subject.step > 0 and session.subject.step % self._config.save_steps == 0
        return False

    def owe(self) -> None:
        """An exact checkpoint is owed at the next boundary."""
        self._owed = True
        self._session.subject.attend()

    def _better(self) -> bool:
        """With save_best_only: whether the monitored metric has improved. Many ranks do what rank 0 has found."""
        if not self._config.save_best_only or self._config.monitor is None:
            return True
        session = self._session
        if session.ranks is None:
            return self._improved(self._config.monitor)
        key = f"better/{session.subject.ordinal}"
        if session.ranks.rank == 0:
            better = self._improved(self._config.monitor)
            session.ranks.tell(key, {"better": better})
            return better
        until = session.clock.now() + session.jit.grace
        while (word := session.ranks.hear(key, 0.2)) is None and session.clock.now() < until:
            continue
        return word is not None and word.get("better") is True

    def _improved(self, monitor: str) -> bool:
        session = self._session
        value = session.metrics().get(monitor)
        if value is None:
            log.warning(
                "No checkpoint at step %d: save_best_only watches %r, which run.report() has not been given",
                session.subject.step,
                monitor,
            )
            return False
        improved = self.best is None or (value < self.best if self._config.mode == "min" else value > self.best)
        if improved:
            self.best = value
        return improved

    # ---- how -------------------------------------------------------------------------------------------------------------------

    def _save_what_is_due(self) -> None:
        session = self._session
        if self._config.save_strategy != "no":
            self._in_background()
            return
        self._owed = False  # owed after run.save(): there is no memory set aside for a copy, and the user is waiting anyway
        with session.saving:
            self._write(session.subject.capture(), session.subject.boundary, Request(Kind.MANUAL, "run.save()"))

    def _in_background(self) -> None:
        if self._free():
            self.begin(f"save_strategy={self._config.save_strategy}")

    def _free(self) -> bool:
        """If one is still being written, the next comes right after it; many ranks wait for it, since each of them would see its end
        at another step."""
        session = self._session
        if not self.busy:
            return True
        if session.ranks is not None:
            self.wait()
            return True
        if not self._owed:
            log.info("Periodic save at step %d waits: the one before is still being written", session.subject.step)
        self.owe()
        return False

    def begin(self, reason: str) -> None:
        """Stop training for the copy only."""
        self.wait()
        self._owed = False
        self.writing = boundary = self._session.subject.boundary
        try:
            self._begin(boundary, reason)
        except BaseException:
            self.writing = None
            raise

    def _begin(self, boundary: Boundary, reason: str) -> None:
        session = self._session
        if session.guard is not None:
            session.guard.along(session.subject.behind_gate, session.subject.step)
        with session.saving:
            capture = session.mine(session.subject.capture())
            # What has not changed is found out now, while it cannot change: it needs no copy.
            same = session.saver.unchanged(capture.groups)
            moving = with_groups(capture, without(capture.groups, set(same)))
            staged = self.arena.stage(moving, session.engine)
        if staged is None:
            log.warning("Not enough memory for a copy of the state: training waits until this periodic checkpoint is written")
            with session.saving:
                self._write(capture, boundary, Request(Kind.PERIODIC, reason))
            self.writing = None
            return
        groups = tuple(group for group in capture.groups if group.name in same) + staged.groups
        request = Request(Kind.PERIODIC, reason, None, lambda: self._given_up, same=same)
        self._given_up = False
        self._thread = threading.Thread(
            target=self._aside, args=(with_groups(staged, groups), boundary, request), name="lastcall-periodic", daemon=True
        )
        self._thread.start()

    def _aside(self, capture: Capture, boundary: Boundary, request: Request) -> None:
        try:
            with self._session.saving:
                self._write(capture, boundary, request)
        finally:
            self.writing = None

    def _write(self, capture: Capture, boundary: Boundary, request: Request) -> None:
        session = self._session
        began = session.clock.now()
        try:
            entry = session.write(capture, request, boundary)
        except (errors.SaveError, OSError) as error:
            log.error("%s checkpoint of step %d was not saved: %s", request.kind.value.capitalize(), capture.step, error)
            session.events.emit("not-saved", save=request.kind.value, step=capture.step, because=str(error))
            return
        seconds = session.clock.now() - began
        session.now_committed(entry, capture, boundary, seconds)
        log.info("%s checkpoint of step %d completed in %.1fs", request.kind.value.capitalize(), capture.step, seconds)

    def in_the_way(self, deadline: float | None, nbytes: int) -> None:
        """A notice wants to save while a periodic save is being written: that one is finished first where there is time for both."""
        session = self._session
        if not self.busy or deadline is None:
            return
        if deadline - session.clock.now() < 2 * session.budget.seconds(nbytes) + 1.0:
            log.warning("The periodic save in progress is given up: there is no time for both")
            self._given_up = True

    def give_up(self) -> None:
        """Nobody waits for the save in progress any more."""
        self._given_up = True

    @property
    def busy(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def wait(self) -> None:
        if self._thread is not None:
            self._thread.join()
