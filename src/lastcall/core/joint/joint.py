"""The way of a notice where many ranks must agree, on the training thread: it waits at its boundary for what the agents decide
(`agents` has the story), saves there or goes on, says when training has failed or ended, and leaves.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator

from lastcall import errors, messages
from lastcall.core.joint.agents import PATIENCE, TICK, Agents
from lastcall.core.joint.save import Interrupted
from lastcall.core.ranks.election import Decision
from lastcall.core.ranks.heartbeat import LOST
from lastcall.types import Kind, Notice, Outcome

log = logging.getLogger("lastcall")


class Joint(Agents):
    def at_boundary(self) -> None:
        """Wait for the decision; save here if this is the step, go on to it if it is not."""
        session = self._session
        while self.open and not self._closed.is_set():
            self._hold_until_decided()
            decision = self.decision
            if self._escalated.is_set():
                if session.gate.steps < session.gate.allowed:
                    return  # others have completed a step that this rank is being let through to
                self._arrived.set()
                self.concluded.wait(TICK)
                if (self.answered or session.outcome is Outcome.NOT_SAVED) and not self._passing:
                    self._leave()
                continue
            if decision is None or decision.kind == "finish":
                return
            if decision.kind != "boundary":
                session.clock.sleep(TICK / 10)  # the agent is about to escalate
                continue
            if not self.finished and session.subject.ordinal < decision.step:
                return
            with self._lock:
                if self._escalated.is_set():
                    continue
                self._saving = True
            self._save_here(decision)
            self._leave()

    def leave_if_answered(self) -> None:
        if not self._passing:
            super().leave_if_answered()

    def _hold_until_decided(self) -> None:
        self._parked.set()
        try:
            while self.open and not self._decided.wait(TICK):
                if self._closed.is_set():
                    return
        finally:
            self._parked.clear()

    def _save_here(self, decision: Decision) -> None:
        session = self._session
        self._arrived.set()
        began = session.clock.now()
        session.background.in_the_way(self.deadline(), session.expected_bytes)
        try:
            with self._alone_at_it():
                if session.committed == session.subject.boundary and not self.finished:
                    self._answer(f"step {session.subject.step} is already committed")
                    return
                capture = session.subject.capture()
                deadline = max(self.deadline(), session.clock.now() + PATIENCE)
                plan = session.budget.plan(capture.nbytes, self.deadline())
                log.info("Saving step %d: %s, %s", capture.step, plan.kind, plan.because)
                entry = session.save_together(capture, self._order(decision, Kind.JIT, deadline))
            log.info("JIT checkpoint completed in %.1fs", session.clock.now() - began)
            self._answer(f"saved {entry.path.name} together")
            self.concluded.set()
        except (errors.LastcallError, OSError) as error:
            log.error("The save at the agreed boundary failed: %s", error)
            session.events.emit("not-saved", save="jit", because=str(error))
            self._broken = f"the save at the agreed boundary failed ({error})"
            self._wait_for_the_agent()

    @contextlib.contextmanager
    def _alone_at_it(self) -> Iterator[None]:
        """session.saving, but not for ever: a periodic save may wait for a rank that will not take part in it any more."""
        session = self._session
        left = max(PATIENCE, self._rescue_at() - session.clock.now())
        if not session.saving.acquire(timeout=left):
            session.background.give_up()
            raise errors.DeadlineError("a save that was begun before does not end")
        try:
            yield
        finally:
            session.saving.release()

    def _wait_for_the_agent(self) -> None:
        """The boundary came to nothing, and this thread still stands at it: what the agents save counts."""
        self._saving = False
        while not self.concluded.wait(TICK) and not self._closed.is_set():
            pass
        if not self.answered and self._session.outcome is None:
            self._session.outcome = Outcome.NOT_SAVED

    def failed(self, error: BaseException) -> None:
        """Training has raised here. The others cannot go on without this rank: all save the last completed step. Returns when that
        is done."""
        self.stopped = True
        self.torn = self._torn_by(error)
        why = f"rank {self._ranks.rank} failed: {type(error).__name__}: {error}"[:300]
        if gone := self._ranks.gone():  # what raised here came of it
            why = f"{messages.named(gone)} {'is' if len(gone) == 1 else 'are'} gone"
        self._ranks.fail(why)
        if self.answered or self.concluded.is_set():
            return
        self.press(why)
        limit = self._session.jit.grace + 2 * PATIENCE
        self.concluded.wait(limit)

    @property
    def at_fault(self) -> bool:
        """Whether training failed here by itself, with all other ranks alive: started again, it may fail again."""
        return self.stopped and self.decision is not None and set(self.decision.missing) <= {self._ranks.rank}

    def _without_the_lost(self, why: str) -> bool:
        """The last save came to nothing. If a rank was lost, the others save without it, as they would have in the middle of the
        run."""
        session = self._session
        if not self._ranks.unable() or self._closed.is_set():
            return False
        session.subject.hurry()
        self.press(why)
        until = session.clock.now() + PATIENCE
        while not self.open and session.clock.now() < until:
            session.clock.sleep(TICK / 10)
        return self.open

    def press(self, why: str) -> None:
        """A rank is lost: have the agent serve it."""
        now = self._session.clock.now()
        self._session.press(Notice(LOST, why, now, now + self._session.jit.grace))

    def bereft(self) -> None:
        """A pass in which no optimizer stepped, on the training thread: what it would have done may have failed because a rank is
        gone, and the user's code may have caught that. It is not a step; the ranks that are left save, and leave."""
        gone = self._ranks.unable()
        if not gone:
            return
        self._session.subject.hurry()
        self.press(f"{messages.named(gone)} {'is' if len(gone) == 1 else 'are'} gone")
        while not self.open and not self._closed.is_set():
            self._session.clock.sleep(TICK / 10)
        self.at_boundary()

    def served(self) -> bool:
        """Whether the ranks have saved, or are about to have: what raises now comes of their leaving."""
        if self.begun and not self.stopped and not self.concluded.is_set() and (self._saving or self._escalated.is_set()):
            self.concluded.wait(max(0.0, self.deadline() - self._session.clock.now()) + PATIENCE)
        return self.answered and not self.stopped

    def finish(self, reason: str) -> None:
        """Training is over on this rank, and why: a last checkpoint of all, unless a notice comes before the last one has ended."""
        session = self._session
        self.finished = True
        order = self._final(reason)
        gathering, began = self._gathering(), session.clock.now()
        capture = session.subject.capture()
        part = None
        while True:
            if self.open:
                self.at_boundary()
            part = part or gathering.contribute(session.mine(capture), order)
            try:
                entry = gathering.complete(capture, part, order)
            except Interrupted:
                continue
            except errors.SaveError as error:
                if not self._without_the_lost(str(error)):
                    raise
                continue
            session.now_committed(entry, capture, session.subject.boundary, session.clock.now() - began)
            session.say_finished(reason, entry)
            return
