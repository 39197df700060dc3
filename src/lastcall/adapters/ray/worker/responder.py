"""How a train worker answers a notice: with a report() that has a checkpoint, made after a step that
all ranks have agreed on.

BOUNDARY   the way that the ranks agreed on leads to a report (decisions.py)
SAVING     a report of which some rank has a checkpoint, until the controller has committed it
INSTANT    the script's own save point was not reached in time: the ranks agree again, on a way that needs
           none
DISMISSED  the script handles a preemption itself
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import FrameType
from typing import Any

from lastcall import errors
from lastcall.adapters.ray import internals
from lastcall.adapters.ray.never_raise import never_raises
from lastcall.adapters.ray.saves.script_save import OwnSave
from lastcall.adapters.ray.worker import decisions
from lastcall.adapters.ray.worker.api_use import ApiUse
from lastcall.adapters.ray.worker.connection import RankConnection
from lastcall.adapters.ray.worker.notices import WorkerNotices
from lastcall.adapters.ray.worker.preemption_info import PreemptionInfoWriter
from lastcall.adapters.ray.worker.steps import Boundary
from lastcall.core import timing
from lastcall.core.context import NoticeContext
from lastcall.core.notice.answer import Answer
from lastcall.core.notice.inbox import Inbox
from lastcall.core.notice.phases import Phase
from lastcall.core.notice.responder import Where
from lastcall.core.notice.service import NoticeService
from lastcall.settings import JITCheckpointConfig
from lastcall.types import Kind, Notice, Outcome

log = logging.getLogger("lastcall")
_AGREE_SECONDS = 5.0  # the agents answer at once: a rank that does not by then is dead or frozen
_FIRST_SAVE = 1.0  # seconds that a save takes, until one was measured
_NATIVE = "the script handles a preemption itself"


class ReportSave:
    """A `Strategy`, one a worker. `arrived` and `before` run in the training thread, from below its frames.
    `private`: the folder for events and progress; None where the run's storage is no folder of this
    machine."""

    def __init__(
        self,
        jit: JITCheckpointConfig,
        connection: RankConnection,
        info_writer: PreemptionInfoWriter,
        own: OwnSave,
        api_use: ApiUse | None = None,
        private: Path | None = None,
    ) -> None:
        self.context = NoticeContext.beside(private, jit, connection.rank)
        self.latch = self.context.latch
        self._inbox = Inbox(self.context)
        self.phases = self._inbox.phases
        self.boundary = Boundary(self.arrived)
        self.context.progress.where = lambda: self.boundary.steps
        self.save_seconds = _FIRST_SAVE
        self.expected: float | None = None  # time.monotonic() at which the next report is due
        self.api_use = api_use
        self.replaying = False  # the script's own save runs at another place than its own
        self.begun = False  # a report that saves is under way, or over: nothing is left to do
        self._answer = Answer(self.context, self.phases)
        self.notices = WorkerNotices(self.context, self._inbox, self._answer, connection, info_writer)
        # Where this Ray knows no preemption, no process restarts the run: training continues after the save.
        self._service = NoticeService(
            self.context, self._inbox, self._answer, self, self._on_notice, passing=info_writer.degraded
        )
        self._connection = connection
        self._own = own
        self._looked = False
        self._plan: dict[str, Any] | None = None
        self._entered = False
        # saves the state itself, where the script has no save
        self.fall_back: Callable[[str], None] = lambda because: None
        # informs the others that the script's own save failed here
        self.failed: Callable[[str], None] = lambda because: None
        # reports for a training thread that is in Ray's barrier
        self.report_by_proxy: Callable[[], None] = lambda: None

    def start(self, resumed: str | None) -> None:
        self._service.start(resumed)
        self.notices.listen()

    def stop(self) -> None:
        self._service.stop()
        self.boundary.remove()

    @property
    def native(self) -> bool:
        """Whether the script handles a preemption itself. All ranks know it at the same report:
        get_preemption_info() is a barrier."""
        return self.api_use is not None and self.api_use.native

    @property
    def how(self) -> str:
        """What caused the save that is being made."""
        if self.replaying:
            return decisions.REPLAY
        if self._plan is None or self._plan["how"] in (decisions.REPLAY, decisions.PERIOD, decisions.STATE):
            return "the script's own period"
        return str(self._plan["how"])

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

    def _on_notice(self, notice: Notice) -> None:
        self.report_by_proxy()

    def needs(self, deadline: float) -> float:
        return self.reserve()

    def announce(self, notice: Notice) -> None:
        with _explained():
            self.notices.announce(notice)

    def hurried(self, notice: Notice) -> bool:
        return False

    def hold(self) -> None:
        self.boundary.hold()

    def decide(self) -> Where:
        plan = self._agree("step", decisions.first)
        return Where(dismissed=plan["how"] == decisions.NATIVE or self.native, because=plan["because"])

    def boundary_until(self) -> float:
        latest, plan = self._answer.deadline - timing.MARGIN, self._plan
        if plan is None or plan["how"] != decisions.OWN:
            return latest
        return min(latest, self.context.clock.now() + float(plan["within"]))

    def hopeless(self, saving: bool) -> str:
        """A later notice may have brought the deadline forward."""
        return "no report in time" if not saving and self.left() <= timing.MARGIN else ""

    def aside(self, because: str) -> None:
        """No save is possible from the side, but another way to a report is."""
        if self.native:
            self.phases.try_enter(Phase.DISMISSED, _NATIVE)
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
            "The training loop did not reach a save in time: nothing was saved after the notice (%s). A "
            "restart resumes from the last checkpoint that was reported. Report more often, or raise the "
            "grace: export LASTCALL_GRACE_SECONDS=%d",
            self._answer.notice.reason,
            round(2 * self.context.jit.grace),
        )
        self.not_saved("no report in time")

    def continues(self) -> bool:
        """Only where no process restarts the run."""
        self.phases.wait_while({Phase.SAVING}, max(0.0, self.left()))
        self.continue_training()
        return self.phases.phase is Phase.QUIET

    def stuck(self) -> None:
        """Ray or the platform ends this process; a report that comes before that is still committed."""

    def fault(self) -> None:
        """Training continues; a report with a checkpoint is committed all the same."""
        for phase in (Phase.HOLDING, Phase.BOUNDARY):
            self.phases.try_enter(phase, "an internal error in lastcall")
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
        reports = self.api_use is not None and self.api_use.own_checkpoints
        mine["checkpoints"] = bool(mine.get("checkpoints")) or reports
        until = time.monotonic() + min(_AGREE_SECONDS, max(0.5, left))
        with _explained():
            plan = self._connection.agreement.settle(
                name, mine, lambda answers: decide(answers, left), until, self._connection.dead
            )
            if plan is None:
                raise errors.StoreLost("the ranks cannot agree")
        if not plan:
            raise RuntimeError("the ranks made no decision")
        leaves = plan["how"] in (decisions.NATIVE, decisions.PERIOD)
        what = (
            "leaves the save to the script" if leaves else f"saves after step {plan['step']} of this process"
        )
        log.info("Rank %d %s (%s): %s", self._connection.rank, what, plan["how"], plan["because"])
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

    def continue_training(self) -> None:
        """Saved or not: no process restarts the run, and a later notice is not answered."""
        self._plan = None
        self._inbox.mute()
        if self.phases.try_enter(Phase.QUIET) and self.context.outcome.decided:
            self.context.outcome.reopen()

    def leave(self) -> None:
        """No further step is taken: Ray ends this process."""
        self.phases.try_enter(Phase.LEAVING)
        self.context.events.flush()

    # ---- the training thread -------------------------------------------------------------------------------

    @never_raises
    def arrived(self, frame: FrameType) -> None:
        """A step is complete, in this frame."""
        if not self._looked:
            self._looked = self._own.look(frame) is not False
            self.boundary.curious = not self._looked
            if self._looked and self.api_use is not None:
                self.api_use.look(frame)
                if self._connection.rank == 0:
                    self.api_use.warn(saves=self._own.saves)
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

    @never_raises
    def _left_the_save(self) -> None:
        """It comes later in this pass, or was not for this rank: the next step tries again."""
        self._entered = False

    @never_raises
    def _replay(self, frame: FrameType) -> None:
        self.boundary.before = None
        self.replaying = True
        try:
            because = self._own.replay(frame)
        finally:
            self.replaying = False
        if not self.begun:
            log.error("Could not replay the script's own save: %s", because)
            self.failed(because)
            self.fall_back(because)

    @never_raises
    def _save_state(self, _frame: FrameType) -> None:
        self.boundary.before = None
        assert self._plan is not None
        self.fall_back(self._plan["because"])


@contextlib.contextmanager
def _explained() -> Iterator[None]:
    """The store is in the controller: without it there is no run that a restart could continue."""
    try:
        yield
    except errors.StoreLost as error:
        raise errors.StoreLost(f"the controller is gone, and the run with it ({error})") from error
