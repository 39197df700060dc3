"""How one process answers a notice: at its next boundary, or by a rescue of the last completed step."""

from __future__ import annotations

import logging

from lastcall import errors
from lastcall.core import timing
from lastcall.core.checkpointer import Checkpointer
from lastcall.core.context import RunContext
from lastcall.core.notice import ending
from lastcall.core.notice.answer import Answer
from lastcall.core.notice.periodic import PeriodicSaver
from lastcall.core.notice.phases import Phase
from lastcall.core.notice.responder import Where
from lastcall.core.save.saver import Saver
from lastcall.types import Kind, Notice, Outcome

log = logging.getLogger("lastcall")
_PATIENCE = 1.0  # seconds to wait for a boundary at least
_STEPS = 3.0  # ... and in usual steps


class OneProcess:
    """A `Strategy`, and what the training thread does at a boundary, at an error and at the end."""

    def __init__(
        self,
        context: RunContext,
        answer: Answer,
        checkpointer: Checkpointer,
        periodic: PeriodicSaver,
        saver: Saver,
    ) -> None:
        self._context = context
        self._answer = answer
        self._phases = answer.phases
        self._checkpointer = checkpointer
        self._periodic = periodic
        self._saver = saver
        self._first = context.subject.step  # the first step of this incarnation

    # ---- the agent's side ----------------------------------------------------------------------------------

    def needs(self, deadline: float) -> float:
        return self._checkpointer.seconds_until_safe(deadline)

    def announce(self, notice: Notice) -> None:
        """There are no other ranks."""

    def hurried(self, notice: Notice) -> bool:
        return False

    def hold(self) -> None:
        self._context.subject.stop_at_next_boundary()
        self._context.gate.on_hold = self._answer.leave_if_saved

    def decide(self) -> Where:
        return Where()

    def boundary_until(self) -> float:
        """Wait as long as a few usual steps take, but never longer than the save can afford."""
        context, deadline = self._context, self._answer.deadline
        latest = deadline - self._checkpointer.seconds_until_safe(deadline) - timing.MARGIN
        usual = context.subject.step_seconds
        if self._checkpointer.covers_now:
            usual = 0.0  # there is nothing to wait for
        elif self._unrescuable():
            usual = None  # only a boundary can save this
        if usual is None:  # the first step (compilation, data) takes as long as it takes
            return latest
        return min(latest, context.clock.now() + max(_PATIENCE, _STEPS * usual))

    def hopeless(self, saving: bool) -> str:
        return ""

    def aside(self, because: str) -> None:
        """Rescue the last completed step, with the gate shut."""
        context = self._context
        if why_not := self._unrescuable():
            log.warning(
                "No boundary in time, and a rescue is not possible: %s. Waiting for the boundary "
                "until the deadline",
                why_not,
            )
            self._phases.try_enter(Phase.BOUNDARY, why_not, only_from={Phase.INSTANT})
            return
        log.warning("No boundary in time: rescuing the last completed step from a side thread")
        latest = self._answer.deadline - self._checkpointer.seconds()
        if not context.gate.close(context.clock, max(latest, context.clock.now() + 0.2)):
            log.warning(
                "The current optimizer step does not finish: waiting for the boundary until the deadline"
            )
            self._phases.try_enter(
                Phase.BOUNDARY, "the optimizer step does not end", only_from={Phase.INSTANT}
            )
            return
        try:
            self._periodic.make_way(self._answer.deadline)
            with self._checkpointer.lock:
                if self._phases.try_enter(Phase.SAVING_ASIDE, because):
                    self._rescue()
        finally:
            context.gate.open()

    def continues(self) -> bool:
        return False

    def stuck(self) -> None:
        """The platform will end this process at the deadline; a boundary that comes before that still
        saves."""

    def fault(self) -> None:
        """The next boundary will try to save."""
        for phase in (Phase.HOLDING, Phase.BOUNDARY):
            self._phases.try_enter(phase, "an internal error in lastcall")
        self._context.subject.stop_at_next_boundary()

    def _unrescuable(self) -> str:
        if self._checkpointer.covers_now:
            return ""  # nothing needs to be written: there is a checkpoint of this very state
        return self._context.subject.unrescuable() if self._context.jit.rescue else "rescue is switched off"

    def _rescue(self) -> None:
        """Save the last completed step. The phase is SAVING or SAVING_ASIDE; at its end it is COMMITTED, or
        what it was before."""
        context, answer = self._context, self._answer
        began = context.clock.now()
        if self._checkpointer.covers_now:
            answer.saved(f"step {context.subject.step} is already committed")
            return
        try:
            entry = self._checkpointer.save(
                context.subject.rescue(), Kind.RESCUE, answer.notice.reason, answer.deadline
            )
        except Exception as error:  # of any kind: the boundary may still come
            log.error("The rescue failed: %s", error)
            answer.not_saved(Kind.RESCUE.value, str(error))
            self._phases.try_enter(Phase.BOUNDARY, str(error), only_from={Phase.SAVING_ASIDE})
            return
        log.info("JIT checkpoint completed in %.1fs", context.clock.now() - began)
        if entry.record.whole:
            how = "exact" if entry.record.exact else f"not exact: {entry.record.because}"
            answer.saved(f"rescued step {entry.record.step} into {entry.path.name}, {how}")
        else:
            log.warning("Rescued into %s, not exact: %s", entry.path.name, entry.record.because)
            answer.saved_in_part(f"rescued into {entry.path.name}, not exact: {entry.record.because}")

    # ---- the training thread's side ------------------------------------------------------------------------

    def at_boundary(self) -> None:
        """Save at this boundary, unless a rescue has answered already, and leave."""
        self._answer.arrived = True
        while not self._take_over():
            if self._phases.closed:
                return
        self._periodic.make_way(self._answer.deadline)
        with self._checkpointer.lock:
            if self._phases.phase is Phase.SAVING:
                self._save_here()
        self._answer.leave()

    def _take_over(self) -> bool:
        """True once this thread saves, or has nothing left to save."""
        phase = self._phases.wait_while({Phase.HOLDING, Phase.SAVING_ASIDE}, timing.LOOK)
        if phase in (Phase.FAILED, Phase.LEAVING) or self._answer.whole:
            return True
        if phase is Phase.SAVING:  # by this very thread, whose save raised an unexpected error
            return True
        # Not from a phase that came since: a whole checkpoint may be committed in this moment.
        return self._phases.try_enter(Phase.SAVING, only_from={phase})

    def _save_here(self) -> None:
        context, answer = self._context, self._answer
        began = context.clock.now()
        if self._checkpointer.up_to_date:
            answer.saved(f"step {context.subject.step} is already committed")
            return
        try:
            capture = context.subject.capture()
            deadline: float | None = answer.deadline
            if answer.left <= 0:
                log.warning("The deadline has passed, but this process is still alive: saving anyway")
                deadline = None
            plan = context.budget.plan(capture.nbytes, deadline)
            log.info("Saving step %d: %s, %s", capture.step, plan.kind, plan.because)
            entry = self._checkpointer.save(capture, Kind.JIT, answer.notice.reason, deadline)
        except (errors.LastcallError, OSError) as error:
            # StateError: something unsavable was put into the state since protect()
            log.error("JIT checkpoint failed: %s", error)
            answer.not_saved(Kind.JIT.value, str(error))
            context.outcome.decide(Outcome.SAVED if answer.committed else Outcome.NOT_SAVED)
            self._phases.enter(Phase.FAILED, str(error))
            return
        log.info("JIT checkpoint completed in %.1fs", context.clock.now() - began)
        if entry.record.missing:
            log.warning("%s is partial: %s", entry.path.name, entry.record.because)
        answer.saved(f"saved {entry.path.name} ({'exact' if entry.record.exact else 'not exact'})")

    def step_without_optimizer(self) -> None:
        """A pass in which no optimizer stepped: with one process that needs no answer."""

    # ---- errors and the end --------------------------------------------------------------------------------

    def served(self) -> bool:
        return False

    def failed(self, error: BaseException) -> None:
        """Training has raised here and takes no further step. A notice that has come is answered with the
        last completed one."""
        context, answer = self._context, self._answer
        if not context.latch.raised or context.outcome.decided:
            return
        answer.arrived = True
        while not answer.committed and not self._take_over() and not self._phases.closed:
            continue
        self._periodic.make_way(answer.deadline)
        with self._checkpointer.lock:
            if not answer.committed and (why_not := self._torn_by(error) or self._unrescuable()):
                log.error("The last completed step cannot be saved: %s", why_not)
            elif not answer.committed:
                self._rescue()
            if answer.committed:
                context.outcome.decide(Outcome.SAVED)
            else:
                self._phases.try_enter(Phase.FAILED, "training raised, and its last step cannot be saved")

    def blame(self) -> None:
        """Training raised after a notice and nothing is saved: whether the script itself caused the error."""

    def failed_without_notice(self, error: BaseException) -> None:
        """The last completed step is whole, whatever raised after it. If it is not saved, the log says so."""
        subject = self._context.subject
        if self._context.gate.begun == 0 and subject.step == self._first:
            return  # it has not trained since it started
        why_not = self._save_before(error)
        newest = self._saver.last
        named = ending.named(error)
        if not why_not and newest is not None:
            how = "exact" if newest.record.exact else f"not exact: {newest.record.because}"
            log.warning(
                "%s left the block at step %d; %s is saved (%s)", named, subject.step, newest.path.name, how
            )
        elif why_not and subject.step > 0:
            kept = (
                "there is no checkpoint" if newest is None else f"the newest checkpoint is {newest.path.name}"
            )
            log.warning(
                "%s left the block at step %d, which is not saved: %s; %s", named, subject.step, why_not, kept
            )

    def _save_before(self, error: BaseException) -> str:
        """Save the last completed step. Returns why that was impossible; empty if it is saved."""
        context = self._context
        if context.jit.on_error != "save":
            return "LASTCALL_ON_ERROR is 'leave'"
        self._periodic.wait()
        with self._checkpointer.lock:
            if self._checkpointer.covers_now:
                return ""
            if why_not := self._torn_by(error) or self._unrescuable():
                return why_not
            log.info("Saving step %d before %s leaves the block", context.subject.step, ending.named(error))
            try:
                self._checkpointer.save(context.subject.rescue(), Kind.RESCUE, ending.described(error))
            except Exception as failure:  # the original error is the one to raise
                self._answer.not_saved(Kind.RESCUE.value, str(failure))
                return str(failure)
        return ""

    def _torn_by(self, error: BaseException) -> str:
        """Why the state is not whole; empty if it is."""
        return f"{type(error).__name__} came inside optimizer.step()" if self._context.gate.depth > 0 else ""

    def finish(self, reason: str, *, save: bool, had_finished: bool) -> None:
        """Training is over and the state is at a boundary: keep it, so that a restart after the end does
        nothing."""
        context, checkpointer = self._context, self._checkpointer
        context.outcome.decide(Outcome.FINISHED)
        self._periodic.wait()
        with checkpointer.lock:
            if context.latch.raised:
                log.info("Training finished: the notice needs no answer")
            self._phases.close()
            # the run had finished before
            if not save or (checkpointer.up_to_date and checkpointer.resumed_only):
                return
            try:
                capture = context.subject.capture()
                if (
                    checkpointer.up_to_date
                    and checkpointer.same_document(capture)
                    and reason == ending.FINISHED
                ):
                    return
                entry = checkpointer.save(capture, Kind.FINAL, reason)
            except (errors.SaveError, OSError) as error:
                raise ending.not_saved(context, error) from error
            ending.say(context, reason, entry)
