"""From a report() to a checkpoint that the next incarnation starts from; and then to the restart, without
another step of training."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Any

from lastcall import errors, messages
from lastcall.adapters.ray import internals
from lastcall.adapters.ray.saves import uncommitted
from lastcall.adapters.ray.worker import connection, decisions
from lastcall.adapters.ray.worker.connection import Line
from lastcall.adapters.ray.worker.preemption_info import Echo
from lastcall.adapters.ray.worker.responder import ReportSave
from lastcall.core.ranks.agreement import Verdict

log = logging.getLogger("lastcall")
_KNOWN = 8  # names of reported checkpoints that are remembered
_INEXACT = {
    decisions.REPLAY: "replayed at a step boundary: batches since the last report are seen twice, none is "
    "skipped",
    decisions.STATE: "only model and optimizer are saved, or what was named: counts that were not named, "
    "schedulers, random numbers "
    "and the position in the data begin anew",
}
_NOT_ASKED = "the script has not called ray.train.get_checkpoint(): started again, it begins from scratch"


class Committing:
    """The training thread's. `done`: saved after a notice, and training goes on, since this Ray knows no
    preemption."""

    def __init__(self, context: Any, strategy: ReportSave, line: Line, echo: Echo) -> None:
        self.done = False
        # the state itself, where the script's own save fails
        self.fall_back: Callable[[str], None] = lambda because: None
        self._left_out = False
        self._context = context
        self._storage = context.storage_context
        self._strategy = strategy
        self._line = line
        self._echo = echo
        self._base = context.report_call_index
        self.known: list[str | None] = [internals.name_of(self._storage, context.checkpoint)]

    def number(self) -> int:
        """Of the last report of this incarnation that Ray has seen; the same on all ranks, and in the
        controller."""
        return int(self._context.report_call_index - self._base)

    def reported(self, checkpoint: Any) -> None:
        self.known = [*self.known, internals.name_of(self._storage, checkpoint)][-_KNOWN:]

    # ---- all ranks are there -------------------------------------------------------------------------------

    def commit(self, settled: dict[str, Any], given: Any) -> None:
        """The report is made. Does not return, unless training is to go on."""
        try:
            self._commit(self.number(), settled, given)
        except Exception as error:
            log.exception("It is not known whether the checkpoint was committed")
            self._strategy.not_saved(f"it is not known whether the checkpoint was committed: {error}")
        self.stop()

    def _commit(self, number: int, settled: dict[str, Any], given: Any) -> None:
        strategy, lowest = self._strategy, settled["saving"][0] == self._line.rank
        self._wait_for_upload()
        uploaded = self.everybody(f"uploaded/{number}").ok
        if uploaded and lowest:
            uncommitted.leave(self._storage, self._context.checkpoint, self.known, self.facts())
        committed = self._committed(number)
        if committed:
            self.saved()
        if committed and lowest:
            uncommitted.forget(self._storage)
            uncommitted.record(self._storage, self._context.checkpoint, self.facts())
        if given is not None:
            internals.remove_local(given, self._storage)
        name = str(internals.name_of(self._storage, self._context.checkpoint))
        if not committed:
            log.error(
                "The controller did not commit the checkpoint in time. It is kept, and found when the "
                "run starts again"
            )
        elif lowest:
            log.info(
                "JIT checkpoint completed in %.1fs (%s, committed with the controller; %s)",
                strategy.since_notice(),
                name,
                strategy.how,
            )
        if committed:
            strategy.saved(name, "is committed", self.facts())
        elif uploaded:
            strategy.saved(name, "is kept for the next incarnation", self.facts())
        else:
            strategy.not_saved("not all ranks have uploaded their part")

    def _wait_for_upload(self) -> None:
        """With an asynchronous upload, report() comes back before it has begun."""
        context = self._context
        with context.report_order_condition:
            context.report_order_condition.wait_for(
                lambda: context.current_report_index >= context.report_call_index,
                max(1.0, self._strategy.left()),
            )

    def _committed(self, number: int) -> bool:
        try:
            return (
                self._line.agreement.wait_for(f"committed/{number}", max(1.0, self._strategy.left()))
                is not None
            )
        except errors.StoreLost:
            return False

    # ---- a rank is missing ---------------------------------------------------------------------------------

    def without(self, number: int, settled: dict[str, Any], given: Any) -> None:
        """The last resort: the checkpoint is persisted without Ray's barrier, and found by the next
        incarnation."""
        missing = messages.named(settled["missing"])
        if settled["failed"]:
            self.fall_back(settled["failed"])
        if not settled["saving"]:
            if not self._left_out:
                log.warning(
                    "%s did not come to a report: reports without a checkpoint are left out from now on",
                    missing.capitalize(),
                )
            self._left_out = True
            return
        try:
            self._keep(number, settled, given, missing)
        except Exception as error:
            log.exception("Nothing was saved")
            self._strategy.not_saved(str(error))
        self.stop()

    def _keep(self, number: int, settled: dict[str, Any], given: Any, missing: str) -> None:
        flaw = decisions.flaw(
            settled, internals.files_of(self._context.checkpoint) if self._context.checkpoint else None
        )
        if flaw:
            log.error("Nothing was saved: what the ranks have brought is no checkpoint, since %s", flaw)
            self._strategy.not_saved(flaw)
            return
        if given is not None:
            self._context.checkpoint = self._storage.persist_current_checkpoint(given, settled["name"])
        self.everybody(f"kept/{number}")
        self.saved()
        if settled["saving"][0] == self._line.rank:
            uncommitted.leave(self._storage, self._context.checkpoint, self.known, self.facts())
            log.info(
                "JIT checkpoint completed without %s (%s, for the next incarnation to find)",
                missing,
                settled["name"],
            )
        self._strategy.saved(
            settled["name"], f"is kept for the next incarnation, without {missing}", self.facts()
        )

    # ---- both ----------------------------------------------------------------------------------------------

    def everybody(self, name: str, trouble: str = "") -> Verdict:
        """Whether all ranks have come to this point, and without trouble; a barrier that ends with the
        deadline."""
        until = time.monotonic() + max(1.0, self._strategy.left())
        return self._line.agreement.vote(name, not trouble, trouble, until, self._line.gone)

    def facts(self, how: str | None = None) -> dict[str, Any]:
        """`how`: where it is not what was planned. A save of the script's own is exact as far as the script's
        own checkpoint goes."""
        strategy = self._strategy
        notice = strategy.latch.notice
        how = how or strategy.how
        forgotten = how != decisions.FRAMEWORK and strategy.flow is not None and not strategy.flow.asked
        because = _INEXACT.get(how) or (_NOT_ASKED if forgotten else "")
        return {
            "step": strategy.boundary.steps,
            "reason": notice.reason if notice is not None else "",
            "how": how,
            "exact": not because,
            "because": because,
        }

    def saved(self) -> None:
        """The controller learns that this notice was answered: what fails from now on fails since the run is
        about to be restarted."""
        try:
            self._line.agreement.tell(connection.SAVED, {})
        except errors.StoreLost as error:
            log.debug("the controller cannot be told: %s", error)

    def stop(self) -> None:
        """No step more: it would be thrown away. The controller restarts the run at its next poll. Returning
        or raising would end the run instead: as finished, or as failed."""
        if self._echo.degraded:
            self.done = True
            self._strategy.go_on()
            return
        self._echo.say(0.0, {})
        self._strategy.leave()
        park()


def park() -> None:
    """For ever: Ray kills the process."""
    threading.Event().wait()
