"""One incarnation of a run, from start to exit: the one file that knows the order of the stages.

    start     lock the directory, clean it, restore the newest valid checkpoint
    boundary  the training thread comes by: a notice is served here, a periodic save is begun here
    finish    training is over: a last checkpoint, so that a restart does nothing
    stop      threads ended, handlers restored

The way of a notice from its arrival to the boundary or the rescue is in `serving`.
"""

from __future__ import annotations

import json
import logging
import os
import threading
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from lastcall import clock as clocks
from lastcall import errors, memory
from lastcall.core import catalog as catalogs
from lastcall.core import exits, pages, recovery, restore, space
from lastcall.core.budget import Budget
from lastcall.core.gate import Gate
from lastcall.core.guard import Guard
from lastcall.core.latch import Latch
from lastcall.core.outside import Outside
from lastcall.core.saving import Request, Saver, with_groups
from lastcall.core.serving import Serving
from lastcall.core.snapshot import Arena, without
from lastcall.core.writer import Engine
from lastcall.events import EventLog, Progress
from lastcall.settings import JITCheckpointConfig, PeriodicCheckpointConfig
from lastcall.storage import files as storage
from lastcall.types import Capture, Kind, Notice, Outcome

log = logging.getLogger("lastcall")
_NUDGE = 0.25  # seconds
Boundary = tuple[int, int]


class Subject(restore.Restorable, Protocol):
    """What is being protected: the adapter's side of a session."""

    @property
    def step(self) -> int: ...

    @property
    def boundary(self) -> Boundary:
        """What tells one boundary from another: the completed steps and epochs."""

    @property
    def step_seconds(self) -> float | None:
        """How long a step takes, as far as is known."""

    def capture(self) -> Capture:
        """The whole state, at a boundary, on the training thread."""

    def rescue(self) -> Capture:
        """The last completed step, from a side thread, with the gate closed."""

    def behind_gate(self) -> Capture:
        """This boundary, with a copy of all that changes outside a mutation: it stays true for as long as the gate is shut."""

    def untouched(self) -> bool:
        """Whether nothing has changed the state since the last boundary, as far as can be told."""

    def unrescuable(self) -> str:
        """Why a rescue must not be tried; empty if it may."""

    def hurry(self) -> None:
        """A notice has come: keep the boundary copy current, whatever it costs. Called from side threads."""

    def nudge(self) -> None:
        """Called a few times a second from a side thread: the boundary copy may have become affordable. Spares every step a look at
        the clock."""

    def attend(self) -> None:
        """Let the training thread call Session.at_boundary at its next boundary. Called from side threads."""


