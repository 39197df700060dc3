"""The way of a notice where many ranks must agree: the same wait, boundary and rescue as in `serving`, but of all of them at one step.

    boundary   after the kill wait every rank is held at its next boundary, says where it is, and all obey one decision: the first
               boundary that nobody has passed. Whoever is not there yet goes on to it
    instant    if that boundary will not come in time, or a rank cannot come to it any more: every rank shuts its gate and says how many
               optimizer steps it has completed. The ranks behind are let through; then all save from the side thread
    survivors  the same, with ranks missing: those that hold the newest whole state save it, and speak for the missing

Every rank's agent stays until the save is over: another rank may find, at any time, that the boundary does not come.
"""

from __future__ import annotations

import logging
import math
import threading
from typing import TYPE_CHECKING

from lastcall import errors, messages
from lastcall.core.checkpoint.catalog import Entry
from lastcall.core.joint.peers import Ranks
from lastcall.core.joint.save import Gathering, Order
from lastcall.core.notice.responder import Serving
from lastcall.core.process import exits
from lastcall.core.ranks import election
from lastcall.core.ranks.election import Decision, Position
from lastcall.core.ranks.heartbeat import HANG, LOST
from lastcall.types import Kind, Notice, Outcome

if TYPE_CHECKING:
    from lastcall.core.session import Session

log = logging.getLogger("lastcall")
PATIENCE = 5.0  # seconds for the slowest rank's agent to say where it is, at least
_SHARE = 0.25  # ... or this part of the time that is left
_SETTLE = 2.0  # seconds for what follows the optimizer step, until its boundary
TICK = 0.1
_MARGIN = 0.5


