"""The way of a notice, from its arrival to a committed checkpoint: wait, then the boundary, or the rescue.

Two threads can answer a notice: the training thread at its next boundary, and the agent by a rescue. Both save under
`session.saving`, and whoever comes second finds that the first has answered. After an exact rescue the training thread may not
touch the state again: it leaves at the gate or at its boundary, and if it is stuck, the agent leaves for it.
"""

from __future__ import annotations

import logging
import signal
import sys
import threading
from typing import TYPE_CHECKING, NoReturn

from lastcall import errors
from lastcall.core.process import exits
from lastcall.types import Kind, Notice, Outcome

if TYPE_CHECKING:
    from lastcall.core.session import Session

log = logging.getLogger("lastcall")
_PATIENCE = 1.0  # seconds that a boundary is waited for at least
_STEPS = 3.0  # ... and how many of the usual steps
_MARGIN = 0.5  # seconds kept back before the deadline
_WAY_OUT = (0.2, 1.0)  # seconds before the deadline at which a stuck process is left: the driver of a GPU takes half of one to end it
_LEAVE = 5.0  # seconds that a stuck training thread gets to leave by itself after an exact rescue


class Serving:
    def __init__(self, session: Session) -> None:
        self._session = session
        self.begun = False
        self.open = False  # the kill wait is over: the next boundary saves
        self.answered = False  # an exact checkpoint is committed: nothing may change the state any more
        self.committed = False  # some checkpoint is committed for this notice
        self._raised = False  # Preempted was raised into the loop
        self._arrived = threading.Event()  # the training thread is at a boundary
        self._closed = threading.Event()  # the session ends

    def fault(self) -> None:
        """The agent has failed in run(): the next boundary does what it can."""
        self.open = True
        self._session.subject.attend()

    def close(self) -> None:
        self._closed.set()
        self._arrived.set()

    # ---- the agent's side ------------------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Serve the notice. Returns when the training thread has taken over, or the session ends; may leave the process."""
        self.begun = True
        notice = self.notice()
        self._wait_before(notice)
        self.open = True
        self._session.subject.attend()
        self._session.gate.on_hold = self.leave_if_answered
        if self._arrived.wait(max(0.0, self._rescue_at() - self._session.clock.now())):
            return
        self._rescue()
        self._stay_until_the_end()

    def notice(self) -> Notice:
        notice = self._session.latch.notice
        assert notice is not None
        return notice

    def deadline(self) -> float:
        notice = self.notice()
        return notice.deadline if notice.deadline is not None else notice.at + self._session.jit.grace

    def _wait_before(self, notice: Notice) -> None:
        session = self._session
        wanted = session.jit.kill_wait
        wait = session.budget.kill_wait(wanted, session.expected_bytes, self.deadline())
        log.info("%s received, initiating JIT checkpoint in %.1fs", notice.reason, wait)
        if wait < wanted:
            log.warning(
                "Kill wait cut from %.1fs to %.1fs: the save needs about %.1fs and %.1fs are left",
                wanted, wait, session.budget.until_safe(session.expected_bytes, self.deadline()), self.deadline() - session.clock.now(),
            )  # fmt: skip
        until = notice.at + wait
        while not self._closed.is_set() and (left := min(until, self.deadline()) - session.clock.now()) > 0:
            self._closed.wait(min(left, 0.25))
            session.hear()  # a second notice may shorten the deadline

    def _rescue_at(self) -> float:
        """A boundary is waited for as long as a few usual steps take, but never longer than the save can afford."""
        session = self._session
        latest = self.deadline() - session.budget.until_safe(session.expected_bytes, self.deadline()) - _MARGIN
        usual = session.subject.step_seconds
        if session.committed == session.subject.boundary and session.subject.untouched():
            usual = 0.0  # there is nothing to wait for
        elif self._unrescuable():
            usual = None  # the boundary is all there is to hope for
        if usual is None:  # the first step (compilation, data) takes as long as it takes
            return latest
        return min(latest, session.clock.now() + max(_PATIENCE, _STEPS * usual))

    def _rescue(self) -> None:
        session = self._session
        if why_not := self._unrescuable():
            log.warning("No boundary in time, and no rescue: %s. Waiting for the boundary until the deadline", why_not)
            return
        log.warning("No boundary in time: rescuing the last completed step from a side thread")
        latest = self.deadline() - session.budget.seconds(session.expected_bytes)
        if not session.gate.close(session.clock, max(latest, session.clock.now() + 0.2)):
            log.warning("The optimizer step in progress does not end: waiting for the boundary until the deadline")
            return
        try:
            session.background.in_the_way(self.deadline(), session.expected_bytes)
            with session.saving:
                if not self._arrived.is_set():
                    self._save_rescue()
        finally:
            session.gate.open()

    def _unrescuable(self) -> str:
        session = self._session
        if session.committed == session.subject.boundary and session.subject.untouched():
            return ""  # nothing is written for it: there is a checkpoint of this very state
        return session.subject.unrescuable() if session.jit.rescue else "rescue is switched off"

    def _save_rescue(self) -> None:
        session = self._session
        began = session.clock.now()
        if session.committed == session.subject.boundary and session.subject.untouched():
            self._answer(f"step {session.subject.step} is already committed")
            return
        try:
            capture = session.subject.rescue()
            entry = session.save(capture, Kind.RESCUE, self.notice().reason, self.deadline())
        except Exception as error:  # whatever it was, the boundary may still come
            log.error("The rescue failed: %s", error)
            session.events.emit("not-saved", save="rescue", because=str(error))
            return
        self.committed = True
        log.info("JIT checkpoint completed in %.1fs", session.clock.now() - began)
        if entry.record.whole:
            how = "exact" if entry.record.exact else f"not exact: {entry.record.because}"
            self._answer(f"rescued step {entry.record.step} into {entry.path.name}, {how}")
        else:
            log.warning("Rescued into %s, not exact: %s", entry.path.name, entry.record.because)

    def _answer(self, how: str) -> None:
        self.answered = self.committed = True
        self._session.outcome = Outcome.SAVED
        log.info("Notice answered: %s", how)

    def _last_moment(self) -> float:
        least, most = _WAY_OUT
        return self.deadline() - max(least, min(most, 0.1 * (self.deadline() - self.notice().at)))

    def _stay_until_the_end(self) -> None:
        """Give the training thread time to leave by itself; a better checkpoint may come of it while the rescue is not exact."""
        session = self._session
        until = self._last_moment()
        if self.answered:
            until = min(until, session.clock.now() + _LEAVE)
        while not self._closed.is_set() and (left := until - session.clock.now()) > 0:
            self._closed.wait(min(left, 0.25))
            session.hear()
            until = min(until, self._last_moment())
        if self._closed.is_set():
            return
        if self.committed:
            with session.saving:  # the training thread may be saving at its boundary: let it
                if self._arrived.is_set():
                    return
                session.outcome = Outcome.SAVED
                self._leave_by_force("The training thread does not return")
        log.error("The deadline has come and nothing could be saved")

    # ---- the training thread's side --------------------------------------------------------------------------------------------

    def at_boundary(self) -> None:
        """Save at this boundary, unless a rescue has answered already, and leave."""
        session = self._session
        self._arrived.set()
        session.background.in_the_way(self.deadline(), session.expected_bytes)
        with session.saving:
            if not self.answered:
                self._save_at_boundary()
        self._leave()

    def _save_at_boundary(self) -> None:
        session = self._session
        began = session.clock.now()
        if session.committed == session.subject.boundary:
            self._answer(f"step {session.subject.step} is already committed")
            return
        try:
            capture = session.subject.capture()
            deadline: float | None = self.deadline()
            if self.deadline() <= session.clock.now():
                log.warning("The deadline has passed, but this process is still here: saving all the same")
                deadline = None
            plan = session.budget.plan(capture.nbytes, deadline)
            log.info("Saving step %d: %s, %s", capture.step, plan.kind, plan.because)
            entry = session.save(capture, Kind.JIT, self.notice().reason, deadline)
        except (errors.LastcallError, OSError) as error:  # StateError: something unsavable was put into the state since protect()
            log.error("JIT checkpoint failed: %s", error)
            session.events.emit("not-saved", save="jit", because=str(error))
            session.outcome = Outcome.SAVED if self.committed else Outcome.NOT_SAVED
            return
        log.info("JIT checkpoint completed in %.1fs", session.clock.now() - began)
        if entry.record.missing:
            log.warning("%s is partial: %s", entry.path.name, entry.record.because)
        self._answer(f"saved {entry.path.name}")

    def failed(self, error: BaseException) -> None:
        """Training has raised here and takes no further step. A notice that has come is answered with the last completed one."""
        session = self._session
        if not session.latch.raised or session.outcome is not None:
            return
        self._arrived.set()
        session.background.in_the_way(self.deadline(), session.expected_bytes)
        with session.saving:
            if not self.committed and (why_not := self._torn_by(error) or self._unrescuable()):
                log.error("The last completed step cannot be saved: %s", why_not)
            elif not self.committed:
                self._save_rescue()
            if self.committed:
                session.outcome = Outcome.SAVED

    def save_what_is_whole(self, error: BaseException) -> str:
        """Training has raised without a notice: save the last completed step. Returns why that was impossible; empty if it is saved."""
        session = self._session
        if session.jit.on_error != "save":
            return "LASTCALL_ON_ERROR is 'leave'"
        session.background.wait()
        with session.saving:
            if session.committed == session.subject.boundary and session.subject.untouched():
                return ""
            if why_not := self._torn_by(error) or self._unrescuable():
                return why_not
            log.info("Saving step %d before %s leaves the block", session.subject.step, named(error))
            try:
                session.save(session.subject.rescue(), Kind.RESCUE, described(error))
            except Exception as failure:  # the error that brought us here is the one to be raised
                session.events.emit("not-saved", save="rescue", because=str(failure))
                return str(failure)
        return ""

    def _torn_by(self, error: BaseException) -> str:
        """Why the state is not whole; empty if it is."""
        return f"{type(error).__name__} came inside optimizer.step()" if self._session.gate.depth > 0 else ""

    def leave_if_answered(self) -> None:
        if self.answered:
            self._leave()

    def _leave(self) -> None:
        """Out of the training loop, by an exception that only `finally` and `with` see. Whoever catches it and goes on training is not
        asked twice."""
        if self._raised and "pytest" not in sys.modules:
            self._leave_by_force("The loop has caught Preempted and goes on")
        self._raised = True
        raise self.preempted()

    def _leave_by_force(self, why: str) -> NoReturn:
        session = self._session
        notice, saved = self.notice(), session.outcome is Outcome.SAVED
        code = exits.code(notice, saved, session.jit.exit_code)
        log.warning("%s: leaving with exit code %d", why, code)
        session.events.emit("stop", outcome=session.outcome.value if session.outcome else None, step=session.subject.step)
        session.events.close()
        session.left()
        session.leaving.unsay()
        if not saved and notice.signum is not None:
            exits.die_of(notice.signum)
        exits.leave(code)

    def preempted(self) -> errors.Preempted:
        saved = self._session.outcome is Outcome.SAVED
        notice = self.notice()
        code = exits.code(notice, saved, self._session.jit.exit_code)
        what = "saved and stopped" if saved else "stopped without a checkpoint"
        return errors.Preempted(code, f"{what} after {notice.reason}")

    def interrupted_again(self, signum: int) -> None:
        """A second Ctrl-C: leave at once, whatever is being written; it is not committed and will be removed on start."""
        log.warning("%s again: leaving at once", signal.Signals(signum).name)
        exits.leave(128 + signum)


def named(error: BaseException) -> str:
    """What left the block, in the words of the script."""
    return "sys.exit()" if isinstance(error, SystemExit) else "Ctrl-C" if isinstance(error, KeyboardInterrupt) else type(error).__name__


def described(error: BaseException) -> str:
    """The same with its message, in one line."""
    return " ".join(f"{named(error)}: {error}".split())[:200] if isinstance(error, Exception) else named(error)
