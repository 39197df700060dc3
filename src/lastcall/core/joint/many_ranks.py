"""How many ranks answer a notice: the same waits and saves as in one process, but of all of them at one step.

    boundary   after the kill wait every rank is held at its next boundary, reports its position, and all
               follow one decision: the first
               boundary that no rank has passed. A rank that is not there yet trains on to it
    instant    if that boundary will not come in time, or a rank cannot reach it any more: every rank shuts
               its gate and reports how
               many optimizer steps it has completed. The ranks behind finish theirs; then all save from the
               side thread
    survivors  the same, with ranks missing: those that hold the newest whole state save it, also for the
               missing

Every rank's agent stays until the save is over: another rank may find, at any time, that the boundary does
not come.
"""

from __future__ import annotations

import contextlib
import logging
import math
import threading
from collections.abc import Callable, Iterator

from lastcall import errors, messages
from lastcall.core import timing
from lastcall.core.checkpoint.record import Entry
from lastcall.core.checkpointer import Checkpointer
from lastcall.core.context import RunContext
from lastcall.core.joint.save import Interrupted, JointSave, Order
from lastcall.core.notice import ending
from lastcall.core.notice.answer import Answer
from lastcall.core.notice.inbox import Inbox
from lastcall.core.notice.one_process import OneProcess
from lastcall.core.notice.periodic import PeriodicSaver
from lastcall.core.notice.phases import Phase
from lastcall.core.notice.responder import Where
from lastcall.core.ranks import election
from lastcall.core.ranks.election import Decision, Position
from lastcall.core.ranks.heartbeat import HANG, LOST
from lastcall.core.ranks.peers import Ranks
from lastcall.core.save.saver import Saver
from lastcall.types import Capture, Kind, Notice, Outcome

log = logging.getLogger("lastcall")
_SHARE = 0.25  # of the time that is left: how long to wait for the positions of the others
_SETTLE = 2.0  # seconds for what follows the optimizer step, until its boundary
_ASIDE = (Phase.INSTANT, Phase.SAVING_ASIDE)