class Agents(Serving):
    """What the agents of the ranks do. `Joint` adds what their training threads do."""

    def __init__(self, session: Session, ranks: Ranks) -> None:
        super().__init__(session)
        self._ranks = ranks
        self._current: Notice | None = None  # what is being served: a notice, or the loss of a rank
        self.decision: Decision | None = None
        self._passing = False  # a hang: training goes on after the save, and nobody leaves
        self.finished = False  # training has reached its end on this rank
        self.torn = ""  # why the state of this rank is not whole: an optimizer step was cut short
        self.stopped = False  # training has failed here: no further step is taken
        self._parked = threading.Event()  # the training thread waits at a boundary
        self._decided = threading.Event()  # about the boundary
        self._saving = False  # the training thread saves at the agreed boundary
        self._broken = ""  # why the save at the agreed boundary came to nothing
        self._escalated = threading.Event()  # the boundary is given up: the agents decide and save
        self.concluded = threading.Event()  # whatever could be done has been done
        self._lock = threading.Lock()

    # ---- the agent's side ------------------------------------------------------------------------------------------------------

    def run(self) -> None:
        session, ranks = self._session, self._ranks
        self.begun = True
        notice = self._current = self._session.pressing or self.notice()
        at_once = notice.source in (LOST, HANG)
        self._passing = notice.source == HANG and session.jit.on_hang == "save"
        ranks.announce(notice, failed=self.stopped)
        if not at_once:
            self._wait_before(notice)
        self._decided.clear()  # it still stands for what was decided before a hang that was saved
        self.open = True
        session.subject.attend()
        session.gate.on_hold = self.leave_if_answered
        if at_once or self.stopped or not self._meet_at_a_boundary():
            self._from_the_side()
        self.concluded.set()
        if self._passing and not self.stopped and not self._closed.is_set():
            self._go_on()
        elif not self._closed.is_set() and self.decision is not None and self.decision.kind != "finish":
            self._stay_until_the_end()
            self._end_it(notice)

    def fault(self) -> None:
        """The agent is out: nobody else would let go of a training thread that waits for a decision."""
        self._give_up("a fault in lastcall")
        self._escalated.set()
        self._decided.set()
        self.concluded.set()
        super().fault()

    def notice(self) -> Notice:
        return self._current if self._current is not None else super().notice()

    def deadline(self) -> float:
        mine = super().deadline()
        later = self._session.latch.notice
        return mine if later is None or later.deadline is None else min(mine, later.deadline)

    def _until(self) -> float:
        """How long the others are waited for, to say where they are."""
        now = self._session.clock.now()
        return now + max(PATIENCE, _SHARE * (self.deadline() - now))

    def _position(self, *, clean: bool = True, because: str = "") -> Position:
        session = self._session
        subject, gate = session.subject, session.gate
        same = not self.finished and subject.untouched()  # a checkpoint of this boundary holds all there is
        parked = self._parked.is_set()  # looked at first: who leaves a boundary does so before it counts the next
        return Position(
            self._ranks.rank,
            subject.ordinal,
            parked=parked or self.finished,
            finished=self.finished,
            entered=gate.steps,
            clean=clean and not self.torn,
            barred=not clean and not self.torn,
            exact=subject.settled,
            because=self.torn or because or ("" if subject.settled else "what follows its optimizer step has not been done"),
            stopped=self.stopped,
            kept=same and session.committed == subject.boundary and self._gathering().at_hand,
            keeping=same and session.background.writing == subject.boundary,
            epochs=subject.boundary[1],
        )

    # ---- at a boundary ---------------------------------------------------------------------------------------------------------

    def _meet_at_a_boundary(self) -> bool:
        """True if the training thread has saved at the agreed boundary, or training is finished everywhere."""
        ranks = self._ranks

        def decide(positions: dict[int, Position]) -> Decision:
            return election.boundary(positions, ranks.size, ranks.holdings())

        decision = ranks.agreement.agree("boundary", self._position(), decide, self._until(), ranks.unable)
        self._heed(decision)
        self._decided.set()
        if decision.kind == "finish":
            self.open = False
            return True
        if decision.kind != "boundary":
            return False
        return self._wait_for_the_boundary()

    def _wait_for_the_boundary(self) -> bool:
        session = self._session
        rescue_at = self._rescue_at()
        while not self.concluded.is_set() and not self._closed.is_set():
            late = session.clock.now() >= rescue_at and not self._saving
            # Who saves at the boundary waits for all others, and finds out by itself if one is lost; one that is gone may also have
            # left well, after the commit.
            lost = not self._saving and bool(self._ranks.unable())
            if late or lost or self._broken or self._called():
                why = "no boundary in time" if late else self._broken or "another rank cannot come to the boundary"
                log.warning("%s: the ranks agree on the last completed step", why[:1].upper() + why[1:])
                return False
            self.concluded.wait(TICK)
            session.hear()
        return True

    def _heed(self, decision: Decision) -> None:
        log.info("Agreement: %s, %s", decision.described(), decision.because)
        self._session.events.emit("agreement", what=decision.kind, step=decision.shown, because=decision.because)
        self.decision = decision

    def _called(self) -> bool:
        """Whether another rank has given the boundary up."""
        return self._ranks.hear(f"instant/{self._ranks.agreement.number}", 0.0) is not None

    # ---- from the side ---------------------------------------------------------------------------------------------------------

    def _from_the_side(self) -> None:
        session, ranks = self._session, self._ranks
        with self._lock:
            if self.answered:
                return
            self._escalated.set()
        if self._found_committed():
            return
        ranks.tell(f"instant/{ranks.agreement.number}", {})
        self._decided.set()
        shut = session.gate.close(session.clock, session.clock.now() + self._patience_for_a_step())
        try:
            because = self._unrescuable() if shut else "the optimizer step in progress does not end"
            self._settle()
            decision = self._agree_instantly(because)
            if decision.kind in ("instant", "survivors"):
                self._take_part(decision)
            elif decision.kind != "finish":
                self._give_up(decision.because)
        finally:
            if shut:
                session.gate.open()

    def _found_committed(self) -> bool:
        """Whether the others have committed this very boundary, or the end of the run, and left: nothing better can come of a rank
        that is left over."""
        if self.finished and self._find(self._final_name()) is not None:
            self.decision = Decision("finish", because="the final checkpoint is committed")
            self.open = False
            return True
        if self.decision is None or self.decision.kind != "boundary":
            return False
        entry = self._find(self._order(self.decision, Kind.JIT, None).name)
        if entry is not None:
            self._answer(f"saved {entry.path.name} together")
        return entry is not None

    def _find(self, name: str) -> Entry | None:
        assert self._session.gathering is not None
        return self._session.gathering.find(name)

    def _final_name(self) -> str:
        return f"final-{self._ranks.token[:8]}"

    def _final(self, reason: str) -> Order:
        writers = tuple(range(self._ranks.size))
        return Order(self._final_name(), Kind.FINAL, reason, writers, patience=math.inf, paused=lambda: self.open)

    def _patience_for_a_step(self) -> float:
        session = self._session
        if self.torn or self.stopped:
            return 0.0
        left = self.deadline() - session.clock.now() - session.budget.seconds(session.expected_bytes) - _MARGIN
        return max(0.2, min(left, PATIENCE))

    def _agree_instantly(self, because: str) -> Decision:
        ranks = self._ranks

        def decide(positions: dict[int, Position]) -> Decision:
            return election.instant(positions, ranks.size, ranks.holdings())

        position = self._position(clean=not because, because=because)
        decision = ranks.agreement.agree("instant", position, decide, self._until(), ranks.silent)
        self._heed(decision)
        return decision

    def _take_part(self, decision: Decision) -> None:
        session, rank = self._session, self._ranks.rank
        if decision.kept and self._was_kept():
            return
        helping = decision.kind == "instant" and rank in decision.missing  # finished elsewhere: its own state only
        if rank not in decision.writers and not helping:
            log.warning("This rank's state is incomplete; %s will write the checkpoint", messages.named(decision.writers))
            self._await_the_writers(decision)
            return
        if decision.kind == "instant" and session.gate.steps < decision.entered:
            log.info("This rank is let through to optimizer step %d", decision.entered)
            session.gate.let(decision.entered)
        kind = Kind.SURVIVORS if decision.kind == "survivors" else Kind.RESCUE
        if self._settled(decision):
            self._save_aside(decision, kind)
            return
        because = f"rank {rank} did not come to optimizer step {decision.entered} in time"  # what it holds belongs to another step
        self._gathering().refuse(self._order(decision, kind, self.deadline()), because)
        self._give_up(because)

    def _was_kept(self) -> bool:
        """Whether the checkpoint that was begun before is there in time. All ranks find the same: it is one commit."""
        session, boundary = self._session, self._session.subject.boundary
        latest = self.deadline() - session.budget.seconds(session.expected_bytes) - _MARGIN
        until = max(session.clock.now() + 0.2, latest)
        while session.background.writing == boundary and session.clock.now() < until:
            session.clock.sleep(0.005)
        if session.committed != boundary:
            session.background.give_up()
            return False
        self._answer(f"step {session.subject.step} is already committed")
        return True

    def _settled(self, decision: Decision) -> bool:
        """Whether the steps that were agreed on are done, and what follows them in their pass too, as far as it can be waited for."""
        session = self._session
        latest = self.deadline() - session.budget.seconds(session.expected_bytes) - _MARGIN
        until = max(session.clock.now() + 0.2, latest)
        while session.gate.steps < decision.entered and not self.stopped:
            if session.clock.now() >= until:
                return False
            session.clock.sleep(0.005)
        self._settle()
        return True

    def _settle(self) -> None:
        """Let the training thread come from its optimizer step to the boundary, if it is on its way."""
        session = self._session
        until = min(session.clock.now() + _SETTLE, self.deadline() - session.budget.seconds(session.expected_bytes) - _MARGIN)
        while not session.subject.settled and not self.stopped and session.clock.now() < until:
            session.clock.sleep(0.005)

    def _save_aside(self, decision: Decision, kind: Kind) -> None:
        session = self._session
        began = session.clock.now()
        try:
            capture = session.subject.rescue()
            order = self._order(decision, kind, self.deadline())
            entry = session.save_together(capture, order)
        except Exception as error:  # whatever it was, there is nobody above who could do better
            log.error("The ranks could not save: %s", error)
            session.events.emit("not-saved", save=kind.value, because=str(error))
            self._give_up(str(error))
            return
        self.committed = True
        log.info("JIT checkpoint completed in %.1fs", session.clock.now() - began)
        how = "exact" if entry.record.exact else f"not exact: {entry.record.because}"
        self._answer(f"saved {entry.path.name} together, {how}")

    def _await_the_writers(self, decision: Decision) -> None:
        """This rank holds nothing that is wanted; whether it may leave as saved depends on the others."""
        session = self._session
        order = self._order(decision, Kind.SURVIVORS, self.deadline())
        try:
            entry = self._gathering().outcome(order)
        except errors.SaveError as error:
            self._give_up(str(error))
            return
        session.outside.tell(checkpoint=entry.path.name)
        if session.copier is not None:
            session.copier.copy(entry)
        self._answer(f"{messages.named(decision.writers)} saved {entry.path.name}")

    def _give_up(self, because: str) -> None:
        log.error("Nothing is saved: %s. The last committed checkpoint stays the newest", because)
        self._session.events.emit("not-saved", save="together", because=because)
        if self._session.outcome is None and not self.committed:
            self._session.outcome = Outcome.NOT_SAVED

    def _gathering(self) -> Gathering:
        assert self._session.gathering is not None
        return self._session.gathering

    def _order(self, decision: Decision, kind: Kind, deadline: float | None) -> Order:
        alive = decision.kind != "survivors"
        return Order(
            name=f"{kind.value}-{decision.step}-{decision.token}",
            kind=kind,
            reason=self.notice().reason,
            writers=decision.writers,
            helpers=decision.missing if alive else (),
            missing=() if alive else decision.missing,
            deadline=deadline,
            abandoned=self._escalated.is_set if kind is Kind.JIT else lambda: False,
        )

    def _end_it(self, notice: Notice) -> None:
        """Nothing could be saved, and the training thread does not leave: it may wait for a rank that never comes. Without it the
        others would wait, too, and so would whoever is to start the run again."""
        session = self._session
        if self._closed.is_set() or self.committed or self._arrived.is_set():
            return
        code = exits.code(notice, False, session.jit.exit_code)
        log.error("The training thread does not return, and nothing is saved: leaving with exit code %d", code)
        session.outcome = Outcome.NOT_SAVED
        session.left()
        session.leaving.unsay()
        exits.leave(code)

    # ---- afterwards ------------------------------------------------------------------------------------------------------------

    def _go_on(self) -> None:
        """A hang was answered by a save; whoever hung may come back, and training goes on as if nothing had happened."""
        session = self._session
        log.warning("Training goes on, if it can: on_hang is 'save'")
        with self._lock:
            self.begun = self.open = self.answered = self.committed = self._saving = False
            self._broken = ""
            session.outcome = None
            session.pressing = self._current = self.decision = None
            self._escalated.clear()
            self._arrived.clear()
            self._ranks.next_round()
            self.concluded.clear()
        if session.latch.raised:
            session.wake()
