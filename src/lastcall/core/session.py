"""One incarnation of a run, from start to exit: the one file that knows the order of the stages.

    begin     lock the directory, clean it, restore the newest valid checkpoint (`startup`); the session is
              built from what that returns
    boundary  the training thread calls in: a notice is answered here, a periodic save is begun here
    finish    training is over: a last checkpoint, so that a restart does nothing
    stop      threads ended, handlers restored

From a notice to its outcome: `notice.responder`. What many ranks do together: `joint`.
"""

from __future__ import annotations

import contextlib
import logging
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

from lastcall import errors, settings
from lastcall.core.checkpoint.departure import DepartureNote
from lastcall.core.checkpoint.record import Entry
from lastcall.core.checkpointer import Checkpointer
from lastcall.core.context import RunContext
from lastcall.core.guard.guard import Guard
from lastcall.core.joint import joint_start
from lastcall.core.joint.many_ranks import ManyRanks
from lastcall.core.mirror.upload_duty import UploadDuty
from lastcall.core.notice.agent import Agent
from lastcall.core.notice.answer import Answer
from lastcall.core.notice.ending import FINISHED
from lastcall.core.notice.event_writer import EventWriter
from lastcall.core.notice.inbox import Inbox
from lastcall.core.notice.one_process import OneProcess
from lastcall.core.notice.periodic import PeriodicSaver
from lastcall.core.notice.responder import Responder
from lastcall.core.notice.warmup import Warmup
from lastcall.core.process import exits, refusal
from lastcall.core.progress.page import MetricsPage
from lastcall.core.progress.push import StatusPush
from lastcall.core.proof.witness import Witness
from lastcall.core.save import spare_space
from lastcall.core.startup.startup import Started, Startup
from lastcall.types import Capture, Kind, Notice, Outcome

log = logging.getLogger("lastcall")


def begin(context: RunContext, inbox: Inbox) -> Session:
    """Everything before the first step. Notices may arrive in the inbox from before this call on."""
    _wait_while_paused(context, inbox)
    reporters = _reporters(context) if context.world.rank == 0 else []  # they hear the event of the start
    with refusal.explained():
        started = Startup(context, inbox.stop_requested).run()
    try:
        session = Session(context, inbox, started, reporters)
        session.start()
    except BaseException:
        started.close(context.catalog)
        raise
    return session


def _wait_while_paused(context: RunContext, inbox: Inbox) -> None:
    try:
        if inbox.link.wait_while_paused(lambda: context.latch.raised):
            return
    except KeyboardInterrupt:
        log.info("Interrupted while paused: the run stays paused")
        raise errors.Preempted(128 + signal.SIGINT, "interrupted while paused") from None
    assert context.latch.notice is not None
    context.outcome.decide(Outcome.SAVED)
    raise errors.Preempted(
        exits.code(context.latch.notice, True, context.jit.exit_code), "asked to stop while paused"
    )


