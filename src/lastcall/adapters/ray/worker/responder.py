"""How a train worker answers a notice: with a report() that has a checkpoint, brought about at a step that
all ranks have agreed on.

BOUNDARY   the way that was agreed on leads to a report (decisions.py)
SAVING     a report of which some rank has a checkpoint, until the controller has committed it
INSTANT    the script's own save point was not reached in time: the ranks agree again, on a way that needs
           none
DISMISSED  the script handles a preemption itself
"""

from __future__ import annotations

import logging
import signal
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from lastcall import errors
from lastcall.adapters.ray import internals
from lastcall.adapters.ray.never_raise import harmless
from lastcall.adapters.ray.saves.script_save import OwnSave
from lastcall.adapters.ray.worker import decisions
from lastcall.adapters.ray.worker.connection import Line
from lastcall.adapters.ray.worker.flow import Flow
from lastcall.adapters.ray.worker.preemption_info import Echo
from lastcall.adapters.ray.worker.steps import Boundary
from lastcall.core import timing
from lastcall.core.context import NoticeContext
from lastcall.core.notice.answer import Answer
from lastcall.core.notice.phases import Phase, Phases
from lastcall.core.notice.responder import Responder, Where
from lastcall.settings import JITCheckpointConfig
from lastcall.types import Kind, Notice, Outcome

log = logging.getLogger("lastcall")
_AGREE_SECONDS = 5.0  # the agents answer at once: whoever does not by then is dead or frozen
_FIRST_SAVE = 1.0  # seconds that a save takes, as long as none was seen
_LISTEN = 300.0  # seconds of one wait for news


