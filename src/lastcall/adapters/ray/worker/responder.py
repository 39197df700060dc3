"""The way of a notice in a train worker: told, kill wait, agreement on a step, the save, and what to do if it does not come."""

from __future__ import annotations

import logging
import signal
import threading
import time
from collections.abc import Callable, Mapping, Sequence
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
from lastcall.core.save import budget
from lastcall.core.sync.latch import Latch
from lastcall.settings import JITCheckpointConfig
from lastcall.types import Notice

log = logging.getLogger("lastcall")
_AGREE_SECONDS = 5.0  # the agents answer at once: whoever does not by then is dead or frozen
_FIRST_SAVE = 1.0  # seconds that a save takes, as long as none was seen
_LISTEN = 300.0  # seconds of one wait for news


class Serving:
    """One a worker. `told` from any thread; `arrived` and `before` in the training thread, from below its frames."""

    def __init__(self, jit: JITCheckpointConfig, line: Line, echo: Echo, own: OwnSave, flow: Flow | None = None) -> None:
        self.latch = Latch()
        self.boundary = Boundary(self.arrived)
        self.save_seconds = _FIRST_SAVE
        self.expected: float | None = None  # time.monotonic() at which the next report is due
        self.begun = threading.Event()  # a report that saves is under way: nothing is left to do here
        self._jit = jit
        self._line = line
        self._echo = echo
        self._own = own
        self.flow = flow
        self._looked = False
        self.replaying = False  # the script's own save is being run away from its place
        self._plan: dict[str, Any] | None = None
        self._entered = False
        self._closed = False
        self._lock = threading.Lock()
        self.fall_back: Callable[[str], None] = lambda because: None  # the state itself, where the script has no save
        self.failed: Callable[[str], None] = lambda because: None  # tells the others that the script's own save failed here
        self.speak: Callable[[], None] = lambda: None  # on behalf of a training thread that is in Ray's barrier

    # ---- news --------------------------------------------------------------------------------------------------------------------

    def on_signal(self, signum: int, count: int) -> None:
        now = time.monotonic()
        name = signal.Signals(signum).name
        self.on_notice(Notice("signal", name, now, now + self._jit.grace, signum))

    def on_notice(self, notice: Notice) -> None:
        """News for this process, and so for its node."""
        self.told(notice, {internals.node_id(): [self._line.rank]})

    def on_drain(self, left: float | None, nodes: Mapping[str, Sequence[int]]) -> None:
        """Ray says that nodes are taken away."""
        now = time.monotonic()
        self.told(Notice("drain", "node drain", now, now + (self._jit.grace if left is None else left)), nodes, echo=False)

    def listen(self) -> None:
        """A thread: what another rank was told."""
        try:
            self._listen(self._line.clone())
        except errors.StoreLost as error:
            log.debug("the news of the other ranks can no longer be heard: %s", error)

    def _listen(self, line: Line) -> None:
        while not self._closed:
            news = line.agreement.heard(_LISTEN)
            if news is not None and news.get("rank") != self._line.rank:
                now = time.monotonic()
                left = float(news.get("left", self._jit.grace))  # the clocks of two nodes may differ by seconds
                notice = Notice(f"rank {news.get('rank')}", str(news.get("reason")), now, now + left)
                self.told(notice, news.get("nodes", {}), announce=False, echo=not news.get("drain"))

    def told(self, notice: Notice, nodes: Mapping[str, Sequence[int]], *, announce: bool = True, echo: bool = True) -> None:
        """`echo`: Ray does not know of it yet. What Ray itself says (a drain) it says to every rank, and in its own words."""
        with self._lock:
            first = self.latch.notice is None
            if self._closed or not self.latch.offer(notice):
                return
        if echo:
            self._echo.say(self.left(), nodes)
        if first:
            self.speak()
            args = (notice, dict(nodes) if announce else None)
            threading.Thread(target=self._serve, args=args, name="lastcall-notice", daemon=True).start()

    @property
    def native(self) -> bool:
        """Whether the script handles a preemption itself. All ranks know it at the same report: get_preemption_info() is a barrier."""
        return self.flow is not None and self.flow.native

    @property
    def how(self) -> str:
        """What brought about the save that is being made."""
        if self.replaying:
            return decisions.REPLAY
        if self._plan is None or self._plan["how"] in (decisions.REPLAY, decisions.PERIOD, decisions.STATE):
            return "the script's own period"
        return str(self._plan["how"])

    def close(self) -> None:
        self._closed = True
        self.boundary.remove()

    # ---- time --------------------------------------------------------------------------------------------------------------------

    @property
    def deadline(self) -> float:
        notice = self.latch.notice
        assert notice is not None and notice.deadline is not None
        return notice.deadline

    def left(self) -> float:
        return self.deadline - time.monotonic()

    def since_notice(self) -> float:
        notice = self.latch.notice
        return 0.0 if notice is None else time.monotonic() - notice.at

    def reserve(self) -> float:
        """What must be left when a save begins: the save itself, and two polls of the controller until it is committed."""
        return 1.3 * self.save_seconds + 2 * internals.poll_seconds() + 1.0

    # ---- the agent's thread --------------------------------------------------------------------------------------------------------

    def _serve(self, notice: Notice, nodes: dict[str, Any] | None) -> None:
        try:
            wait = budget.wait_within(self._jit.kill_wait, self.left(), self.reserve())
            self._say(notice, wait, nodes is not None)
            if nodes is not None:
                self._announce(notice, nodes)
            if not self.begun.wait(wait):
                self._save(notice)
        except errors.StoreLost as error:
            log.warning("Nothing is saved after %s: the controller is gone, and the run with it (%s)", notice.reason, error)
        except Exception:
            log.exception("The notice could not be served; the run goes on until it is stopped")
        finally:
            self.boundary.release()

    def _announce(self, notice: Notice, nodes: dict[str, Any]) -> None:
        left = self.left()
        news = {"rank": self._line.rank, "reason": notice.reason, "nodes": nodes, "left": left, "deadline": time.time() + left}
        self._line.agreement.announce({**news, "drain": notice.source == "drain"})

    def _say(self, notice: Notice, wait: float, own: bool) -> None:
        cut = "" if wait == self._jit.kill_wait else f" (instead of {self._jit.kill_wait:.1f}s: {self.left():.1f} s are left)"
        if own:
            what = notice.reason[:1].upper() + notice.reason[1:]
            log.info("%s received, initiating JIT checkpoint in %.1fs%s", what, wait, cut)
        else:
            log.info(
                "%s was told to stop (%s): rank %d saves, too, in %.1fs",
                notice.source.capitalize(),
                notice.reason,
                self._line.rank,
                wait,
            )

    def _save(self, notice: Notice) -> None:
        plan = self._agree("step", decisions.first)
        if plan["how"] == decisions.OWN and not self._begins(plan["within"]) and not self.native:
            plan = self._agree("again", decisions.again)
        if plan["how"] == decisions.NATIVE or self.native:
            return
        if not self._begins(max(0.0, self.left() - 0.5)):
            log.error(
                "The training loop did not come to a save in time: nothing was saved after the notice (%s). A restart begins from the "
                "last checkpoint that was reported. Report one more often, or raise the grace: export LASTCALL_GRACE_SECONDS=%d",
                notice.reason,
                round(2 * self._jit.grace),
            )

    def _begins(self, seconds: float) -> bool:
        return self.begun.wait(min(seconds, max(0.0, self.left() - 0.5)))

    def _agree(self, name: str, decide: Any) -> dict[str, Any]:
        """The step at which all ranks save, and how. The training thread stops at its next step until it is known."""
        left = max(0.0, self.left() - self.reserve())
        expected = None if self.expected is None else max(0.0, self.expected - time.monotonic())
        mine = {"step": self.boundary.hold(), "seconds": expected, "inside": self._own.inside, **self._own.position()}
        mine["native"] = self.native
        mine["checkpoints"] = bool(mine.get("checkpoints")) or (self.flow is not None and self.flow.own)
        until = time.monotonic() + min(_AGREE_SECONDS, max(0.5, left))
        plan = self._line.agreement.settle(name, mine, lambda said: decide(said, left), until, self._line.gone)
        if plan is None:
            raise errors.StoreLost("the ranks cannot agree")
        if not plan:
            raise RuntimeError("the ranks came to no decision")
        leaves = plan["how"] in (decisions.NATIVE, decisions.PERIOD)
        what = "leaves the save to the script" if leaves else f"saves after step {plan['step']} of this process"
        log.info("Rank %d %s (%s): %s", self._line.rank, what, plan["how"], plan["because"])
        self._plan = plan
        self.boundary.release()
        return plan

    # ---- the training thread -----------------------------------------------------------------------------------------------------

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
        if plan is None or self.boundary.steps < plan["step"] or self.begun.is_set() or self.native:
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
        if not self.begun.is_set():
            log.error("The script's own save could not be replayed: %s", because)
            self.failed(because)
            self.fall_back(because)

    @harmless
    def _save_state(self, _frame: FrameType) -> None:
        self.boundary.before = None
        assert self._plan is not None
        self.fall_back(self._plan["because"])
