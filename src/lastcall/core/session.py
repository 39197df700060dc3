"""One incarnation of a run, from start to exit: the one file that knows the order of the stages.

    start     lock the directory, clean it, restore the newest valid checkpoint
    boundary  the training thread comes by: a notice is served here, a periodic save is begun here
    finish    training is over: a last checkpoint, so that a restart does nothing
    stop      threads ended, handlers restored

The way of a notice from its arrival to the boundary or the rescue is in `serving`; that of many ranks in `joint`.
"""

from __future__ import annotations

import dataclasses
import logging
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from lastcall import clock as clocks
from lastcall import errors, memory, settings
from lastcall.core.checkpoint import catalog as catalogs
from lastcall.core.checkpoint.departure import Leaving
from lastcall.core.engine.snapshot import Arena
from lastcall.core.engine.writer import Engine
from lastcall.core.guard.guard import Guard
from lastcall.core.joint import joint_start
from lastcall.core.joint.joint import Joint
from lastcall.core.joint.peers import Ranks
from lastcall.core.joint.save import Gathering, Order
from lastcall.core.mirror.mirror import Mirror
from lastcall.core.mirror.upload_duty import Copier
from lastcall.core.notice.launcher_link import Outside
from lastcall.core.notice.periodic import Periodic
from lastcall.core.notice.responder import Serving, named
from lastcall.core.notice.warmup import Preparing
from lastcall.core.process import exits, refusal
from lastcall.core.progress.page import MetricsPage
from lastcall.core.progress.push import StatusPush
from lastcall.core.progress.report import Report
from lastcall.core.proof.witness import Witness
from lastcall.core.ranks import partition
from lastcall.core.ranks.heartbeat import HANG, LOST
from lastcall.core.ranks.world import World
from lastcall.core.restore import restore
from lastcall.core.save import spare_space
from lastcall.core.save.budget import Budget
from lastcall.core.save.saver import Request, Saver
from lastcall.core.startup.startup import Starting
from lastcall.core.sync.gate import Gate
from lastcall.core.sync.latch import Latch
from lastcall.events import EventLog, Progress
from lastcall.settings import JITCheckpointConfig, PeriodicCheckpointConfig
from lastcall.storage import files as storage
from lastcall.types import Capture, Kind, Notice, Outcome

log = logging.getLogger("lastcall")
FINISHED = "training finished"
_NUDGE = 0.25  # seconds
_MANUAL = 60.0  # seconds that run.save() waits for the other ranks, at least
Boundary = tuple[int, int]


class Subject(restore.Restorable, Protocol):
    """What is being protected: the adapter's side of a session."""

    @property
    def step(self) -> int: ...

    @property
    def boundary(self) -> Boundary:
        """What tells one boundary from another: the completed steps and epochs."""

    @property
    def ordinal(self) -> int:
        """The number of this boundary: every completed step and every completed epoch is one."""

    @property
    def settled(self) -> bool:
        """Whether no optimizer has stepped since the last boundary."""

    @property
    def step_seconds(self) -> float | None:
        """How long a step takes, as far as is known."""

    def capture(self) -> Capture:
        """The whole state, at a boundary, on the training thread."""

    def outline(self) -> Capture:
        """As capture(), as far as its size goes."""

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

    def join(self, run: str, incarnation: int, folder: Path) -> None:
        """The ranks have begun: keep in `folder` what the others must know of this one if it is killed."""

    def holdings(self) -> tuple[tuple[int, ...], ...]:
        """The ranks that hold the same pieces of the shared state, for each kind of piece."""

    def alone(self) -> str:
        """A digest of what is not shared, as far as anybody can tell, and would be lost with this rank; empty if nothing would."""

    def part_of(self, rank: int, step: int, mine: Capture) -> Capture | None:
        """What a rank that was killed would have saved as its own, as far as it is known; `mine` is this rank's capture."""