class Session:
    """Built whole from what a start returns. No other module writes its attributes."""

    def __init__(
        self, context: RunContext, inbox: Inbox, started: Started, reporters: list[MetricsPage | StatusPush]
    ) -> None:
        self.context = context
        self.run = started.run
        self.incarnation = started.incarnation
        self.resumed = started.resumed  # the checkpoint that this incarnation continues from
        self.engine = started.engine
        self._inbox = inbox
        self._phases = inbox.phases
        self._started = started
        self._stopping = threading.Event()
        self._departure = DepartureNote(context.catalog.private, context.world.rank)
        self._answer = Answer(context, inbox.phases, self._wind_up)
        self._guard = self._make_guard()
        self._upload_duty = self._make_upload_duty()
        self._witness = Witness.of_environment(
            context.world.rank, context.world.size, started.incarnation, context.jit, inbox.notify
        )  # fmt: skip
        self._reporters = reporters
        saver, engine, together = started.saver, started.engine, started.together
        ranks = None if together is None else together.ranks
        writer = saver if together is None else together.save
        self._checkpointer = Checkpointer(
            context, writer, started.committed, [self._before_save], [self._after_commit]
        )
        self._periodic = PeriodicSaver(
            context, self._checkpointer, saver, engine, ranks, started.best, self._before_copy
        )  # fmt: skip
        self._warmup = Warmup(
            context,
            self._checkpointer,
            self._periodic,
            saver,
            engine,
            ranks,
            self._stopping,
            self._prepare_guard,
        )
        self._strategy = self._make_strategy()
        responder = Responder(context, self._answer, self._strategy, inbox.look)
        self._agent = Agent(
            context, inbox, responder, self._stopping, self._announce_departure, self._look_around
        )
        self._event_writer = EventWriter(context, inbox.link, self._stopping)

    # ---- its parts -----------------------------------------------------------------------------------------

    def _make_guard(self) -> Guard | None:
        context, jit = self.context, self.context.jit
        if not jit.guard:
            return None
        if context.world.many:
            log.warning(
                "The guard keeps a copy of a run of one process only: with %d ranks the survivors save",
                context.world.size,
            )
            return None
        identity = {"run": self.run, "incarnation": self.incarnation}
        steps, seconds = jit.guard_steps, jit.guard_seconds
        guard = Guard(
            Path(jit.guard_folder),
            context.catalog.private,
            context.gate,
            identity,
            steps=steps,
            seconds=seconds,
        )
        guard.on_area = lambda area: self._inbox.link.tell(area=area)
        return guard

    def _make_upload_duty(self) -> UploadDuty | None:
        started, together = self._started, self._started.together
        if started.mirror is None:
            return None
        ranks = None if together is None else together.ranks

        def holder_of_newest() -> int | None:
            return None if together is None else together.save.holder_of_newest

        return UploadDuty(
            self.context,
            started.mirror,
            ranks,
            holder_of_newest,
            lambda: self._inbox.pending,
            lambda: self._answer.deadline,
        )

    def _make_strategy(self) -> OneProcess | ManyRanks:
        common = (self.context, self._answer, self._checkpointer, self._periodic, self._started.saver)
        together = self._started.together
        if together is None:
            return OneProcess(*common)
        return ManyRanks(*common, self._inbox, together.ranks, together.save, self._after_commit)

    def start(self) -> None:
        """The threads; from here on a notice is answered."""
        context, together = self.context, self._started.together
        step = self.resumed.record.step if self.resumed else None
        self._inbox.link.tell(step=context.subject.step, resumed=step)
        if together is not None and isinstance(self._strategy, ManyRanks):
            together.ranks.begin(
                context.jit.hang_seconds, self._strategy.how_far, self._inbox.notify, context.jit.grace
            )
        self._agent.start()
        self._event_writer.start()
        for reporter in self._reporters:
            reporter.open()

    # ---- on the agent's thread -----------------------------------------------------------------------------

    def _announce_departure(self, notice: Notice) -> None:
        """The next incarnation may start before this one has ended."""
        context, mirror = self.context, self._started.mirror
        left = context.jit.grace
        if notice.deadline is not None:
            left = round(notice.deadline - context.clock.now(), 3) or left
        self._departure.say(notice.reason, left)
        together = self._started.together
        if mirror is not None and (together is None or together.ranks.is_spokesrank()):
            mirror.leaving(notice.reason, left)

    def _look_around(self) -> None:
        """What has to be polled: a copy that has become affordable."""
        subject = self.context.subject
        subject.retry_copy()
        if self._guard is not None and self._guard.due(subject.step):
            subject.stop_at_next_boundary()

    # ---- boundaries ----------------------------------------------------------------------------------------

    @property
    def open(self) -> bool:
        """A notice is being answered, and the next boundary must be looked at."""
        return self._phases.open

    def at_boundary(self, *, epoch_end: bool = False) -> None:
        """The training thread is at a boundary and something may be due. Raises Preempted once a notice has
        been answered."""
        subject = self.context.subject
        if self._witness is not None:
            self._witness.look(subject.boundary, subject.outline, lambda: self._phases.open)
        if self._phases.open:
            self._strategy.at_boundary()  # returns where the ranks have agreed on a later boundary
        # Also then: a rank that came by before the notice has begun this periodic save, and waits for all the
        # others' parts of it.
        self._periodic.at_boundary(epoch_end)
        if not self._warmup.begun and subject.step > 0:
            self._warmup.begin()
        if self._guard is not None and self._guard.due(subject.step):
            self._guard.take(subject.behind_gate, subject.step)

    def next_due(self) -> int:
        """The step whose boundary must be looked at again, if nothing happens before."""
        step = self.context.subject.step
        if self._periodic.owed or self._witness is not None or (not self._warmup.begun and step == 0):
            return step + 1
        guarded = self._guard.next_step() if self._guard is not None else None
        due = self._periodic.next_step()
        return due if guarded is None else min(due, max(guarded, step + 1))

    def step_without_optimizer(self) -> None:
        """A pass in which no optimizer stepped, on the training thread. With many ranks it may have failed
        silently because one of them is gone."""
        self._strategy.step_without_optimizer()

    def leave_if_saved(self) -> None:
        """Called often inside long work: a rescue may have answered the notice."""
        self._answer.leave_if_saved()

    def notify(self, notice: Notice) -> None:
        self._inbox.notify(notice)

    # ---- saves ---------------------------------------------------------------------------------------------

    @property
    def last(self) -> Entry | None:
        """The newest checkpoint of this run that this process knows of."""
        return self._started.saver.last

    @property
    def up_to_date(self) -> bool:
        """Whether the newest checkpoint holds this very boundary."""
        return self._checkpointer.up_to_date

    def forget_resumed(self) -> None:
        """An adapter does not continue from the checkpoint that was restored."""
        self._checkpointer.forget_resumed()

    @contextlib.contextmanager
    def no_other_save(self) -> Iterator[None]:
        """No save is in progress, and no other one starts."""
        self._periodic.wait()
        with self._checkpointer.lock:
            yield

    def save(self, capture: Capture, kind: Kind, reason: str) -> Entry:
        """Commit this capture now, inside no_other_save()."""
        return self._checkpointer.save(capture, kind, reason)

    def save_in_background(self, reason: str) -> None:
        """Commit this boundary. Training waits for the copy only."""
        self._periodic.begin(reason)

    @property
    def saving_in_background(self) -> bool:
        return self._periodic.busy

    def wait_for_background(self) -> None:
        self._periodic.wait()

    def owe(self) -> None:
        """An exact checkpoint is owed at the next boundary."""
        self._periodic.owe()

    def has(self, name: str) -> bool:
        """Whether there is a checkpoint of this name, here or where the ranks have committed it."""
        return self._checkpointer.has(name)

    def bring(self, name: str, occasion: str) -> None:
        """Have this checkpoint, which all ranks are about to read, on every machine. All ranks call it, once
        on each occasion."""
        started, context = self._started, self.context

        def stop_requested() -> bool:
            return occasion == "start" and context.latch.raised

        if started.mirror is not None and context.world.rank == 0 and occasion == "start":
            started.mirror.bring(name, stop_requested)
        if started.together is not None:
            started.together.distribution.share(name, occasion, stop_requested)

    def _before_save(self, capture: Capture, kind: Kind, deadline: float | None) -> None:
        if self._guard is not None and kind in (Kind.JIT, Kind.RESCUE):
            needs = self.context.budget.seconds(capture.nbytes)
            self._guard.stage(
                capture, None if deadline is None else deadline - self.context.clock.now() - needs
            )

    def _before_copy(self) -> None:
        if self._guard is not None:
            self._guard.along(self.context.subject.behind_gate, self.context.subject.step)

    def _prepare_guard(self, capture: Capture) -> None:
        if self._guard is not None:
            self._guard.prepare(capture)

    def _after_commit(self, entry: Entry, capture: Capture | None = None) -> None:
        """`capture` is None where other ranks have committed it, and this one has no part in it."""
        context = self.context
        self._inbox.link.tell(step=context.subject.step, checkpoint=entry.path.name)
        if self._upload_duty is not None:
            self._upload_duty.on_commit(entry)
        if capture is None:
            return
        if context.catalog.held:
            for path in context.catalog.prune():
                context.events.emit("pruned", path=path.name)
        together = self._started.together
        if together is None or together.save.newest_is_here:
            spare_space.warn_if_short(context.catalog, entry.record.written)

    # ---- end -----------------------------------------------------------------------------------------------

    def finish(self, reason: str = FINISHED, *, save: bool = True) -> None:
        """Training is over and the state is at a boundary: keep it, so that a restart after the end does
        nothing. `reason`: for the record, where training was stopped early."""
        self._strategy.finish(reason, save=save, had_finished=self._started.had_finished)

    def failed(self, error: BaseException) -> errors.Preempted | None:
        """Training has raised. A notice that has come is answered all the same: it may have caused the error,
        and the platform restarts the run. With many ranks all save what they have, notice or not, and this
        returns when they have. Where they had saved before, that caused the error (the others have exited,
        and closed their connections): the run was preempted, and did not fail. A sys.exit() after a notice is
        a stop, whatever its code."""
        strategy = self._strategy
        if strategy.served():
            return self._answer.preempted()
        # Checked first: when a rank has failed, torchrun sends the others what looks like a notice.
        notified = self.context.latch.raised
        strategy.failed(error)
        if notified:
            return self._failed_after_notice(error)
        strategy.failed_without_notice(error)
        return None

    def _failed_after_notice(self, error: BaseException) -> errors.Preempted | None:
        outcome, reason = self.context.outcome, self._answer.notice.reason
        by_exit = isinstance(error, SystemExit)
        if outcome.saved:
            if by_exit:
                log.info(
                    "The script called sys.exit() after %s: the run stops, and its state is saved", reason
                )
            else:
                log.error(
                    "Training raised an error before it could stop for the notice. Its state is saved. The "
                    "error was:",
                    exc_info=error,
                )
            return self._answer.preempted()
        what = "The script called sys.exit()" if by_exit else "Training raised"
        log.error("%s before it could stop for the notice (%s), and nothing is saved", what, reason)
        if by_exit:
            outcome.decide(Outcome.NOT_SAVED)
            return self._answer.preempted()
        self._strategy.blame()
        return None

    def preempted(self) -> errors.Preempted:
        """The exception that leaves the block after a notice was answered."""
        return self._answer.preempted()

    @property
    def deadline(self) -> float:
        """Of the notice that has come."""
        return self._answer.deadline

    def _wind_up(self) -> None:
        """The process is about to be ended by force."""
        self.context.events.emit("stop", outcome=self.context.outcome.text, step=self.context.subject.step)
        self.context.events.close()
        self._report_outcome()
        self._departure.unsay()

    def _report_outcome(self) -> None:
        """The final report to the launcher. State that could not be saved is left for the guardian, where
        there is one."""
        outcome, subject, link = self.context.outcome, self.context.subject, self._inbox.link
        if self._guard is not None:
            # Without a launcher an exception leaves nothing behind: the shared memory might never be freed.
            left_alone = outcome.value in (Outcome.FAILED, Outcome.FINISHED) and not link.launched
            self._guard.close(keep=not (self._checkpointer.up_to_date or left_alone))
        text = outcome.text
        if self._upload_duty is not None:
            self._upload_duty.settle()
        link.tell(step=subject.step, outcome=text)

    def stop(self) -> None:
        """End the threads and release the directory. Safe to call from the training thread only."""
        context, started = self.context, self._started
        if context.outcome.saved and context.latch.raised:  # a mirror that hangs must not outlast the grace
            exits.hurry_out(self._answer.exit_code, self._answer.deadline)
        self._periodic.wait()
        context.events.emit("stop", outcome=context.outcome.text, step=context.subject.step)
        # first: while this thread waits for the mirror, the agent must not take it for one that is stuck
        self._phases.close()
        self._report_outcome()
        self._stopping.set()
        if started.together is not None:
            started.together.ranks.close()
            started.together.save.close()
            if context.outcome.value is Outcome.FINISHED and context.world.rank == 0:
                # all have read the last decision: no rank is left to obey it
                joint_start.sweep(context.catalog)
        self._agent.join()
        self._event_writer.join(2.0)
        for reporter in self._reporters:
            reporter.close()
        self._warmup.wait()
        started.engine.close()
        context.catalog.close()
        self._departure.unsay()  # last: a process that waits for this one finds the lock free, too


def _reporters(context: RunContext) -> list[MetricsPage | StatusPush]:
    """The reporters of progress: the page and the push to Kubeflow."""
    jit = context.jit
    server = settings.status_server() if jit.progress_push else None
    if jit.progress_port is None and server is None:
        return []
    reporters: list[MetricsPage | StatusPush] = []
    if jit.progress_port is not None:
        reporters.append(MetricsPage(jit.progress_port, context.report))
    if server is not None:
        reporters.append(StatusPush(server, context.report))
    return reporters
