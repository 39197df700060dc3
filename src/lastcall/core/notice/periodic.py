"""Checkpoints without a notice: when one is due, and how it is written while training continues."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from lastcall import errors
from lastcall.core.checkpointer import Checkpointer
from lastcall.core.context import RunContext
from lastcall.core.engine.snapshot import Arena, without
from lastcall.core.engine.writer import Engine
from lastcall.core.ranks.peers import Ranks
from lastcall.core.save.saver import Request, Saver, with_groups
from lastcall.core.subject import Boundary
from lastcall.types import Capture, Kind

log = logging.getLogger("lastcall")
_NEVER = 1 << 62


class PeriodicSaver:
    def __init__(
        self,
        context: RunContext,
        checkpointer: Checkpointer,
        saver: Saver,
        engine: Engine,
        ranks: Ranks | None,
        best: float | None = None,
        before_copy: Callable[[], None] = lambda: None,
    ) -> None:
        """`best`: of the monitored metric, so far. `before_copy`: a copy of the state is about to be made,
        and costs training time."""
        self._context = context
        self._config = context.periodic
        self._checkpointer = checkpointer
        self._saver = saver
        self._engine = engine
        self._ranks = ranks
        self._before_copy = before_copy
        self._arena = Arena(context.allocate)
        self._best = best
        self._owed = False  # a save was due while another was written, or inside a step
        self._thread: threading.Thread | None = None
        self._given_up = False
        self.writing: Boundary | None = None  # the boundary that is being saved

    def reserve(self, nbytes: int) -> bool:
        """Keep memory for a copy of so many bytes."""
        return self._arena.reserve(nbytes)

    # ---- when ----------------------------------------------------------------------------------------------

    def at_boundary(self, epoch_end: bool) -> None:
        if self._owed or (self._due(epoch_end) and self._better()):
            self._save_what_is_due()

    @property
    def owed(self) -> bool:
        return self._owed

    def next_step(self) -> int:
        if self._config.save_strategy == "steps" and self._config.save_steps:
            return (self._context.subject.step // self._config.save_steps + 1) * self._config.save_steps
        return _NEVER

    def _due(self, epoch_end: bool) -> bool:
        subject = self._context.subject
        if self._checkpointer.up_to_date:
            return False
        if self._config.save_strategy == "epoch":
            return epoch_end
        if self._config.save_strategy == "steps" and self._config.save_steps and not epoch_end:
            return subject.step > 0 and subject.step % self._config.save_steps == 0
        return False

    def owe(self) -> None:
        """An exact checkpoint is owed at the next boundary."""
        self._owed = True
        self._context.subject.stop_at_next_boundary()

    def _better(self) -> bool:
        """With save_best_only: whether the monitored metric has improved. Many ranks follow rank 0."""
        if not self._config.save_best_only or self._config.monitor is None:
            return True
        context, ranks = self._context, self._ranks
        if ranks is None:
            return self._improved(self._config.monitor)
        key = f"better/{context.subject.ordinal}"
        if ranks.rank == 0:
            better = self._improved(self._config.monitor)
            ranks.tell(key, {"better": better})
            return better
        until = context.clock.now() + context.jit.grace
        while (word := ranks.hear(key, 0.2)) is None and context.clock.now() < until:
            continue
        return word is not None and word.get("better") is True

    def _improved(self, monitor: str) -> bool:
        value = self._context.subject.numbers().get(monitor)
        if value is None:
            log.warning(
                "No checkpoint at step %d: save_best_only monitors %r, which was never passed to "
                "run.report()",
                self._context.subject.step,
                monitor,
            )
            return False
        improved = self._best is None or (
            value < self._best if self._config.mode == "min" else value > self._best
        )
        if improved:
            self._best = value
        return improved

    # ---- how -----------------------------------------------------------------------------------------------

    def _save_what_is_due(self) -> None:
        if self._config.save_strategy != "no":
            self._in_background()
            return
        # owed after run.save(): there is no memory set aside for a copy, and the user is waiting anyway
        self._owed = False
        subject = self._context.subject
        with self._checkpointer.lock:
            capture = self._checkpointer.portion(subject.capture())
            self._write(capture, subject.boundary, Request(Kind.MANUAL, "run.save()"))

    def _in_background(self) -> None:
        if self._free():
            self.begin(f"save_strategy={self._config.save_strategy}")

    def _free(self) -> bool:
        """If one is still being written, the next comes right after it; many ranks wait for it, since each of
        them would see its end at another step."""
        if not self.busy:
            return True
        if self._ranks is not None:
            self.wait()
            return True
        if not self._owed:
            log.info(
                "Periodic save at step %d is delayed: the previous one is still being written",
                self._context.subject.step,
            )
        self.owe()
        return False

    def begin(self, reason: str) -> None:
        """Stop training for the copy only."""
        self.wait()
        self._owed = False
        self.writing = boundary = self._context.subject.boundary
        try:
            self._begin(boundary, reason)
        except BaseException:
            self.writing = None
            raise

    def _begin(self, boundary: Boundary, reason: str) -> None:
        self._before_copy()
        with self._checkpointer.lock:
            capture = self._checkpointer.portion(self._context.subject.capture())
            # Unchanged groups are found now, while nothing can change: they need no copy.
            same = self._saver.unchanged(capture.groups)
            moving = with_groups(capture, without(capture.groups, set(same)))
            staged = self._arena.stage(moving, self._engine)
        if staged is None:
            log.warning(
                "Not enough memory for a copy of the state: training waits until this periodic "
                "checkpoint is written"
            )
            with self._checkpointer.lock:
                self._write(capture, boundary, Request(Kind.PERIODIC, reason))
            self.writing = None
            return
        groups = tuple(group for group in capture.groups if group.name in same) + staged.groups
        request = Request(Kind.PERIODIC, reason, None, lambda: self._given_up, same=same)
        self._given_up = False
        self._thread = threading.Thread(
            target=self._aside,
            args=(with_groups(staged, groups), boundary, request),
            name="lastcall-periodic",
            daemon=True,
        )
        self._thread.start()

    def _aside(self, capture: Capture, boundary: Boundary, request: Request) -> None:
        try:
            with self._checkpointer.lock:
                self._write(capture, boundary, request)
        finally:
            self.writing = None

    def _write(self, capture: Capture, boundary: Boundary, request: Request) -> None:
        clock, kind = self._context.clock, request.kind.value
        began = clock.now()
        try:
            entry = self._checkpointer.write(capture, request, boundary)
        except (errors.SaveError, OSError) as error:
            log.error("%s checkpoint of step %d was not saved: %s", kind.capitalize(), capture.step, error)
            self._context.events.emit("not-saved", save=kind, step=capture.step, because=str(error))
            return
        seconds = clock.now() - began
        self._checkpointer.now_committed(entry, capture, boundary, seconds)
        log.info("%s checkpoint of step %d completed in %.1fs", kind.capitalize(), capture.step, seconds)

    def make_way(self, deadline: float) -> None:
        """A notice wants to save while a periodic save is being written: that one is finished first where
        there is time for both."""
        if not self.busy:
            return
        if deadline - self._context.clock.now() < 2 * self._checkpointer.seconds() + 1.0:
            log.warning("Abandoning the periodic save in progress: there is no time for both saves")
            self._given_up = True

    def give_up(self) -> None:
        """The save in progress is no longer wanted."""
        self._given_up = True

    @property
    def busy(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def wait(self) -> None:
        if self._thread is not None:
            self._thread.join()
