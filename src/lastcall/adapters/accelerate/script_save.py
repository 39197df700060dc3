"""How a script's own save_state() answers a notice: at a completed step, the same on all ranks, the script
enters its save branch.

BOUNDARY   the script trains on to the step, and from there to its save
SAVING     it saves, or has left the branch and waits for the other ranks
INSTANT    too late: nothing can be saved from the side, since only the script knows what belongs to its
           checkpoints
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from typing import Any

from lastcall import errors
from lastcall.core import timing
from lastcall.core.context import NoticeContext
from lastcall.core.notice.answer import Answer
from lastcall.core.notice.phases import Phase
from lastcall.core.notice.responder import Where
from lastcall.core.ranks.agreement import Agreement
from lastcall.types import Kind, Notice, Outcome

log = logging.getLogger("lastcall")
_ANNOUNCED = "ranks"  # the source of a notice that another rank has announced
_SHARE = 0.25  # of the time that is left: how long to wait for the positions of the others
_READING = 5.0  # seconds that rank 0 gives the others to read the last decision
_LISTEN = 1.0  # seconds of one wait for an announcement


class ScriptSave:
    """A `Strategy`, and what the training thread does at a completed step and after the script's save.
    `nbytes`: about what a save has to write. `die`: leaves the process, with nothing saved."""

    def __init__(
        self, context: NoticeContext, answer: Answer, nbytes: Callable[[], int], die: Callable[[], None]
    ) -> None:
        self.steps = 0  # completed optimizer steps of this process; the ranks count alike
        self.target: int | None = None  # the one to save at
        self._context = context
        self._answer = answer
        self._phases = answer.phases
        self._nbytes = nbytes
        self._die = die
        self._concluded = False  # the script has left its save
        self._ranks: Agreement | None = None  # the training thread's
        self._agents: Agreement | None = None  # the agent's

    @property
    def many(self) -> bool:
        return self._ranks is not None

    def join(self, ranks: Agreement) -> None:
        """There are other ranks."""
        self._ranks, self._agents = ranks, ranks.clone()

    def listen(self, ranks: Agreement, notify: Callable[[Notice], None]) -> None:
        """On a thread of its own: receive the announcements of the other ranks."""
        try:
            while not self._phases.closed:
                news = ranks.heard(_LISTEN)
                if news is not None and news.get("rank") != ranks.rank:
                    now = self._context.clock.now()
                    # seconds, since the clocks of two machines may differ
                    left = float(news.get("left", self._context.jit.grace))
                    notify(Notice(_ANNOUNCED, str(news.get("reason")), now, now + left))
        except errors.StoreLost:
            log.debug("Lost the store, and with it the other ranks")

    # ---- the agent's side ----------------------------------------------------------------------------------

    def needs(self, deadline: float) -> float:
        return self._context.budget.until_safe(self._nbytes(), deadline)

    def announce(self, notice: Notice) -> None:
        if self._agents is not None and notice.source != _ANNOUNCED:
            left = self._answer.left
            news = {
                "rank": self._agents.rank,
                "reason": notice.reason,
                "left": left,
                "deadline": time.time() + left,
            }
            self._agents.announce(news)

    def hurried(self, notice: Notice) -> bool:
        return False

    def hold(self) -> None:
        """A step that is completed from now on waits in due()."""

    def decide(self) -> Where:
        """The next step; with many ranks the first one that no rank has completed."""
        if self._agents is None:
            self.target = self.steps + 1
            return Where(because=f"step {self.target} of this process")
        until = self._context.clock.now() + max(timing.RANKS, _SHARE * self._answer.left)
        decision = self._agents.settle("step", {"step": self.steps}, _first, until)
        if not decision:
            raise errors.StoreLost("the ranks cannot agree on a step")
        self.target = int(decision["step"])
        notice = self._answer.notice
        if notice.source == _ANNOUNCED:
            log.info(
                "Another rank announced %s: this one saves at step %d of the process, too",
                notice.reason,
                self.target,
            )
        return Where(because=f"step {self.target} of each process")

    def boundary_until(self) -> float:
        return self._answer.deadline - timing.MARGIN

    def hopeless(self, saving: bool) -> str:
        """A later notice may have brought the deadline forward, and a save may take too long."""
        late = not self._concluded and self._answer.left <= timing.MARGIN
        return "the script's own save is not complete in time" if late else ""

    def aside(self, because: str) -> None:
        log.error("The training loop did not reach its own save in time: nothing was saved")
        self._fail(because)

    def continues(self) -> bool:
        return False

    def stuck(self) -> None:
        self._die()

    def fault(self) -> None:
        """One process saves at its next step. Of many ranks each would save another step: parts that do not
        belong together."""
        if self._agents is not None:
            log.error("Nothing is saved: the ranks cannot agree on a step")
            self._fail("the ranks cannot agree on a step")
            return
        self.target = self.steps + 1
        for phase in (Phase.HOLDING, Phase.BOUNDARY):
            self._phases.try_enter(phase, "an internal error in lastcall")

    def _fail(self, because: str) -> None:
        self._answer.not_saved("script", because)
        self._context.outcome.decide_if_open(Outcome.NOT_SAVED)
        self._phases.try_enter(Phase.FAILED, because)

    # ---- the training thread's side ------------------------------------------------------------------------

    def due(self) -> bool:
        """After a completed step: whether the script's save comes next. Waits while the ranks agree on a
        step."""
        if not self._phases.open:
            return False
        at_boundary = self._phases.wait_while({Phase.HOLDING}) is Phase.BOUNDARY
        return at_boundary and self.target is not None and self.steps >= self.target

    def begin(self) -> None:
        """save_state() is called."""
        if self._phases.try_enter(Phase.SAVING, only_from={Phase.BOUNDARY}):
            self._context.events.emit(
                "save-begins", save=Kind.JIT.value, step=self.steps, bytes=self._nbytes()
            )

    def committed(self, name: str, because: str) -> None:
        """save_state() has returned. `because`: why it is not known to be exact."""
        seconds = self._context.clock.now() - self._answer.notice.at
        self._context.events.emit(
            "committed",
            save=Kind.JIT.value,
            step=self.steps,
            exact=False,
            because=because,
            seconds=seconds,
            path=name,
        )

    def conclude(self, saved: bool) -> bool:
        """The script has left its branch, or the branch is not for this rank. Returns whether the run is
        saved: the process leaves then."""
        self._concluded = True
        self._phases.try_enter(Phase.SAVING, only_from={Phase.BOUNDARY})
        if not (saved if self._ranks is None else self._any_has(saved, self._ranks)):
            log.error("The script's own save did not call save_state(): nothing was saved")
            self._fail("the script's own save did not call save_state()")
            return False
        self._answer.saved(f"saved at step {self.steps} of this process, by the script's own save")
        self._phases.try_enter(Phase.LEAVING)
        return True

    def _any_has(self, saved: bool, ranks: Agreement) -> bool:
        """Wait for all, so that no rank loses its process group while it still writes. Returns whether any
        rank has saved: in some scripts one saves for all."""
        until = self._answer.deadline
        found = ranks.settle("done", {"saved": saved}, _any_saved, until)
        if not found:
            log.debug("Lost the store: rank 0, which leaves when all have saved, is gone")
            return saved
        try:
            self._let_read(ranks, min(until, self._context.clock.now() + _READING))
        except errors.StoreLost:
            log.debug("Lost the store: no rank reads it any longer")
        return bool(found["saved"])

    def _let_read(self, ranks: Agreement, until: float) -> None:
        """Rank 0's process may host the store: it leaves when the others have read what they need."""
        ranks.tell(f"read/{ranks.rank}", {})
        if ranks.rank == 0:
            for other in range(1, ranks.size):
                ranks.wait_for(f"read/{other}", max(0.0, until - self._context.clock.now()))


def _first(reports: Mapping[int, Mapping[str, Any]]) -> dict[str, int]:
    """The first step that no rank has completed: a rank that is held has completed at most one more than it
    has reported."""
    return {"step": max(int(report["step"]) for report in reports.values()) + 1}


def _any_saved(reports: Mapping[int, Mapping[str, Any]]) -> dict[str, bool]:
    return {"saved": any(bool(report["saved"]) for report in reports.values())}
