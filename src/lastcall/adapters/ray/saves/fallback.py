"""Where the script has no save that can be run: the state itself, in a format of ours, beside what Ray keeps.

Never a checkpoint that is handed to the script: its own code could not read it. Model and optimizer are put
back before their first use (restoring.py), and what was named in lastcall.ray.protect(...) at that call.
"""

from __future__ import annotations

import logging
import time
from typing import Any

from lastcall.adapters.ray import internals
from lastcall.adapters.ray.never_raise import harmless
from lastcall.adapters.ray.saves import uncommitted
from lastcall.adapters.ray.worker import decisions
from lastcall.adapters.ray.worker.committing import Committing
from lastcall.adapters.ray.worker.connection import Line
from lastcall.adapters.ray.worker.responder import ReportSave

log = logging.getLogger("lastcall")
_ATTRIBUTE = "_lastcall_fallback"  # of Ray's train context


class Fallback:
    """The training thread's, but for restore()."""

    def __init__(self, context: Any, strategy: ReportSave, committing: Committing, line: Line) -> None:
        self._context = context
        self._storage = context.storage_context
        self._strategy = strategy
        self._committing = committing
        self._line = line
        self._named: dict[str, Any] = {}
        self._restoring: Any = None

    # ---- the start of an incarnation -----------------------------------------------------------------------

    @harmless
    def restore(self) -> None:
        """If the last incarnation has left a state, have it put back."""
        folder, facts = uncommitted.find_state(self._storage, self._context.checkpoint, self._given())
        if folder is None:
            return
        from lastcall.adapters.ray.saves import restoring, state

        body = state.read(
            self._storage.storage_filesystem, f"{self._storage.experiment_fs_path}/{folder}", self._line.rank
        )
        self._restoring = restoring.Restoring(body, str(facts.get("reason")), self._own)
        self._restoring.begin()

    def _given(self) -> dict[str, str]:
        return uncommitted.arguments(self._context.train_run_context.train_loop_config)

    def _own(self) -> bool:
        return self._strategy.flow is not None and self._strategy.flow.own

    def end(self) -> None:
        if self._restoring is not None:
            self._restoring.end()

    def name(self, values: dict[str, Any]) -> None:
        self._named.update(values)
        if self._restoring is not None:
            self._restoring.named(values)

    # ---- after a notice ------------------------------------------------------------------------------------

    @harmless
    def save(self, because: str) -> None:
        """Does not return where the state was saved, unless training is to go on."""
        until = time.monotonic() + max(1.0, self._strategy.left())
        mine = {"useless": self._own() and not self._named}
        agreed = self._line.agreement.settle("state", mine, _place, until, self._line.gone)
        if agreed and not agreed["folder"]:
            log.error(
                "Nothing was saved by lastcall (%s), since this run has checkpoints of its own: training "
                "goes on, and a restart begins "
                "from the last one that was reported",
                because,
            )
        elif agreed and self._save(f"{uncommitted.FOLDER}/{agreed['folder']}", because):
            self._committing.saved()
            self._strategy.saved(
                agreed["folder"],
                "holds the state of model and optimizer",
                self._committing.facts(decisions.STATE),
            )
            self._committing.stop()

    def _save(self, folder: str, because: str) -> bool:
        self._strategy.begin()
        nbytes, trouble = 0, ""
        try:
            nbytes = self._write(f"{self._storage.experiment_fs_path}/{folder}")
        except Exception as error:
            log.exception("The state could not be saved")
            trouble = f"{type(error).__name__}: {error}"
        verdict = self._committing.everybody("written", trouble)
        if not verdict.ok:
            log.error("Nothing was saved: %s", verdict.because)
            self._strategy.not_saved(verdict.because)
            return False
        if self._line.rank == 0:
            facts = self._committing.facts(decisions.STATE)
            uncommitted.leave_state(self._storage, folder, self._committing.known, facts, self._given())
            uncommitted.clean(self._storage, uncommitted.STATES, folder)
            log.info(
                "JIT checkpoint completed in %.1fs (%.1f MB of model and optimizer, in lastcall's own "
                "format: %s)",
                self._strategy.since_notice(),
                nbytes / 1e6,
                because,
            )
        return True

    def _write(self, folder: str) -> int:
        from lastcall.adapters.ray.saves import state

        if self._line.rank != 0 and state.alike_on_all_ranks():
            return 0
        return state.write(
            self._storage.storage_filesystem, folder, self._line.rank, state.captured(self._named)
        )


def _place(said: dict[int, dict[str, Any]]) -> dict[str, str]:
    """Where all ranks write; nowhere, if the script of one of them will go on from a checkpoint of its
    own."""
    useless = any(word.get("useless") for word in said.values())
    return {"folder": "" if useless else f"{uncommitted.STATES}{time.time_ns()}"}


def current() -> Fallback | None:
    """That of this process, if it is a train worker that is protected."""
    return getattr(internals.train_context(), _ATTRIBUTE, None)


def install(context: Any, fallback: Fallback) -> None:
    setattr(context, _ATTRIBUTE, fallback)
