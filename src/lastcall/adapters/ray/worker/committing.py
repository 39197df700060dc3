"""From a report() to a checkpoint that the next incarnation resumes from; and then to the restart, without a
further step of training."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Any

from lastcall import errors, messages
from lastcall.adapters.ray import internals
from lastcall.adapters.ray.saves import uncommitted
from lastcall.adapters.ray.worker import connection as connections
from lastcall.adapters.ray.worker import decisions
from lastcall.adapters.ray.worker.connection import RankConnection
from lastcall.adapters.ray.worker.preemption_info import PreemptionInfoWriter
from lastcall.adapters.ray.worker.responder import ReportSave
from lastcall.core.ranks.agreement import Verdict

log = logging.getLogger("lastcall")
_KNOWN = 8  # names of reported checkpoints that are remembered
_INEXACT = {
    decisions.REPLAY: "replayed at a step boundary: batches since the last report are seen twice, none is "
    "skipped",
    decisions.STATE: "only model and optimizer are saved, or what was named: counts that were not named, "
    "schedulers, random numbers and the position in the data start from scratch",
}
_NOT_ASKED = "the script has not called ray.train.get_checkpoint(): after a restart it begins from scratch"


class Committing:
    """The training thread's. `done`: saved after a notice, and training continues, since this Ray knows no
    preemption."""

    def __init__(
        self,
        context: Any,
        strategy: ReportSave,
        connection: RankConnection,
        info_writer: PreemptionInfoWriter,
    ) -> None:
        self.done = False
        # saves the state itself, where the script's own save fails
        self.fall_back: Callable[[str], None] = lambda because: None
        self._skipping = False  # reports without a checkpoint
        self._context = context
        self._storage = context.storage_context
        self._strategy = strategy
        self._connection = connection
        self._info_writer = info_writer
        self._base = context.report_call_index
        self.known: list[str | None] = [internals.name_of(self._storage, context.checkpoint)]

    def number(self) -> int:
        """Of the last report of this incarnation that reached Ray; the same on all ranks, and in the
        controller."""
        return int(self._context.report_call_index - self._base)

    def reported(self, checkpoint: Any) -> None:
        self.known = [*self.known, internals.name_of(self._storage, checkpoint)][-_KNOWN:]

    # ---- all ranks take part -------------------------------------------------------------------------------

    def commit(self, settled: dict[str, Any], given: Any) -> None:
        """Ray has the report. Does not return, unless training is to continue."""
        try:
            self._commit(self.number(), settled, given)
        except Exception as error:
            log.exception("It is not known whether the checkpoint was committed")
            self._strategy.not_saved(f"it is not known whether the checkpoint was committed: {error}")
        self.stop()

    def _commit(self, number: int, settled: dict[str, Any], given: Any) -> None:
        strategy, lowest = self._strategy, settled["saving"][0] == self._connection.rank
        self._wait_for_upload()
        uploaded = self.vote(f"uploaded/{number}").ok
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
                "The controller did not commit the checkpoint in time. It is kept, and the next start of the "
                "run finds it"
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
        """With an asynchronous upload, report() returns before it has begun."""
        context = self._context
        with context.report_order_condition:
            context.report_order_condition.wait_for(
                lambda: context.current_report_index >= context.report_call_index,
                max(1.0, self._strategy.left()),
            )

    def _committed(self, number: int) -> bool:
        timeout = max(1.0, self._strategy.left())
        try:
            return self._connection.agreement.wait_for(f"committed/{number}", timeout) is not None
        except errors.StoreLost:
            return False

    # ---- a rank is missing ---------------------------------------------------------------------------------

    def without(self, number: int, settled: dict[str, Any], given: Any) -> None:
        """The last resort: the checkpoint is persisted without Ray's barrier, and the next incarnation finds
        it."""
        missing = messages.named(settled["missing"])
        if settled["failed"]:
            self.fall_back(settled["failed"])
        if not settled["saving"]:
            if not self._skipping:
                log.warning(
                    "%s never reached train.report(): skipping further reports without a checkpoint",
                    missing.capitalize(),
                )
            self._skipping = True
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
            log.error("Nothing was saved: the ranks have no whole checkpoint, since %s", flaw)
            self._strategy.not_saved(flaw)
            return
        if given is not None:
            self._context.checkpoint = self._storage.persist_current_checkpoint(given, settled["name"])
        self.vote(f"kept/{number}")
        self.saved()
        if settled["saving"][0] == self._connection.rank:
            uncommitted.leave(self._storage, self._context.checkpoint, self.known, self.facts())
            log.info(
                "JIT checkpoint completed without %s (%s, kept for the next incarnation)",
                missing,
                settled["name"],
            )
        self._strategy.saved(
            settled["name"], f"is kept for the next incarnation, without {missing}", self.facts()
        )

    # ---- both ----------------------------------------------------------------------------------------------

    def vote(self, name: str, objection: str = "") -> Verdict:
        """Whether all ranks have reached this point, without an objection; a barrier that ends with the
        deadline."""
        until = time.monotonic() + max(1.0, self._strategy.left())
        return self._connection.agreement.vote(name, not objection, objection, until, self._connection.dead)

    def facts(self, how: str | None = None) -> dict[str, Any]:
        """`how`: where it differs from the plan. A save of the script's own is exact as far as the script's
        own checkpoint is."""
        strategy = self._strategy
        notice = strategy.latch.notice
        how = how or strategy.how
        use = strategy.api_use
        forgotten = how != decisions.FRAMEWORK and use is not None and not use.asked
        because = _INEXACT.get(how) or (_NOT_ASKED if forgotten else "")
        return {
            "step": strategy.boundary.steps,
            "reason": notice.reason if notice is not None else "",
            "how": how,
            "exact": not because,
            "because": because,
        }

    def saved(self) -> None:
        """Inform the controller that this notice was answered: what fails from now on fails because the run
        is about to be restarted."""
        try:
            self._connection.agreement.tell(connections.SAVED, {})
        except errors.StoreLost as error:
            log.debug("Could not inform the controller of the save: %s", error)

    def stop(self) -> None:
        """No further step: it would be lost. The controller restarts the run at its next poll. Returning or
        raising would end the run instead: as finished, or as failed."""
        if self._info_writer.degraded:
            self.done = True
            self._strategy.continue_training()
            return
        self._info_writer.write(0.0, {})
        self._strategy.leave()
        wait_for_kill()


def wait_for_kill() -> None:
    """Never returns: Ray kills the process."""
    threading.Event().wait()
