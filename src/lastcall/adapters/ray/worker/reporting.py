"""ctx.report after a notice: either all ranks take part, or the living ones do not wait for the missing.

Ray's report() is a barrier without a timeout: with a dead rank, the others wait forever. So after a notice
the ranks first meet in our own store. If a rank was in Ray's barrier already when its notice came, its agent
reports for it, by proxy, and the others join it there. The first report of which any rank has a checkpoint is
the save, whether lastcall caused it or the script's own period.
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
from lastcall.adapters.ray.never_raise import never_raises
from lastcall.adapters.ray.saves.script_save import OwnSave
from lastcall.adapters.ray.worker import decisions
from lastcall.adapters.ray.worker.committing import Committing
from lastcall.adapters.ray.worker.connection import RankConnection
from lastcall.adapters.ray.worker.responder import ReportSave

log = logging.getLogger("lastcall")
_FILES = 1000  # names of a checkpoint's files that are compared
_NO_SAVE: dict[str, Any] = {"missing": [], "failed": "", "saving": [], "torn": False, "files": []}


class Reporting:
    """The training thread's, except for report_by_proxy()."""

    def __init__(
        self,
        context: Any,
        strategy: ReportSave,
        connection: RankConnection,
        own: OwnSave,
        committing: Committing,
    ) -> None:
        self._context = context
        self._strategy = strategy
        self._connection = connection
        self._own = own
        self._committing = committing
        self._real = context.report
        self._ours = self.report  # one object, so that end() recognizes it
        self._lock = threading.Lock()
        # a report that Ray received before the notice came
        self._under_way: dict[str, Any] | None = None
        self._finished = 0  # the last report that is over
        self._proxy: _ReportProxy | None = None
        # of report(), the same on all ranks: unlike Ray's, it counts a report that is skipped
        self._calls = 0
        self._last = time.monotonic()
        self._plain = False  # there was a report without a checkpoint

    def begin(self) -> None:
        self._context.report = self._ours
        self._strategy.report_by_proxy = self.report_by_proxy

    def end(self) -> None:
        if vars(self._context).get("report") is self._ours:
            del self._context.report

    def report(self, metrics: Any, checkpoint: Any = None, *args: Any, **kwargs: Any) -> None:
        """Replaces Ray's. What Ray's own raises is raised; nothing of ours is."""
        frame = sys._getframe(1)
        committing = self._committing
        self._calls += 1
        number = self._calls
        mine = {"number": number, "checkpoint": checkpoint is not None, "replayed": self._strategy.replaying}
        with self._lock:
            through = committing.done or not self._strategy.latch.raised or self._strategy.native
            self._under_way = mine if through else None
        settled = None if through else self._settled(mine, checkpoint)
        if settled is not None and (settled["missing"] or settled["torn"]):
            committing.without(number, settled, checkpoint)
            return
        began = time.monotonic()
        self._real(metrics, checkpoint, *args, **kwargs)
        with self._lock:
            self._under_way = None
            self._finished = number
            proxy = self._proxy
        if settled is None and proxy is not None and not committing.done and not self._strategy.native:
            settled = proxy.result()
            if settled["missing"]:  # and Ray's barrier was released: nothing was reported
                committing.without(number, settled, checkpoint)
                return
        if settled is not None and settled["saving"]:
            committing.commit(settled, checkpoint)
        self._learn(frame, checkpoint is not None, time.monotonic() - began)

    @never_raises
    def _settled(self, mine: dict[str, Any], checkpoint: Any) -> dict[str, Any]:
        return self._agree(self._connection, {**mine, "files": internals.files_of(checkpoint)[:_FILES]})

    def failed(self, because: str) -> None:
        """The script's own save could not run here. The ranks that wait for this one at its report learn
        that."""
        self._calls += 1
        self._agree(self._connection, {"number": self._calls, "checkpoint": False, "failed": because})

    def report_by_proxy(self) -> None:
        """The agent's: a notice has come. If the training thread is in Ray's barrier, this informs the
        others; also if it has just left it, since a rank that is a little slower, or whose notice came a
        little sooner, waits for this rank at that report."""
        if self._strategy.native:
            return  # no rank waits for another
        with self._lock:
            if self._finished:
                passed = {"number": self._finished, "checkpoint": False, "passed": True}
                _ReportProxy(self._agree, self._connection, passed, lambda: None)
            if self._under_way is not None:
                inside = {**self._under_way, "inside": True}
                self._proxy = _ReportProxy(
                    self._agree, self._connection, inside, lambda: internals.release_barrier(self._context)
                )

    def _agree(self, connection: RankConnection, mine: dict[str, Any]) -> dict[str, Any]:
        def decide(answers: dict[int, dict[str, Any]]) -> dict[str, Any]:
            return {
                **decisions.report(answers, connection.size),
                "name": internals.new_name(self._context.storage_context),
            }

        until = time.monotonic() + max(1.0, self._strategy.left() - 2 * internals.poll_seconds())
        found = connection.agreement.settle(f"report/{mine['number']}", mine, decide, until, connection.dead)
        if not found:
            return _NO_SAVE  # the controller's store is gone, and the run with it
        if found["saving"]:
            self._strategy.begin()
        return found

    @never_raises
    def _learn(self, frame: FrameType, saved: bool, seconds: float) -> None:
        """From a report that is over: how long a save takes, when the next report is due, where the script
        is."""
        strategy, now = self._strategy, time.monotonic()
        if saved:
            if strategy.api_use is not None:
                strategy.api_use.reported = True
            strategy.save_seconds = seconds
            self._committing.reported(self._context.checkpoint)
        self._plain = self._plain or not saved
        # Where every report so far had a checkpoint, the script may pass its save point much more often than
        # it takes it.
        strategy.expected = (
            now + (now - self._last) if self._plain and self._committing.number() > 1 else None
        )
        self._last = now
        self._own.remember(frame)
        if not strategy.boundary.installed and "torch" in sys.modules:
            strategy.boundary.install()  # at the same report on all ranks, so that they count alike
        if not strategy.boundary.optimizers:
            strategy.boundary.passed(frame)


class _ReportProxy:
    """What the ranks settle on a report that one of them is in already, on a thread: it waits for all of
    them. `release`: called where one of them will never come, to get the training thread out of Ray's
    barrier."""

    def __init__(
        self,
        agree: Callable[[RankConnection, dict[str, Any]], dict[str, Any]],
        connection: RankConnection,
        mine: dict[str, Any],
        release: Callable[[], None],
    ) -> None:
        self._found: dict[str, Any] = _NO_SAVE
        self._thread = threading.Thread(
            target=self._run, args=(agree, connection, mine, release), name="lastcall-report", daemon=True
        )
        self._thread.start()

    @never_raises
    def _run(
        self, agree: Any, connection: RankConnection, mine: dict[str, Any], release: Callable[[], None]
    ) -> None:
        own = connection.clone()
        self._found = agree(own, mine)
        own.close()
        if self._found["missing"]:
            release()

    def result(self) -> dict[str, Any]:
        self._thread.join()
        return self._found