class ManyRanks(OneProcess):
    """`on_saved_by_others`: a checkpoint was committed that this rank has no part in."""

    def __init__(
        self,
        context: RunContext,
        answer: Answer,
        checkpointer: Checkpointer,
        periodic: PeriodicSaver,
        saver: Saver,
        inbox: Inbox,
        ranks: Ranks,
        joint_save: JointSave,
        on_saved_by_others: Callable[[Entry], None] = lambda entry: None,
    ) -> None:
        super().__init__(context, answer, checkpointer, periodic, saver)
        self._inbox = inbox
        self._ranks = ranks
        self._joint_save = joint_save
        self._on_saved_by_others = on_saved_by_others
        self.decision: Decision | None = None
        self.finished = False  # training has reached its end on this rank
        self._torn = ""  # why the state of this rank is torn: an optimizer step was cut short
        self._stopped = False  # training has failed here: no further step is taken
        self._agent_is_out = False  # it has failed: what the training thread cannot save, nobody does
        self._parked = threading.Event()  # the training thread waits at a boundary

    def how_far(self) -> tuple[int, str]:
        """For the heartbeat: the last boundary, and why no further one may come."""
        ordinal = self._context.subject.ordinal
        if self.finished:
            return ordinal, "finished"
        return ordinal, "" if self._phases.phase is Phase.QUIET else "answering a notice"

    # ---- the agent's side ----------------------------------------------------------------------------------

    def announce(self, notice: Notice) -> None:
        self._ranks.announce(notice, failed=self._stopped)

    def hurried(self, notice: Notice) -> bool:
        return notice.source in (LOST, HANG)

    def decide(self) -> Where:
        """One decision for all: the first boundary that no rank has passed."""
        if self._stopped:
            return Where(boundary=False, because="training has failed here")
        ranks = self._ranks

        def choose(positions: dict[int, Position]) -> Decision:
            return election.boundary(positions, ranks.size, ranks.holdings())

        decision = ranks.agreement.agree("boundary", self._position(), choose, self._until(), ranks.unable)
        self._heed(decision)
        kind, because = decision.kind, decision.because
        return Where(boundary=kind == "boundary", dismissed=kind == "finish", because=because)

    def hopeless(self, saving: bool) -> str:
        """While this rank saves it waits for all others, and the save itself finds out if one is lost; one
        that is gone may also have exited in order, after the commit."""
        if (not saving and self._ranks.unable()) or self._given_up_by_another():
            return "another rank cannot come to the boundary"
        return ""

    def _given_up_by_another(self) -> bool:
        return self._ranks.hear(f"instant/{self._ranks.agreement.number}", 0.0) is not None

    def _until(self) -> float:
        """How long to wait for the positions of the others."""
        return self._context.clock.now() + max(timing.RANKS, _SHARE * self._answer.left)

    def _latest(self) -> float:
        """When a save must begin; never in the past."""
        clock = self._context.clock
        return max(clock.now() + 0.2, self._answer.deadline - self._checkpointer.seconds() - timing.MARGIN)

    def _position(self, *, clean: bool = True, because: str = "") -> Position:
        subject, gate = self._context.subject, self._context.gate
        same = not self.finished and subject.untouched()  # a checkpoint of this boundary holds all there is
        parked = self._parked.is_set()  # read first: a thread leaves a boundary before it counts the next
        unsettled = "" if subject.settled else "what follows its optimizer step has not been done"
        return Position(
            self._ranks.rank,
            subject.ordinal,
            parked=parked or self.finished,
            finished=self.finished,
            entered=gate.steps,
            clean=clean and not self._torn,
            barred=not clean and not self._torn,
            exact=subject.settled,
            because=self._torn or because or unsettled,
            stopped=self._stopped,
            kept=same and self._checkpointer.keeps_boundary,
            keeping=same and self._periodic.writing == subject.boundary,
            epochs=subject.boundary[1],
        )

    def _heed(self, decision: Decision) -> None:
        log.info("Agreement: %s, %s", decision.described(), decision.because)
        self._context.events.emit(
            "agreement", what=decision.kind, step=decision.shown, because=decision.because
        )
        self.decision = decision

    # ---- from the side -------------------------------------------------------------------------------------

    def aside(self, because: str) -> None:
        context, ranks = self._context, self._ranks
        if self.decision is not None and self.decision.kind == "boundary":
            log.warning("%s: the ranks agree on the last completed step", because[:1].upper() + because[1:])
        if self._found_committed():
            return
        ranks.tell(f"instant/{ranks.agreement.number}", {})
        shut = context.gate.close(context.clock, context.clock.now() + self._patience_for_a_step())
        try:
            why_not = self._unrescuable() if shut else "the optimizer step in progress does not end"
            self._settle()
            decision = self._agree_instantly(why_not)
            if decision.kind in ("instant", "survivors"):
                self._take_part(decision)
            elif decision.kind == "finish":
                self._phases.try_enter(Phase.DISMISSED, decision.because)
            else:
                self._give_up(decision.because)
        finally:
            if shut:
                context.gate.open()

    def _found_committed(self) -> bool:
        """Whether the others have committed this very boundary, or the end of the run, and exited: the last
        rank cannot save anything better."""
        if self.finished and self._joint_save.find(self._final_name()) is not None:
            self.decision = Decision("finish", because="the final checkpoint is committed")
            self._phases.enter(Phase.DISMISSED, self.decision.because)
            return True
        if self.decision is None or self.decision.kind != "boundary":
            return False
        entry = self._joint_save.find(self._order(self.decision, Kind.JIT, None).name)
        if entry is not None:
            self._answer.saved(f"saved {entry.path.name} together")
        return entry is not None

    def _patience_for_a_step(self) -> float:
        if self._torn or self._stopped:
            return 0.0
        left = self._answer.left - self._checkpointer.seconds() - timing.MARGIN
        return max(0.2, min(left, timing.RANKS))

    def _agree_instantly(self, because: str) -> Decision:
        ranks = self._ranks

        def choose(positions: dict[int, Position]) -> Decision:
            return election.instant(positions, ranks.size, ranks.holdings())

        position = self._position(clean=not because, because=because)
        decision = ranks.agreement.agree("instant", position, choose, self._until(), ranks.silent)
        self._heed(decision)
        return decision

    def _take_part(self, decision: Decision) -> None:
        rank, gate = self._ranks.rank, self._context.gate
        if decision.kept and self._was_kept():
            return
        # finished elsewhere: its own state only
        helping = decision.kind == "instant" and rank in decision.missing
        if rank not in decision.writers and not helping:
            log.warning(
                "This rank's state is incomplete; %s will write the checkpoint",
                messages.named(decision.writers),
            )
            self._await_the_writers(decision)
            return
        if decision.kind == "instant" and gate.steps < decision.entered:
            log.info("One step behind: finishing optimizer step %d before saving", decision.entered)
            gate.let(decision.entered)
        kind = Kind.SURVIVORS if decision.kind == "survivors" else Kind.RESCUE
        if self._settled(decision):
            self._save_aside(decision, kind)
            return
        # What this rank holds belongs to another step.
        because = f"rank {rank} did not reach optimizer step {decision.entered} in time"
        self._joint_save.refuse(self._order(decision, kind, self._answer.deadline), because)
        self._give_up(because)

    def _was_kept(self) -> bool:
        """Whether the checkpoint that was begun before is there in time. All ranks find the same: it is one
        commit."""
        clock, subject = self._context.clock, self._context.subject
        until = self._latest()
        while self._periodic.writing == subject.boundary and clock.now() < until:
            clock.sleep(0.005)
        if not self._checkpointer.up_to_date:
            self._periodic.give_up()
            return False
        self._answer.saved(f"step {subject.step} is already committed")
        return True

    def _settled(self, decision: Decision) -> bool:
        """Whether the agreed steps are done, and also what follows them in their pass, as far as there is
        time to wait for it."""
        clock, gate = self._context.clock, self._context.gate
        until = self._latest()
        while gate.steps < decision.entered and not self._stopped:
            if clock.now() >= until:
                return False
            clock.sleep(0.005)
        self._settle()
        return True

    def _settle(self) -> None:
        """Let the training thread get from its optimizer step to the boundary, if it is on its way."""
        clock, subject = self._context.clock, self._context.subject
        latest = self._answer.deadline - self._checkpointer.seconds() - timing.MARGIN
        until = min(clock.now() + _SETTLE, latest)
        while not subject.settled and not self._stopped and clock.now() < until:
            clock.sleep(0.005)

    def _save_aside(self, decision: Decision, kind: Kind) -> None:
        context, answer = self._context, self._answer
        began = context.clock.now()
        # Refused where the boundary was committed after all, of which the other ranks may not know: they wait
        # for this one's part.
        self._phases.try_enter(Phase.SAVING_ASIDE, decision.because)
        try:
            capture = context.subject.rescue()
            entry = self._save_together(capture, self._order(decision, kind, answer.deadline))
        except Exception as error:  # of any kind: no caller could do better
            log.error("The ranks could not save: %s", error)
            answer.not_saved(kind.value, str(error))
            self._give_up(str(error))
            return
        log.info("JIT checkpoint completed in %.1fs", context.clock.now() - began)
        how = "exact" if entry.record.exact else f"not exact: {entry.record.because}"
        answer.saved(f"saved {entry.path.name} together, {how}")

    def _save_together(self, capture: Capture, order: Order) -> Entry:
        """Take part in the agreed save."""
        portion = self._joint_save.portion(capture, order.writers)
        return self._checkpointer.save_agreed(
            capture, order.kind, lambda: self._joint_save.save(portion, order)
        )

    def _await_the_writers(self, decision: Decision) -> None:
        """This rank has nothing to write; whether it may exit as saved depends on the others."""
        order = self._order(decision, Kind.SURVIVORS, self._answer.deadline)
        try:
            entry = self._joint_save.outcome(order)
        except errors.SaveError as error:
            self._give_up(str(error))
            return
        self._on_saved_by_others(entry)
        self._answer.saved(f"{messages.named(decision.writers)} saved {entry.path.name}")

    def _give_up(self, because: str) -> None:
        log.error("Nothing is saved: %s. The last committed checkpoint stays the newest", because)
        self._answer.not_saved("together", because)
        if not self._answer.committed:
            self._context.outcome.decide_if_open(Outcome.NOT_SAVED)
        self._phases.try_enter(Phase.FAILED, because, only_from=set(Phase) - {Phase.SAVING})

    def _order(self, decision: Decision, kind: Kind, deadline: float | None) -> Order:
        alive = decision.kind != "survivors"
        return Order(
            name=f"{kind.value}-{decision.step}-{decision.token}",
            kind=kind,
            reason=self._answer.notice.reason,
            writers=decision.writers,
            helpers=decision.missing if alive else (),
            missing=() if alive else decision.missing,
            deadline=deadline,
            abandoned=self._boundary_given_up if kind is Kind.JIT else lambda: False,
        )

    def _boundary_given_up(self) -> bool:
        """Whether the agents save from the side, and no thread waits for the boundary any more."""
        return self._phases.phase in _ASIDE

    # ---- afterwards ----------------------------------------------------------------------------------------

    def continues(self) -> bool:
        """A hang was answered by a save; a rank that hung may come back, and training continues as if nothing
        had happened."""
        if self._stopped:
            return False
        log.warning("Training continues, if it can: on_hang is 'save'")
        self.decision = None
        if self._context.outcome.decided:
            self._context.outcome.reopen()
        self._ranks.next_round()
        # First the phase: the training thread, which waits at its boundary, must not take the resets below
        # for a reason to leave.
        if not self._phases.try_enter(Phase.QUIET):
            return False
        self._answer.reset()
        self._inbox.forget_rank_loss()
        return True

    def stuck(self) -> None:
        """The training thread may wait for a rank that never comes. Without it the others would wait, too,
        and so would the launcher that restarts the run."""
        outcome = self._context.outcome
        if self._phases.try_enter(Phase.LEAVING, only_from={Phase.FAILED}):
            if outcome.value is not Outcome.FAILED:  # training has raised, and does not come out of its block
                outcome.decide(Outcome.NOT_SAVED)
            self._answer.leave_by_force(
                "The training thread does not return, and nothing is saved", by_signal=False
            )

    def fault(self) -> None:
        """The agent is out: nobody else would let go of a training thread that waits for a decision."""
        self._agent_is_out = True
        self._answer.passing = False  # nobody says any more that training may continue
        self._give_up("an internal error in lastcall")
        self._context.subject.stop_at_next_boundary()

    # ---- the training thread's side ------------------------------------------------------------------------

    def at_boundary(self) -> None:
        """Wait for the decision; save here if this is the step, train on to it if it is not."""
        gate, subject = self._context.gate, self._context.subject
        while self._phases.open and not self._phases.closed:
            phase = self._parked_until_decided()
            if phase is Phase.BOUNDARY:
                decision = self.decision
                if decision is not None and not self.finished and subject.ordinal < decision.step:
                    return
                if decision is not None and self._phases.try_enter(Phase.SAVING, only_from={Phase.BOUNDARY}):
                    self._answer.arrived = True
                    self._save_at(decision)
                continue
            if phase in _ASIDE and gate.steps < gate.allowed:
                self._answer.arrived = False
                return  # this rank is behind, and finishes the step that others have completed
            self._answer.arrived = True
            if phase in (Phase.COMMITTED, Phase.FAILED, Phase.LEAVING) and not self._answer.passing:
                self._answer.leave()
            self._phases.wait_while({phase}, timing.TICK)

    def _parked_until_decided(self) -> Phase:
        self._parked.set()
        try:
            while (
                phase := self._phases.wait_while({Phase.HOLDING}, timing.TICK)
            ) is Phase.HOLDING and not self._phases.closed:
                continue
        finally:
            self._parked.clear()
        return phase

    def _save_at(self, decision: Decision) -> None:
        context, answer = self._context, self._answer
        began = context.clock.now()
        self._periodic.make_way(answer.deadline)
        try:
            with self._alone_at_it():
                if self._checkpointer.up_to_date and not self.finished:
                    answer.saved(f"step {context.subject.step} is already committed")
                    return
                capture = context.subject.capture()
                deadline = max(answer.deadline, context.clock.now() + timing.RANKS)
                plan = context.budget.plan(capture.nbytes, answer.deadline)
                log.info("Saving step %d: %s, %s", capture.step, plan.kind, plan.because)
                entry = self._save_together(capture, self._order(decision, Kind.JIT, deadline))
            log.info("JIT checkpoint completed in %.1fs", context.clock.now() - began)
            answer.saved(f"saved {entry.path.name} together")
        except Exception as error:  # of any kind: the other ranks wait for this one
            ours = isinstance(error, errors.LastcallError | OSError)
            log.error("The save at the agreed boundary failed: %s", error, exc_info=not ours)
            answer.not_saved(Kind.JIT.value, str(error))
            # This thread stands at its boundary until the agents have saved, or have not.
            because = f"the save at the agreed boundary failed ({error})"
            self._phases.try_enter(Phase.INSTANT, because, only_from={Phase.SAVING})
            if self._agent_is_out:
                self._give_up(because)

    @contextlib.contextmanager
    def _alone_at_it(self) -> Iterator[None]:
        """The checkpointer's lock, within a time limit: a periodic save may wait for a rank that will not
        take part in it any more."""
        left = max(timing.RANKS, self.boundary_until() - self._context.clock.now())
        if not self._checkpointer.lock.acquire(timeout=left):
            self._periodic.give_up()
            raise errors.DeadlineError("an earlier save does not end")
        try:
            yield
        finally:
            self._checkpointer.lock.release()

    def step_without_optimizer(self) -> None:
        """A pass in which no optimizer stepped: its step may have failed because a rank is gone, and the
        user's code may have caught that error. It is not a step; the remaining ranks save and exit."""
        gone = self._ranks.unable()
        if not gone:
            return
        self._context.subject.copy_every_boundary()
        self._rank_lost(f"{messages.named(gone)} {'is' if len(gone) == 1 else 'are'} gone")
        while not self._phases.open and not self._phases.closed:
            self._context.clock.sleep(timing.TICK / 10)
        self.at_boundary()

    # ---- errors and the end --------------------------------------------------------------------------------

    def served(self) -> bool:
        """Whether the ranks have saved, or are about to: an error that is raised now comes from their
        exit."""
        saving = (Phase.SAVING, *_ASIDE)
        if self._phases.phase in saving and not self._stopped:
            until = max(0.0, self._answer.left) + timing.RANKS
            self._phases.wait_while(saving, until)
        return self._answer.whole and not self._stopped

    def failed(self, error: BaseException) -> None:
        """Training has raised here. The others cannot continue without this rank: all save the last completed
        step. Returns when that is done."""
        self._stopped = True
        self._torn = self._torn_by(error)
        why = f"rank {self._ranks.rank} failed: {type(error).__name__}: {error}"[:300]
        if gone := self._ranks.gone():  # the error here is a consequence
            why = f"{messages.named(gone)} {'is' if len(gone) == 1 else 'are'} gone"
        self._ranks.fail(why)
        if self._answer.whole or self._phases.concluded:
            return
        self._rank_lost(why)
        clock = self._context.clock
        until = clock.now() + self._context.jit.grace + 2 * timing.RANKS
        while not (self._phases.concluded or self._phases.closed) and (left := until - clock.now()) > 0:
            self._phases.wait_while({self._phases.phase}, left)

    def failed_without_notice(self, error: BaseException) -> None:
        self.blame()

    def blame(self) -> None:
        if self._at_fault:
            # whatever was saved: this is an error, not a preemption
            self._context.outcome.decide(Outcome.FAILED)

    @property
    def _at_fault(self) -> bool:
        """Whether training failed here on its own, with all other ranks alive: started again, it may fail
        again."""
        return (
            self._stopped and self.decision is not None and set(self.decision.missing) <= {self._ranks.rank}
        )

    def _rank_lost(self, why: str) -> None:
        """Have the agent answer it."""
        now = self._context.clock.now()
        self._inbox.lose_rank(Notice(LOST, why, now, now + self._context.jit.grace))

    def finish(self, reason: str, *, save: bool, had_finished: bool) -> None:
        """No rank leaves before all have finished; until then a notice still reaches all of them."""
        outcome, checkpointer = self._context.outcome, self._checkpointer
        self._periodic.wait()
        same = checkpointer.up_to_date and checkpointer.resumed_only
        if same and had_finished and not self._phases.open:
            outcome.decide(Outcome.FINISHED)  # before, and on all ranks
            return
        try:
            if save:
                self._finish_together(reason)
        except (errors.SaveError, OSError) as error:
            self._phases.close()
            raise ending.not_saved(self._context, error) from error
        outcome.decide(Outcome.FINISHED)
        self._ranks.finished()
        self._phases.close()

    def _finish_together(self, reason: str) -> None:
        """A last checkpoint of all, unless a notice comes before the last rank has ended."""
        context, began = self._context, self._context.clock.now()
        self.finished = True
        order = self._final(reason)
        capture = context.subject.capture()
        part = None
        while True:
            if self._phases.open:
                self.at_boundary()
            part = part or self._joint_save.contribute(self._joint_save.portion(capture), order)
            try:
                entry = self._joint_save.complete(capture, part, order)
            except Interrupted:
                continue
            except errors.SaveError as error:
                if not self._without_the_lost(str(error)):
                    raise
                continue
            self._checkpointer.now_committed(
                entry, capture, context.subject.boundary, context.clock.now() - began
            )
            ending.say(context, reason, entry)
            return

    def _final_name(self) -> str:
        return f"final-{self._ranks.token[:8]}"

    def _final(self, reason: str) -> Order:
        writers = tuple(range(self._ranks.size))
        paused = lambda: self._phases.open  # noqa: E731
        return Order(self._final_name(), Kind.FINAL, reason, writers, patience=math.inf, paused=paused)

    def _without_the_lost(self, why: str) -> bool:
        """The last save failed. If a rank was lost, the others save without it, as they would have in the
        middle of the run."""
        clock = self._context.clock
        if not self._ranks.unable() or self._phases.closed:
            return False
        self._context.subject.copy_every_boundary()
        self._rank_lost(why)
        until = clock.now() + timing.RANKS
        while not self._phases.open and clock.now() < until:
            clock.sleep(timing.TICK / 10)
        return self._phases.open