class Session:
    def __init__(
        self,
        root: Path,
        subject: Subject,
        jit: JITCheckpointConfig,
        periodic: PeriodicCheckpointConfig,
        *,
        clock: clocks.Clock | None = None,
        files: storage.Files | None = None,
        allocate: Callable[[int], memory.Buffer] = memory.PageBuffer,
    ) -> None:
        self.clock = clock or clocks.Clock()
        self.jit = jit
        self.periodic = periodic
        self.subject = subject
        self.gate = Gate()
        self.latch = Latch()
        self.budget = Budget(self.clock)
        self.catalog = catalogs.Catalog(root, files or storage.Files())
        self.events = EventLog(self.catalog.private / "events-0.jsonl", self.clock)
        self.progress = Progress(self.catalog.private / "progress.json", self.clock)
        self._keep = catalogs.Keep(periodic.save_total_limit, periodic.monitor, periodic.mode)
        self._allocate = allocate
        self._arena = Arena(allocate)
        self.saving = threading.RLock()  # one save at a time, whoever asks for it
        self.committed: Boundary | None = None  # the boundary that the newest checkpoint holds exactly
        self.expected_bytes = 0
        self.outcome: Outcome | None = None
        self.metrics: Callable[[], dict[str, float]] = dict
        self._best: float | None = None
        self._saved_document: dict[str, object] | None = None  # of the newest checkpoint that this incarnation committed
        self._owed = False  # a periodic save was due while another was being written
        self._background: threading.Thread | None = None
        self._abandon_background = False
        self._prepared = False
        self._preparation: threading.Thread | None = None
        self.outside = Outside(root, self.catalog.private, self.clock, jit.grace)
        self._guard: Guard | None = None
        self._wake = threading.Event()
        self._stopping = threading.Event()
        self.serving = Serving(self)

    # ---- start -------------------------------------------------------------------------------------------------------------

    def start(self) -> catalogs.Entry | None:
        """Everything before the first step. Returns the checkpoint that the run goes on from."""
        if not self.outside.wait_while_paused(lambda: self.latch.raised):
            assert self.latch.notice is not None
            self.outcome = Outcome.SAVED
            raise errors.Preempted(exits.code(self.latch.notice, True, self.jit.exit_code), "told to stop while paused")
        self.catalog.open(self.clock)
        try:
            recovery.recover_into(self.catalog, "the process was killed", self.clock)
            run, self.incarnation = self._identity()
            self.engine = Engine(self.jit.threads, self.catalog.files, self._allocate)
            self.saver = Saver(self.catalog, self.engine, self.budget, self.clock, run=run, incarnation=self.incarnation)
            try:
                resumed = self._resume()
            except BaseException:
                self.engine.close()
                raise
        except BaseException:
            self.catalog.close()
            raise
        self._agent = threading.Thread(target=self._watch, name="lastcall-agent", daemon=True)
        self._scribe = threading.Thread(target=self._write_down, name="lastcall-scribe", daemon=True)
        if self.jit.guard:
            identity = {"run": run, "incarnation": self.incarnation}
            steps, seconds = self.jit.guard_steps, self.jit.guard_seconds
            self._guard = Guard(Path(self.jit.guard_folder), self.catalog.private, self.gate, identity, steps=steps, seconds=seconds)
            self._guard.on_area = lambda area: self.outside.tell(area=area)
        self.outside.tell(step=self.subject.step, resumed=resumed.record.step if resumed else None)
        self._agent.start()
        self._scribe.start()
        return resumed

    def _resume(self) -> catalogs.Entry | None:
        for sentence in self.catalog.clean():
            log.warning("On start: %s", sentence)
        entries = self.catalog.entries()
        for earlier in reversed(entries):
            if earlier.record.complete:
                self.budget.observe(earlier.record.written, earlier.record.seconds)
        best = catalogs.best(entries, self._keep)
        if best is not None and self._keep.monitor is not None:
            self._best = best.record.metrics[self._keep.monitor]
        began = self.clock.now()
        entry = restore.newest(self.catalog, self.engine, self.subject) if entries else None
        self.saver.follow(entries, entry)
        seconds = self.clock.now() - began
        if entry is None:
            log.info("Starting from the beginning: %s holds no checkpoint", self.catalog.root)
        else:
            record = entry.record
            exact = "exact" if record.exact else f"not exact: {record.because}"
            others = f", {len(entries) - 1} other(s)" if len(entries) > 1 else ""
            log.info(
                "Resuming from %s (step %d, %s, reason %s, %s; digests hold; %.0f MB in %.2fs): the newest valid checkpoint%s",
                entry.path.name, record.step, record.kind.value, record.reason or "none", exact, record.size / 1e6, seconds, others,
            )  # fmt: skip
            if record.exact and record.complete:
                self.committed = self.subject.boundary
        self.events.emit("start", incarnation=self.incarnation, resumed=entry.path.name if entry else None, seconds=seconds)
        return entry

    def _identity(self) -> tuple[str, int]:
        """The run's name for itself and the number of this incarnation, kept beside the checkpoints."""
        path = self.catalog.private / "run.json"
        try:
            known = json.loads(path.read_bytes())
            run, incarnation = str(known["run"]), int(known["incarnations"]) + 1
        except (OSError, ValueError, KeyError, TypeError):
            run, incarnation = uuid.uuid4().hex, 1
        try:
            under = path.with_suffix(".tmp")
            under.write_text(json.dumps({"run": run, "incarnations": incarnation}))
            os.replace(under, path)
        except OSError as error:  # a full disk must not keep a run from resuming
            log.warning("%s could not be written: %s", path, error)
        return run, incarnation

    # ---- notices ---------------------------------------------------------------------------------------------------------------

    def notify(self, notice: Notice) -> None:
        """The one entrance for every source of notices; called from any thread, returns at once."""
        self.subject.hurry()
        if self.latch.offer(notice):
            left = _left(notice, self.clock)
            self.events.emit("notice", source=notice.source, reason=notice.reason, deadline_in=left, step=self.subject.step)
        self._wake.set()

    def _watch(self) -> None:
        """The agent's life: sleep until there is a notice, serve it."""
        while not self._stopping.is_set():
            if not self._wake.wait(_NUDGE):
                try:
                    self._look_around()
                except Exception:  # whoever looks must not stop looking
                    log.exception("A fault in lastcall: it goes on listening")
                continue
            self._wake.clear()
            if self.latch.raised and not self.serving.begun and not self._stopping.is_set():
                try:
                    self.serving.run()
                except Exception:
                    log.exception("A fault in lastcall: the next boundary saves")
                    self.serving.open = True
                    self.subject.attend()

    def _look_around(self) -> None:
        """What is looked for rather than heard: the launcher's notice, a person's pause, a copy that has become affordable."""
        self.subject.nudge()
        if self._guard is not None and self._guard.due(self.subject.step):
            self.subject.attend()
        self.hear()

    def hear(self) -> None:
        """Look for news that comes as a file. Also while a notice is being served: a second one may bring the deadline forward."""
        notice = self.outside.notice() if not self.latch.raised or self.outside.launched else None
        if notice is not None:
            self.notify(notice)

    def _write_down(self) -> None:
        """Events and progress, on a thread of their own: a metric on a busy GPU or a dead network disk may hold it up for long,
        and the agent must not wait for that."""
        while not self._stopping.wait(1.0):
            self.events.flush()
            self.progress.flush()
            self.outside.tell(step=self.subject.step)
        self.events.close()
        self.progress.flush()

    # ---- boundaries ------------------------------------------------------------------------------------------------------------

    def at_boundary(self, *, epoch_end: bool = False) -> None:
        """The training thread is at a boundary and something may be due. Raises Preempted once a notice has been served."""
        if self.serving.open:
            self.serving.at_boundary()
        elif self._owed or (self._due(epoch_end) and self._better()):
            self._save_what_is_due()
        if not self._prepared and self.subject.step > 0:
            self._prepare()
        if self._guard is not None and self._guard.due(self.subject.step):
            self._guard.take(self.subject.behind_gate, self.subject.step)

    def next_due(self) -> int:
        """The step whose boundary must be looked at again, if nothing happens before."""
        step = self.subject.step
        if self._owed or (not self._prepared and step == 0):
            return step + 1
        due = 1 << 62
        if self.periodic.save_strategy == "steps" and self.periodic.save_steps:
            due = (step // self.periodic.save_steps + 1) * self.periodic.save_steps
        guarded = self._guard.next_step() if self._guard is not None else None
        return due if guarded is None else min(due, max(guarded, step + 1))

    def _due(self, epoch_end: bool) -> bool:
        if self.committed == self.subject.boundary:
            return False
        if self.periodic.save_strategy == "epoch":
            return epoch_end
        if self.periodic.save_strategy == "steps" and self.periodic.save_steps and not epoch_end:
            return self.subject.step > 0 and self.subject.step % self.periodic.save_steps == 0
        return False

    def owe(self) -> None:
        """An exact checkpoint is owed at the next boundary."""
        self._owed = True
        self.subject.attend()

    def _better(self) -> bool:
        """With save_best_only: whether the monitored metric has improved."""
        if not self.periodic.save_best_only or self.periodic.monitor is None:
            return True
        value = self.metrics().get(self.periodic.monitor)
        if value is None:
            log.warning(
                "No checkpoint at step %d: save_best_only watches %r, which run.report() has not been given",
                self.subject.step, self.periodic.monitor,
            )  # fmt: skip
            return False
        improved = self._best is None or (value < self._best if self.periodic.mode == "min" else value > self._best)
        if improved:
            self._best = value
        return improved

    # ---- saves -----------------------------------------------------------------------------------------------------------------

    def save(self, capture: Capture, kind: Kind, reason: str, deadline: float | None = None) -> catalogs.Entry:
        """Commit this capture now. The caller holds `saving`."""
        began = self.clock.now()
        boundary = self.subject.boundary
        self.events.emit("save-begins", save=kind.value, step=capture.step, bytes=capture.nbytes)
        if self._guard is not None and kind in (Kind.JIT, Kind.RESCUE):
            spare = None if deadline is None else deadline - began - self.budget.seconds(capture.nbytes)
            self._guard.stage(capture, spare)
        entry = self.saver.save(capture, Request(kind, reason, deadline, lambda: False))
        self._committed(entry, capture, boundary, self.clock.now() - began)
        return entry

    def _committed(self, entry: catalogs.Entry, capture: Capture, boundary: Boundary, seconds: float) -> None:
        record = entry.record
        self._saved_document = capture.document
        if record.exact and record.complete:
            self.committed = boundary
        self.events.emit(
            "committed", save=record.kind.value, step=record.step, exact=record.exact, because=record.because, seconds=seconds,
            written=record.written, path=entry.path.name,
        )  # fmt: skip
        self.outside.tell(step=self.subject.step, checkpoint=entry.path.name)
        for path in self.catalog.prune(self._keep):
            self.events.emit("pruned", path=path.name)
        space.warn_if_short(self.catalog, record.written)

    def _save_what_is_due(self) -> None:
        if self.periodic.save_strategy != "no":
            self.save_in_background()
            return
        self._owed = False  # owed after run.save(): there is no memory set aside for a copy, and the user is waiting anyway
        with self.saving:
            self._write(self.subject.capture(), self.subject.boundary, Request(Kind.MANUAL, "run.save()"))

    def save_in_background(self) -> None:
        """A periodic save: stop training for the copy only. If one is still being written, this one comes right after it."""
        if self._background is not None and self._background.is_alive():
            if not self._owed:
                log.info("Periodic save at step %d waits: the one before is still being written", self.subject.step)
            self._owed = True
            self.subject.attend()
            return
        self._owed = False
        boundary = self.subject.boundary
        with self.saving:
            capture = self.subject.capture()
            # What has not changed is found out now, while it cannot change: it needs no copy.
            same = self.saver.unchanged(capture.groups)
            moving = with_groups(capture, without(capture.groups, set(same)))
            staged = self._arena.stage(moving, self.engine)
        reason = f"save_strategy={self.periodic.save_strategy}"
        if staged is None:
            log.warning("Not enough memory for a copy of the state: training waits until this periodic checkpoint is written")
            with self.saving:
                self._write(capture, boundary, Request(Kind.PERIODIC, reason))
            return
        groups = tuple(group for group in capture.groups if group.name in same) + staged.groups
        request = Request(Kind.PERIODIC, reason, None, lambda: self._abandon_background, same=same)
        self._abandon_background = False
        self._background = threading.Thread(
            target=self._periodic,
            args=(with_groups(capture, groups), boundary, request),
            name="lastcall-periodic",
            daemon=True,
        )
        self._background.start()

    def _periodic(self, capture: Capture, boundary: Boundary, request: Request) -> None:
        with self.saving:
            self._write(capture, boundary, request)

    def _write(self, capture: Capture, boundary: Boundary, request: Request) -> None:
        began = self.clock.now()
        try:
            entry = self.saver.save(capture, request)
        except (errors.SaveError, OSError) as error:
            log.error("%s checkpoint of step %d was not saved: %s", request.kind.value.capitalize(), capture.step, error)
            self.events.emit("not-saved", save=request.kind.value, step=capture.step, because=str(error))
            return
        seconds = self.clock.now() - began
        self._committed(entry, capture, boundary, seconds)
        log.info("%s checkpoint of step %d completed in %.1fs", request.kind.value.capitalize(), capture.step, seconds)

    def background_in_the_way(self, deadline: float | None, nbytes: int) -> None:
        """A notice wants to save while a periodic save is being written: that one is finished first where there is time for both."""
        background = self._background
        if background is None or not background.is_alive() or deadline is None:
            return
        if deadline - self.clock.now() < 2 * self.budget.seconds(nbytes) + 1.0:
            log.warning("The periodic save in progress is given up: there is no time for both")
            self._abandon_background = True

    # ---- preparation -----------------------------------------------------------------------------------------------------------

    def _prepare(self) -> None:
        """After the first step, when the optimizer's state exists: sizes are known, the plan is made, space is prepared."""
        self._prepared = True
        capture = self.subject.capture()
        self.expected_bytes = capture.nbytes
        sizes = self.saver.sizes(capture.groups)
        self._preparation = threading.Thread(target=self._prepare_space, args=(sizes, capture), name="lastcall-space", daemon=True)
        self._preparation.start()

    def _prepare_space(self, sizes: list[int], capture: Capture) -> None:
        nbytes = capture.nbytes
        if self._guard is not None:
            self._guard.prepare(capture)
        if self.periodic.save_strategy != "no" and not self._arena.reserve(nbytes):
            log.warning(
                "No memory for a copy of the state (%.0f MB): periodic saves will stop training while they write",
                nbytes / 1e6,
            )
        preparation = space.Preparation(self.catalog, self.engine, self.budget, lambda: self._stopping.is_set() or self.latch.raised)
        if self.jit.spare:
            preparation.run(sizes)
        else:
            preparation.check(sizes)
        if preparation.method is not None:
            self.saver.method = preparation.method
        needed = self.budget.seconds(nbytes)
        if self.budget.measured and needed > self.jit.grace:
            log.warning(
                "A checkpoint of %.0f MB needs about %.0f s here, more than the grace of %.0f s: it may not be saved in time. "
                "Raise the grace of your platform and LASTCALL_GRACE_SECONDS, or save to a faster disk.",
                nbytes / 1e6, needed, self.jit.grace,
            )  # fmt: skip
        if self.jit.huge_pages:
            sources = [entry.source for group in capture.groups for entry in group.entries]
            moved = pages.gather(sources, lambda rest: self._stopping.wait(rest) or self.latch.raised)
            log.debug("%.0f of %.0f MB of the state are in huge pages", moved / 1e6, nbytes / 1e6)

    # ---- end -------------------------------------------------------------------------------------------------------------------

    def finish(self) -> None:
        """Training is over and the state is at a boundary: keep it, so that a restart after the end does nothing."""
        self.outcome = Outcome.FINISHED
        self.wait_for_background()
        with self.saving:
            if self.latch.raised:
                log.info("Training finished: the notice needs no answer")
            self.serving.close()
            if self.committed == self.subject.boundary and self._saved_document is None:
                return  # the run had finished before
            try:
                capture = self.subject.capture()
                if self.committed == self.subject.boundary and capture.document == self._saved_document:
                    return
                entry = self.save(capture, Kind.FINAL, "training finished")
            except (errors.SaveError, OSError) as error:
                log.error("The final checkpoint was not saved: %s", error)
            else:
                log.info("Training finished at step %d; saved %s", self.subject.step, entry.path.name)

    def wait_for_background(self) -> None:
        if self._background is not None:
            self._background.join()

    def left(self) -> None:
        """The last word to the outside. What could not be saved, or raised, is left for the guardian, where there is one."""
        outcome = self.outcome.value if self.outcome else None
        if self._guard is not None:
            # Without a launcher an exception leaves nothing behind: memory that nobody may ever come for.
            left_alone = self.outcome in (Outcome.FAILED, Outcome.FINISHED) and not self.outside.launched
            safe = self.committed == self.subject.boundary or left_alone
            self._guard.close(keep=not safe)
        self.outside.tell(step=self.subject.step, outcome=outcome)

    def stop(self) -> None:
        """End the threads and let go of the directory. Safe to call from the training thread only."""
        self.wait_for_background()
        self.events.emit("stop", outcome=self.outcome.value if self.outcome else None, step=self.subject.step)
        self.left()
        self._stopping.set()
        self.serving.close()
        self._wake.set()
        self._agent.join()
        self._scribe.join(2.0)
        if self._preparation is not None:
            self._preparation.join(1.0)  # it may be touching memory for a snapshot: not worth waiting for
        self.engine.close()
        self.catalog.close()


def _left(notice: Notice, clock: clocks.Clock) -> float | None:
    return None if notice.deadline is None else round(notice.deadline - clock.now(), 3)
