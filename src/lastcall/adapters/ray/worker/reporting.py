"""ctx.report after a notice: all ranks are there, or nobody waits for those who are not.

Ray's report() is a barrier without a time-out: with a rank that has died, the others wait for ever. So after
a notice the ranks first meet in our own store. A rank that was in Ray's barrier already when it heard the
notice is spoken for by its agent: the others then go there, too. The first report of which any rank has a
checkpoint is the save, whether we brought it about or the script's own period.
"""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

from lastcall.adapters.ray import internals
from lastcall.adapters.ray.never_raise import harmless
from lastcall.adapters.ray.saves.script_save import OwnSave
from lastcall.adapters.ray.worker import decisions
from lastcall.adapters.ray.worker.committing import Committing
from lastcall.adapters.ray.worker.connection import Line
from lastcall.adapters.ray.worker.responder import ReportSave

log = logging.getLogger("lastcall")
_FILES = 1000  # names of a checkpoint's files that are compared
_NOBODY: dict[str, Any] = {"missing": [], "failed": "", "saving": [], "torn": False, "files": []}


class Reporting:
    """The training thread's, but for speak()."""

    def __init__(
        self, context: Any, strategy: ReportSave, line: Line, own: OwnSave, committing: Committing
    ) -> None:
        self._context = context
        self._strategy = strategy
        self._line = line
        self._own = own
        self._committing = committing
        self._real = context.report
        self._ours = self.report  # one object, so that we know it when we see it
        self._lock = threading.Lock()
        # a report that went through before the notice was heard
        self._under_way: dict[str, Any] | None = None
        self._finished = 0  # the last report that is over
        self._spoken: _Spoken | None = None
        self._calls = 0  # of report(), the same on all ranks: a report that is left out counts, unlike in Ray
        self._last = time.monotonic()
        self._plain = False  # a report without a checkpoint was seen

    def begin(self) -> None:
        self._context.report = self._ours
        self._strategy.speak = self.speak

    def end(self) -> None:
        if vars(self._context).get("report") is self._ours:
            del self._context.report

    def report(self, metrics: Any, checkpoint: Any = None, *args: Any, **kwargs: Any) -> None:
        """In the place of Ray's. What Ray's own raises is raised; nothing of ours is."""
        frame = sys._getframe(1)
        committing = self._committing
        self._calls += 1
        number = self._calls
        word = {"number": number, "checkpoint": checkpoint is not None, "replayed": self._strategy.replaying}
        with self._lock:
            through = committing.done or not self._strategy.latch.raised or self._strategy.native
            self._under_way = word if through else None
        settled = None if through else self._settled(word, checkpoint)
        if settled is not None and (settled["missing"] or settled["torn"]):
            committing.without(number, settled, checkpoint)
            return
        began = time.monotonic()
        self._real(metrics, checkpoint, *args, **kwargs)
        with self._lock:
            self._under_way = None
            self._finished = number
            spoken = self._spoken
        if settled is None and spoken is not None and not committing.done and not self._strategy.native:
            settled = spoken.result()
            if settled["missing"]:  # and Ray's barrier was released: nothing was reported
                committing.without(number, settled, checkpoint)
                return
        if settled is not None and settled["saving"]:
            committing.commit(settled, checkpoint)
        self._passed(frame, checkpoint is not None, time.monotonic() - began)

    @harmless
    def _settled(self, word: dict[str, Any], checkpoint: Any) -> dict[str, Any]:
        return self._meet(self._line, {**word, "files": internals.files_of(checkpoint)[:_FILES]})

    def failed(self, because: str) -> None:
        """The script's own save could not be run here. Those who wait for this rank at its report learn
        it."""
        self._calls += 1
        self._meet(self._line, {"number": self._calls, "checkpoint": False, "failed": because})

    def speak(self) -> None:
        """From the agent: a notice was heard. If the training thread is in Ray's barrier, the others learn it
        from us; and if it has just come out of it: a rank that was a little slower, or heard the notice a
        little sooner, waits for our word on that report."""
        if self._strategy.native:
            return  # nobody waits for anybody
        with self._lock:
            if self._finished:
                word = {"number": self._finished, "checkpoint": False, "passed": True}
                _Spoken(self._meet, self._line, word, lambda: None)
            if self._under_way is not None:
                word = {**self._under_way, "inside": True}
                self._spoken = _Spoken(
                    self._meet, self._line, word, lambda: internals.release_barrier(self._context)
                )

    def _meet(self, line: Line, word: dict[str, Any]) -> dict[str, Any]:
        def decide(said: dict[int, dict[str, Any]]) -> dict[str, Any]:
            return {
                **decisions.report(said, line.size),
                "name": internals.new_name(self._context.storage_context),
            }

        until = time.monotonic() + max(1.0, self._strategy.left() - 2 * internals.poll_seconds())
        found = line.agreement.settle(f"report/{word['number']}", word, decide, until, line.gone)
        if not found:
            return _NOBODY  # the controller's store is gone, and the run with it
        if found["saving"]:
            self._strategy.begin()
        return found

    @harmless
    def _passed(self, frame: FrameType, saved: bool, seconds: float) -> None:
        """Learn from a report that is over: how long a save takes, when the next report is due, where the
        script is."""
        strategy, now = self._strategy, time.monotonic()
        if saved:
            if strategy.flow is not None:
                strategy.flow.reported = True
            strategy.save_seconds = seconds
            self._committing.reported(self._context.checkpoint)
        self._plain = self._plain or not saved
        # Where every report so far had a checkpoint, the save point may be passed much more often than it is
        # taken.
        strategy.expected = (
            now + (now - self._last) if self._plain and self._committing.number() > 1 else None
        )
        self._last = now
        self._own.remember(frame)
        if not strategy.boundary.installed and "torch" in sys.modules:
            strategy.boundary.install()  # at the same report on all ranks, so that they count alike
        if not strategy.boundary.optimizers:
            strategy.boundary.passed(frame)


class _Spoken:
    """What the ranks settle on a report that one of them is in already, on a thread: it waits for all of
    them. `release`: called where one of them will never come, to get the training thread out of Ray's
    barrier."""

    def __init__(
        self,
        meet: Callable[[Line, dict[str, Any]], dict[str, Any]],
        line: Line,
        word: dict[str, Any],
        release: Callable[[], None],
    ) -> None:
        self._found: dict[str, Any] = _NOBODY
        self._thread = threading.Thread(
            target=self._run, args=(meet, line, word, release), name="lastcall-spoken", daemon=True
        )
        self._thread.start()

    @harmless
    def _run(self, meet: Any, line: Line, word: dict[str, Any], release: Callable[[], None]) -> None:
        own = line.clone()
        self._found = meet(own, word)
        own.close()
        if self._found["missing"]:
            release()

    def result(self) -> dict[str, Any]:
        self._thread.join()
        return self._found