class ReportSave:
    """A `Strategy`, one a worker. `told` from any thread; `arrived` and `before` in the training thread, from
    below its frames. `private`: the folder for events and progress; None where the run's storage is no folder
    of this machine."""

    def __init__(
        self,
        jit: JITCheckpointConfig,
        line: Line,
        echo: Echo,
        own: OwnSave,
        flow: Flow | None = None,
        private: Path | None = None,
    ) -> None:
        self.context = NoticeContext.beside(private or Path(), jit, line.rank)
        self.latch = self.context.latch
        self.phases = Phases(self.context.events.emit)
        self.boundary = Boundary(self.arrived)
        self.save_seconds = _FIRST_SAVE
        self.expected: float | None = None  # time.monotonic() at which the next report is due
        self.flow = flow
        self.replaying = False  # the script's own save is being run away from its place
        self.begun = False  # a report that saves is under way, or over: nothing is left to bring about
        self._answer = Answer(self.context, self.phases)
        self._responder = Responder(self.context, self._answer, self, lambda: None)
        self._writes = private is not None
        self._line = line
        self._echo = echo
        self._own = own
        self._looked = False
        self._plan: dict[str, Any] | None = None
        self._entered = False
        self._nodes: dict[str, Any] | None = None  # that go; None where another rank has told of it
        self._lock = threading.Lock()
        # the state itself, where the script has no save
        self.fall_back: Callable[[str], None] = lambda because: None
        # tells the others that the script's own save failed here
        self.failed: Callable[[str], None] = lambda because: None
        # on behalf of a training thread that is in Ray's barrier
        self.speak: Callable[[], None] = lambda: None
        self.context.progress.where = lambda: self.boundary.steps

    # ---- news ----------------------------------------------------------------------------------------------

    def on_signal(self, signum: int, count: int) -> None:
        now = time.monotonic()
        name = signal.Signals(signum).name
        self.on_notice(Notice("signal", name, now, now + self.context.jit.grace, signum))

    def on_notice(self, notice: Notice) -> None:
        """News for this process, and so for its node."""
        self.told(notice, {internals.node_id(): [self._line.rank]})

    def on_drain(self, left: float | None, nodes: Mapping[str, Sequence[int]]) -> None:
        """Ray says that nodes are taken away."""
        now = time.monotonic()
        self.told(
            Notice("drain", "node drain", now, now + (self.context.jit.grace if left is None else left)),
            nodes,
            echo=False,
        )

    def listen(self) -> None:
        """A thread: what another rank was told."""
        try:
            self._listen(self._line.clone())
        except errors.StoreLost as error:
            log.debug("the news of the other ranks can no longer be heard: %s", error)

    def _listen(self, line: Line) -> None:
        while not self.phases.closed:
            news = line.agreement.heard(_LISTEN)
            if news is not None and news.get("rank") != self._line.rank:
                now = time.monotonic()
                # the clocks of two nodes may differ by seconds
                left = float(news.get("left", self.context.jit.grace))
                notice = Notice(f"rank {news.get('rank')}", str(news.get("reason")), now, now + left)
                self.told(notice, news.get("nodes", {}), announce=False, echo=not news.get("drain"))

    def told(
        self, notice: Notice, nodes: Mapping[str, Sequence[int]], *, announce: bool = True, echo: bool = True
    ) -> None:
        """`echo`: Ray does not know of it yet. What Ray itself says (a drain) it says to every rank, and in
        its own words."""
        with self._lock:
            first = self.latch.notice is None
            if self.phases.closed or not self.latch.offer(notice):
                return
        left = self.left()
        self.context.events.emit(
            "notice",
            source=notice.source,
            reason=notice.reason,
            deadline_in=round(left, 3),
            step=self.boundary.steps,
        )
        if echo:
            self._echo.say(left, nodes)
        if first:
            self.speak()
            self._nodes = dict(nodes) if announce else None
            threading.Thread(target=self._serve, args=(notice,), name="lastcall-agent", daemon=True).start()

    @property
    def native(self) -> bool:
        """Whether the script handles a preemption itself. All ranks know it at the same report:
        get_preemption_info() is a barrier."""
        return self.flow is not None and self.flow.native

    @property
    def how(self) -> str:
        """What brought about the save that is being made."""
        if self.replaying:
            return decisions.REPLAY
        if self._plan is None or self._plan["how"] in (decisions.REPLAY, decisions.PERIOD, decisions.STATE):
            return "the script's own period"
        return str(self._plan["how"])

    def write_down(self) -> None:
        """A thread: events and progress, since a storage that hangs must hold up nobody who saves."""
        while self._writes and not self.phases.wait_closed(1.0):
            self.context.events.flush()
            self.context.progress.flush()

    def close(self) -> None:
        self.context.events.emit("stop", outcome=self.context.outcome.text, step=self.boundary.steps)
        self.phases.close()
        self.boundary.remove()
        if self._writes:
            self.context.events.close()
            self.context.progress.flush()

    # ---- time ----------------------------------------------------------------------------------------------

    def left(self) -> float:
        return self._answer.left

    def since_notice(self) -> float:
        notice = self.latch.notice
        return 0.0 if notice is None else time.monotonic() - notice.at

    def reserve(self) -> float:
        """What must be left when a save begins: the save itself, and two polls of the controller until it is
        committed."""
        return 1.3 * self.save_seconds + 2 * internals.poll_seconds() + 1.0

    # ---- the agent's thread --------------------------------------------------------------------------------

    def _serve(self, notice: Notice) -> None:
        try:
            # Where this Ray knows no preemption nobody restarts the run: training goes on after the save.
            self._responder.run(notice, passing=self._echo.degraded)
        except errors.StoreLost as error:
            log.warning(
                "Nothing is saved after %s: the controller is gone, and the run with it (%s)",
                notice.reason,
                error,
            )
            self._responder.fault()
        except Exception:
            log.exception("The notice could not be served; the run goes on until it is stopped")
            self._responder.fault()

    def needs(self, deadline: float) -> float:
        return self.reserve()

    def announce(self, notice: Notice) -> None:
        if self._nodes is None:
            log.info(
                "%s was told to stop (%s): rank %d saves, too",
                notice.source.capitalize(),
                notice.reason,
                self._line.rank,
            )
            return
        left = self.left()
        news = {
            "rank": self._line.rank,
            "reason": notice.reason,
            "nodes": self._nodes,
            "left": left,
            "deadline": time.time() + left,
        }
        self._line.agreement.announce({**news, "drain": notice.source == "drain"})

    def hurried(self, notice: Notice) -> bool:
        return False

    def hold(self) -> None:
        self.boundary.hold()

    def decide(self) -> Where:
        plan = self._agree("step", decisions.first)
        return Where(finished=plan["how"] == decisions.NATIVE or self.native, because=plan["because"])

    def boundary_until(self) -> float:
        latest, plan = self._answer.deadline - timing.MARGIN, self._plan
        if plan is None or plan["how"] != decisions.OWN:
            return latest
        return min(latest, self.context.clock.now() + float(plan["within"]))

    def hopeless(self, saving: bool) -> str:
        """A later notice may have brought the deadline forward."""
        return "no report in time" if not saving and self.left() <= timing.MARGIN else ""

    def aside(self, because: str) -> None:
        """There is no save from the side, but another way to a report."""
        if self.native:
            self.phases.try_enter(Phase.DISMISSED, "the script handles a preemption itself")
            return
        if self._plan is not None and self._plan["how"] == decisions.OWN and self.left() > timing.MARGIN:
            plan = self._agree("again", decisions.again)
            self.phases.try_enter(Phase.BOUNDARY, plan["because"], only_from={Phase.INSTANT})
            while (
                self.phases.phase is Phase.BOUNDARY
                and not self.phases.closed
                and (left := self.left() - timing.MARGIN) > 0
            ):
                self.phases.wait_while({Phase.BOUNDARY}, min(left, timing.LOOK))
        if self.phases.phase not in (Phase.INSTANT, Phase.BOUNDARY) or self.phases.closed:
            return
        log.error(
            "The training loop did not come to a save in time: nothing was saved after the notice (%s). A "
            "restart begins from the "
            "last checkpoint that was reported. Report one more often, or raise the grace: export "
            "LASTCALL_GRACE_SECONDS=%d",
            self._answer.notice.reason,
            round(2 * self.context.jit.grace),
        )
        self.not_saved("no report in time")

    def continues(self) -> bool:
        """Only where nobody restarts the run."""
        self.phases.wait_while({Phase.SAVING}, max(0.0, self.left()))
        self.go_on()
        return self.phases.phase is Phase.QUIET

    def stuck(self) -> None:
        """Ray ends this process, or whoever has set the deadline; a report that comes before that is still
        committed."""

    def fault(self) -> None:
        """The run goes on; a report with a checkpoint is committed all the same."""
        for phase in (Phase.HOLDING, Phase.BOUNDARY):
            self.phases.try_enter(phase, "a fault in lastcall")
        self.boundary.release()

    def _agree(self, name: str, decide: Any) -> dict[str, Any]:
        """The step at which all ranks save, and how. The training thread stops at its next step until it is
        known."""
        left = max(0.0, self.left() - self.reserve())
        expected = None if self.expected is None else max(0.0, self.expected - time.monotonic())
        mine = {
            "step": self.boundary.hold(),
            "seconds": expected,
            "inside": self._own.inside,
            **self._own.position(),
        }
        mine["native"] = self.native
        mine["checkpoints"] = bool(mine.get("checkpoints")) or (self.flow is not None and self.flow.own)
        until = time.monotonic() + min(_AGREE_SECONDS, max(0.5, left))
        plan = self._line.agreement.settle(
            name, mine, lambda said: decide(said, left), until, self._line.gone
        )
        if plan is None:
            raise errors.StoreLost("the ranks cannot agree")
        if not plan:
            raise RuntimeError("the ranks came to no decision")
        leaves = plan["how"] in (decisions.NATIVE, decisions.PERIOD)
        what = (
            "leaves the save to the script" if leaves else f"saves after step {plan['step']} of this process"
        )
        log.info("Rank %d %s (%s): %s", self._line.rank, what, plan["how"], plan["because"])
        self._plan = plan
        self.boundary.release()
        return plan

    # ---- the save ------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """A report that saves is under way."""
        self.begun = True
        if self.phases.try_enter(Phase.SAVING):
            self.context.events.emit("save-begins", save=Kind.JIT.value, step=self.boundary.steps)

    def saved(self, name: str, what: str, facts: Mapping[str, Any]) -> None:
        """`facts`: of the record."""
        self.context.events.emit(
            "committed",
            save=Kind.JIT.value,
            step=self.boundary.steps,
            exact=facts["exact"],
            because=facts["because"],
            seconds=self.since_notice(),
            path=name,
        )
        self._answer.saved(f"{name} {what}")

    def not_saved(self, because: str) -> None:
        self._answer.not_saved(Kind.JIT.value, because)
        self.context.outcome.decide_if_open(Outcome.NOT_SAVED)
        self.phases.try_enter(Phase.FAILED, because)

    def go_on(self) -> None:
        """Training continues, saved or not: nobody restarts the run."""
        self._plan = None
        if self.phases.try_enter(Phase.QUIET) and self.context.outcome.decided:
            self.context.outcome.reopen()

    def leave(self) -> None:
        """No step more is taken: Ray ends this process."""
        self.phases.try_enter(Phase.LEAVING)
        if self._writes:
            self.context.events.flush()

    # ---- the training thread -------------------------------------------------------------------------------

    @harmless
    def arrived(self, frame: FrameType) -> None:
        """A step is complete, in this frame."""
        if not self._looked:
            self._looked = self._own.look(frame) is not False
            self.boundary.curious = not self._looked
            if self._looked and self.flow is not None:
                self.flow.look(frame)
                if self._line.rank == 0:
                    self.flow.remark(saves=self._own.saves)
        plan = self._plan
        if plan is None or self.boundary.steps < plan["step"] or self.begun or self.native:
            return
        if plan["how"] == decisions.FRAMEWORK:
            self._own.ask_trainer()
        elif plan["how"] == decisions.OWN:
            self._entered = self._entered or self._own.enter(frame, self._left_the_save)
        elif plan["how"] == decisions.REPLAY and self._own.near:
            self._replay(frame)
        elif plan["how"] in (decisions.REPLAY, decisions.STATE):
            self.boundary.before = self._replay if plan["how"] == decisions.REPLAY else self._save_state

    @harmless
    def _left_the_save(self) -> None:
        """It comes later in this pass, or was not for this rank: the next step tries again."""
        self._entered = False

    @harmless
    def _replay(self, frame: FrameType) -> None:
        self.boundary.before = None
        self.replaying = True
        try:
            because = self._own.replay(frame)
        finally:
            self.replaying = False
        if not self.begun:
            log.error("The script's own save could not be replayed: %s", because)
            self.failed(because)
            self.fall_back(because)

    @harmless
    def _save_state(self, _frame: FrameType) -> None:
        self.boundary.before = None
        assert self._plan is not None
        self.fall_back(self._plan["because"])