class Session:
    engine: Engine  # from the start on, as what follows
    saver: Saver
    incarnation: int

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
        world: World | None = None,
        run: str = "",
    ) -> None:
        """`run`: what the run is called, where that is known from outside; checkpoints of another run are then left alone."""
        root = root.absolute()  # at once: a script may change its working directory
        self.world = world or World()
        self.run = run
        self.clock = clock or clocks.Clock()
        self.jit = jit
        self.periodic = periodic
        self.subject = subject
        self.gate = Gate()
        self.latch = Latch()
        self.budget = Budget(self.clock)
        rank = self.world.rank
        self.catalog = catalogs.Catalog(root, files or storage.Files(), rank)
        self.events = EventLog(self.catalog.private / f"events-{rank}.jsonl", self.clock)
        self.progress = Progress(self.catalog.private / (f"progress-{rank}.json" if rank else "progress.json"), self.clock)
        self.progress.where = lambda: self.subject.step
        self.reporters = _reporters(self, jit) if rank == 0 else []
        self.keep = catalogs.Keep(periodic.save_total_limit, periodic.monitor, periodic.mode)
        self.allocate = allocate
        self.saving = threading.RLock()  # one save at a time, whoever asks for it
        self.committed: Boundary | None = None  # the boundary that the newest checkpoint holds exactly
        self.expected_bytes = 0
        self.had_finished = False  # the run was at its end when it was saved, on all ranks
        self.outcome: Outcome | None = None
        self.metrics: Callable[[], dict[str, float]] = dict
        self._saved_document: dict[str, object] | None = None  # of the newest checkpoint that this incarnation committed
        self.background = Periodic(self, Arena(allocate))
        self.ranks: Ranks | None = None
        self.gathering: Gathering | None = None
        self._latest, self._again = "", 0  # the last save of a boundary that all ranks saved, and how often it was
        self.pressing: Notice | None = None  # a rank was lost, or hangs
        self.preparing = Preparing(self)
        self.outside = Outside(root, self.catalog.private, self.clock, jit.grace)
        self.leaving = Leaving(self.catalog.private, rank)
        self.mirror: Mirror | None = None
        self.copier: Copier | None = None
        if jit.mirror is not None:
            self.mirror = Mirror(jit.mirror, self.catalog, self.clock, self.events, lambda: self.keep, jit.mirror_keys)
            self.copier = Copier(self, self.mirror)
            self.budget.afterwards = self.mirror.seconds
        self.guard: Guard | None = None
        self._first = 0  # the step that this incarnation began with
        self._wake = threading.Event()
        self._stopping = threading.Event()
        self.serving = Serving(self)
        self.joint: Joint | None = None
        self._witness = Witness.of_environment(rank, self.world.size)

    # ---- start -------------------------------------------------------------------------------------------------------------

    def start(self) -> catalogs.Entry | None:
        """Everything before the first step. Returns the checkpoint that the run goes on from."""
        self._wait_while_paused()
        starting = Starting(self)
        with refusal.explained():
            resumed = starting.together() if self.world.many else starting.alone()
        self._agent = threading.Thread(target=self._watch, name="lastcall-agent", daemon=True)
        self._scribe = threading.Thread(target=self._write_down, name="lastcall-scribe", daemon=True)
        if self.jit.guard and self.world.many:
            log.warning("The guard keeps a copy of a run of one process only: with %d ranks the survivors save", self.world.size)
        elif self.jit.guard:
            identity = {"run": self.saver.run, "incarnation": self.incarnation}
            steps, seconds = self.jit.guard_steps, self.jit.guard_seconds
            self.guard = Guard(Path(self.jit.guard_folder), self.catalog.private, self.gate, identity, steps=steps, seconds=seconds)
            self.guard.on_area = lambda area: self.outside.tell(area=area)
        self.outside.tell(step=self.subject.step, resumed=resumed.record.step if resumed else None)
        self._first = self.subject.step
        self._agent.start()
        self._scribe.start()
        for reporter in self.reporters:
            reporter.open()
        return resumed

    def _wait_while_paused(self) -> None:
        try:
            if self.outside.wait_while_paused(lambda: self.latch.raised):
                return
        except KeyboardInterrupt:
            log.info("Interrupted while paused: the run stays paused")
            raise errors.Preempted(128 + signal.SIGINT, "interrupted while paused") from None
        assert self.latch.notice is not None
        self.outcome = Outcome.SAVED
        raise errors.Preempted(exits.code(self.latch.notice, True, self.jit.exit_code), "told to stop while paused")

    # ---- notices ---------------------------------------------------------------------------------------------------------------

    def notify(self, notice: Notice) -> None:
        """The one entrance for every source of notices; called from any thread, returns at once."""
        self.subject.hurry()
        if notice.source in (LOST, HANG):
            self.press(notice)
        elif self.latch.offer(notice):
            left = _left(notice, self.clock)
            self.events.emit("notice", source=notice.source, reason=notice.reason, deadline_in=left, step=self.subject.step)
        self._wake.set()

    def press(self, notice: Notice) -> None:
        """A rank was lost, or hangs: save at once, if nothing is being saved already."""
        if self.pressing is None and not self.serving.begun:
            self.pressing = notice
            self.events.emit("notice", source=notice.source, reason=notice.reason, step=self.subject.step)
        self._wake.set()

    def wake(self) -> None:
        self._wake.set()

    @property
    def stopping(self) -> threading.Event:
        return self._stopping

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
            if (self.latch.raised or self.pressing) and not self.serving.begun and not self._stopping.is_set():
                try:
                    if (notice := self.latch.notice) is not None:
                        self.leaving.say(notice.reason, _left(notice, self.clock) or self.jit.grace)
                        if self.mirror is not None and self.speaks():
                            self.mirror.leaving(notice.reason, _left(notice, self.clock) or self.jit.grace)
                    self.serving.run()
                except Exception:
                    log.exception("A fault in lastcall: the next boundary does what it can")
                    self.serving.fault()

    def _look_around(self) -> None:
        """What is looked for rather than heard: the launcher's notice, a person's pause, a copy that has become affordable."""
        self.subject.nudge()
        if self.guard is not None and self.guard.due(self.subject.step):
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
        self.progress.flush()  # the last report was made within a step: where the run is comes after it

    # ---- boundaries ------------------------------------------------------------------------------------------------------------

    def at_boundary(self, *, epoch_end: bool = False) -> None:
        """The training thread is at a boundary and something may be due. Raises Preempted once a notice has been served."""
        if self._witness is not None:
            self._witness.look(self, self.subject.boundary, self.subject.outline, lambda: self.serving.open)
        if self.serving.open:
            self.serving.at_boundary()  # returns where the ranks have agreed on a later boundary
        # Also then: a rank that came by before the notice has begun this periodic save, and waits for all the others' parts of it.
        self.background.at_boundary(epoch_end)
        if not self.preparing.begun and self.subject.step > 0:
            self.preparing.begin()
        if self.guard is not None and self.guard.due(self.subject.step):
            self.guard.take(self.subject.behind_gate, self.subject.step)

    def next_due(self) -> int:
        """The step whose boundary must be looked at again, if nothing happens before."""
        step = self.subject.step
        if self.background.owed or self._witness is not None or (not self.preparing.begun and step == 0):
            return step + 1
        guarded = self.guard.next_step() if self.guard is not None else None
        due = self.background.next_step()
        return due if guarded is None else min(due, max(guarded, step + 1))

    # ---- saves -----------------------------------------------------------------------------------------------------------------

    def mine(self, capture: Capture, writers: tuple[int, ...] | None = None) -> Capture:
        """What of a capture this rank writes, where all ranks write (or only some do)."""
        if self.ranks is None:
            return capture
        everybody = tuple(range(self.ranks.size)) if writers is None else writers
        files = capture.files if self.ranks.rank == min(everybody) else tuple(file for file in capture.files if not file.shared)
        return dataclasses.replace(capture, groups=partition.portion(capture.groups, self.ranks.rank, everybody), files=files)

    def write(self, capture: Capture, request: Request, boundary: Boundary) -> catalogs.Entry:
        """Commit, alone or together. `capture` is what this rank writes of this boundary, which all ranks save."""
        if self.ranks is None or self.gathering is None:
            return self.saver.save(capture, request)
        name = f"{request.kind.value}-{sum(boundary)}-{self.ranks.token[:8]}"
        self._again = self._again + 1 if name == self._latest else 1  # words and receipts of a former save must not answer for this one
        self._latest, name = name, f"{name}-{self._again}"
        writers = tuple(range(self.ranks.size))
        order = Order(
            name, request.kind, request.reason, writers, deadline=request.deadline, abandoned=request.abandoned, same=request.same
        )
        if request.kind is Kind.MANUAL:  # a rank that does not call run.save() must not hold the others up for long
            order = dataclasses.replace(order, patience=max(_MANUAL, self.jit.grace))
        return self.gathering.save(capture, order)

    def save_together(self, capture: Capture, order: Order) -> catalogs.Entry:
        """Take part in what the ranks have agreed to save."""
        assert self.gathering is not None
        began = self.clock.now()
        boundary = self.subject.boundary
        self.events.emit("save-begins", save=order.kind.value, step=capture.step, bytes=capture.nbytes)
        entry = self.gathering.save(self.mine(capture, order.writers), order)
        self.now_committed(entry, capture, boundary, self.clock.now() - began)
        return entry

    def save(self, capture: Capture, kind: Kind, reason: str, deadline: float | None = None) -> catalogs.Entry:
        """Commit this capture now. The caller holds `saving`."""
        began = self.clock.now()
        boundary = self.subject.boundary
        self.events.emit("save-begins", save=kind.value, step=capture.step, bytes=capture.nbytes)
        if self.guard is not None and kind in (Kind.JIT, Kind.RESCUE):
            spare = None if deadline is None else deadline - began - self.budget.seconds(capture.nbytes)
            self.guard.stage(capture, spare)
        entry = self.write(self.mine(capture), Request(kind, reason, deadline), boundary)
        self.now_committed(entry, capture, boundary, self.clock.now() - began)
        return entry

    def now_committed(self, entry: catalogs.Entry, capture: Capture, boundary: Boundary, seconds: float) -> None:
        record = entry.record
        self._saved_document = capture.document
        if record.whole and record.complete:
            self.committed = boundary
        self.events.emit(
            "committed", save=record.kind.value, step=record.step, exact=record.exact, because=record.because, seconds=seconds,
            written=record.written, path=entry.path.name,
        )  # fmt: skip
        self.outside.tell(step=self.subject.step, checkpoint=entry.path.name)
        if self.copier is not None:
            self.copier.copy(entry)
        if self.catalog.held:
            for path in self.catalog.prune(self.keep):
                self.events.emit("pruned", path=path.name)
        if self.gathering is None or self.gathering.at_hand:
            spare_space.warn_if_short(self.catalog, record.written)

    def has(self, name: str) -> bool:
        """Whether there is a checkpoint of this name, here or where the ranks have committed it."""
        elsewhere = self.gathering.elsewhere if self.gathering is not None else ()
        return name in elsewhere or (self.catalog.root / name).is_dir()

    def speaks(self) -> bool:
        """Whether this rank does what only one of them does: the lowest one that is alive."""
        return self.ranks is None or self.ranks.rank == min(set(range(self.ranks.size)) - self.ranks.gone(), default=0)

    # ---- end -------------------------------------------------------------------------------------------------------------------

    def finish(self, reason: str = FINISHED, *, save: bool = True) -> None:
        """Training is over and the state is at a boundary: keep it, so that a restart after the end does nothing. `reason`: for the
        record, where it is not over by itself."""
        if self.joint is not None:
            self._finish_together(self.joint, reason, save)
            return
        self.outcome = Outcome.FINISHED
        self.background.wait()
        with self.saving:
            if self.latch.raised:
                log.info("Training finished: the notice needs no answer")
            self.serving.close()
            if not save:
                return
            if self.committed == self.subject.boundary and self._saved_document is None:
                return  # the run had finished before
            try:
                capture = self.subject.capture()
                if self.committed == self.subject.boundary and capture.document == self._saved_document and reason == FINISHED:
                    return
                entry = self.save(capture, Kind.FINAL, reason)
            except (errors.SaveError, OSError) as error:
                raise self._end_not_saved(error) from error
            self.say_finished(reason, entry)

    def say_finished(self, reason: str, entry: catalogs.Entry) -> None:
        ended = f"Training finished at step {self.subject.step}" if reason == FINISHED else f"{reason[:1].upper()}{reason[1:]}"
        log.info("%s; saved %s", ended, entry.path.name)

    def _finish_together(self, joint: Joint, reason: str, save: bool) -> None:
        """Nobody leaves before all have finished; until then a notice still finds everybody here."""
        self.background.wait()
        same = self.committed == self.subject.boundary and self._saved_document is None
        if same and self.had_finished and not self.serving.open:
            self.outcome = Outcome.FINISHED  # before, and on all ranks
            return
        try:
            if save:
                joint.finish(reason)
        except (errors.SaveError, OSError) as error:
            joint.close()
            raise self._end_not_saved(error) from error
        self.outcome = Outcome.FINISHED
        if self.ranks is not None:
            self.ranks.finished()
        joint.close()

    def _end_not_saved(self, error: Exception) -> errors.SaveError:
        """Training is over, and its result is in memory only: that is no end that anybody may take for one."""
        self.outcome = Outcome.NOT_SAVED if self.latch.raised else Outcome.FAILED
        self.events.emit("not-saved", save=Kind.FINAL.value, step=self.subject.step, because=str(error))
        message = (
            f"The final checkpoint was not saved, so the end of training (step {self.subject.step}) is lost with this process: {error}"
        )
        log.error("%s", message)
        return errors.SaveError(message)

    def failed(self, error: BaseException) -> errors.Preempted | None:
        """Training has raised. A notice that has come is served all the same: what raised may have come of it, and the platform
        brings the run back. With many ranks all save what they have, notice or not, and this returns when they have. Where they had
        saved before, the error came of it (the others have left, and their connections with them): the run was preempted, and did
        not fail. A sys.exit() after a notice is a stop, whatever its code."""
        serving = self.serving
        if self.joint is not None and self.joint.served():
            return serving.preempted()
        told = self.latch.raised  # looked at first: when a rank has failed, torchrun sends the others what looks like a notice
        serving.failed(error)
        if told:
            return self._failed_after_notice(error)
        if self.joint is None:
            self._failed_alone(error)
        elif self.joint.at_fault:
            self.outcome = Outcome.FAILED  # whatever was saved: it is an error, and nobody's preemption
        return None

    def _failed_after_notice(self, error: BaseException) -> errors.Preempted | None:
        by_exit = isinstance(error, SystemExit)
        reason = self.serving.notice().reason
        if self.outcome is Outcome.SAVED:
            if by_exit:
                log.info("The script called sys.exit() after %s: it stops, and is saved", reason)
            else:
                log.error(
                    "Training raised before it could stop for the notice. It is saved, and this is what it raised:", exc_info=error
                )
            return self.serving.preempted()
        what = "The script called sys.exit()" if by_exit else "Training raised"
        log.error("%s before it could stop for the notice (%s), and nothing is saved", what, reason)
        if by_exit:
            self.outcome = Outcome.NOT_SAVED
            return self.serving.preempted()
        if self.joint is not None and self.joint.at_fault:
            self.outcome = Outcome.FAILED
        return None

    def _failed_alone(self, error: BaseException) -> None:
        """Without a notice: the last completed step is whole, whatever raised behind it. Leaving it unsaved is said."""
        if self.gate.begun == 0 and self.subject.step == self._first:
            return  # it has not trained since it started
        why_not = self.serving.save_what_is_whole(error)
        newest = self.saver.last
        if not why_not and newest is not None:
            how = "exact" if newest.record.exact else f"not exact: {newest.record.because}"
            log.warning("%s left the block at step %d; %s is saved (%s)", named(error), self.subject.step, newest.path.name, how)
        elif why_not and self.subject.step > 0:
            kept = "there is no checkpoint" if newest is None else f"the newest checkpoint is {newest.path.name}"
            log.warning("%s left the block at step %d, which is not saved: %s; %s", named(error), self.subject.step, why_not, kept)

    def left(self) -> None:
        """The last word to the outside. What could not be saved, or raised, is left for the guardian, where there is one."""
        outcome = self.outcome.value if self.outcome else None
        if self.guard is not None:
            # Without a launcher an exception leaves nothing behind: memory that nobody may ever come for.
            left_alone = self.outcome in (Outcome.FAILED, Outcome.FINISHED) and not self.outside.launched
            safe = self.committed == self.subject.boundary or left_alone
            self.guard.close(keep=not safe)
        if self.copier is not None:
            self.copier.settle()
        self.outside.tell(step=self.subject.step, outcome=outcome)

    def stop(self) -> None:
        """End the threads and let go of the directory. Safe to call from the training thread only."""
        if self.outcome is Outcome.SAVED and self.latch.raised:  # a mirror that hangs must not outlast the grace
            exits.hurry_out(exits.code(self.serving.notice(), True, self.jit.exit_code), self.serving.deadline())
        self.background.wait()
        self.events.emit("stop", outcome=self.outcome.value if self.outcome else None, step=self.subject.step)
        self.serving.close()  # first: while this thread waits for the mirror, the agent must not take it for one that is stuck
        self.left()
        self._stopping.set()
        self._wake.set()
        if self.ranks is not None:
            self.ranks.close()
        if self.gathering is not None:
            self.gathering.close()
            if self.outcome is Outcome.FINISHED and self.world.rank == 0:
                joint_start.sweep(self.catalog)  # all have read the last decision: nobody is left to obey it
        self._agent.join()
        self._scribe.join(2.0)
        for reporter in self.reporters:
            reporter.close()
        self.preparing.wait()
        self.engine.close()
        self.catalog.close()
        self.leaving.unsay()  # last: whoever waits for this process finds the lock free, too


def _reporters(session: Session, jit: JITCheckpointConfig) -> list[MetricsPage | StatusPush]:
    """Who tells others how far the run is."""
    server = settings.status_server() if jit.progress_push else None
    if jit.progress_port is None and server is None:
        return []
    report = Report(session.progress, session.events, session.clock)
    reporters: list[MetricsPage | StatusPush] = []
    if jit.progress_port is not None:
        reporters.append(MetricsPage(jit.progress_port, report))
    if server is not None:
        reporters.append(StatusPush(server, report))
    return reporters


def _left(notice: Notice, clock: clocks.Clock) -> float | None:
    return None if notice.deadline is None else round(notice.deadline - clock.now(), 3)
