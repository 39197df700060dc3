"""Where the script has no save that can be run: the state itself, in a format of ours, beside Ray's
checkpoints.

The script never receives it as a checkpoint: its own code could not read it. Model and optimizer are restored
before their first use (restoring.py), the values of lastcall.ray.protect(...) at that call.
"""

from __future__ import annotations

import logging
import time
from typing import Any

from lastcall.adapters.ray import internals
from lastcall.adapters.ray.never_raise import never_raises
from lastcall.adapters.ray.saves import uncommitted
from lastcall.adapters.ray.worker import decisions
from lastcall.adapters.ray.worker.committing import Committing
from lastcall.adapters.ray.worker.connection import RankConnection
from lastcall.adapters.ray.worker.responder import ReportSave

log = logging.getLogger("lastcall")
_ATTRIBUTE = "_lastcall_fallback"  # of Ray's train context


class Fallback:
    """The training thread's, except for restore()."""

    def __init__(
        self, context: Any, strategy: ReportSave, committing: Committing, connection: RankConnection
    ) -> None:
        self._context = context
        self._storage = context.storage_context
        self._strategy = strategy
        self._committing = committing
        self._connection = connection
        self._named: dict[str, Any] = {}
        self._restoring: Any = None

    # ---- the start of an incarnation -----------------------------------------------------------------------

    @never_raises
    def restore(self) -> None:
        """If the last incarnation has left a state, begin to restore it."""
        folder, facts = uncommitted.find_state(self._storage, self._context.checkpoint, self._given())
        if folder is None:
            return
        from lastcall.adapters.ray.saves import restoring, state

        path = f"{self._storage.experiment_fs_path}/{folder}"
        body = state.read(self._storage.storage_filesystem, path, self._connection.rank)
        self._restoring = restoring.Restoring(body, str(facts.get("reason")), self._has_own)
        self._restoring.begin()

    def _given(self) -> dict[str, str]:
        return uncommitted.arguments(self._context.train_run_context.train_loop_config)

    def _has_own(self) -> bool:
        use = self._strategy.api_use
        return use is not None and use.own_checkpoints

    def end(self) -> None:
        if self._restoring is not None:
            self._restoring.end()

    def name(self, values: dict[str, Any]) -> None:
        self._named.update(values)
        if self._restoring is not None:
            self._restoring.named(values)

    # ---- after a notice ------------------------------------------------------------------------------------

    @never_raises
    def save(self, because: str) -> None:
        """Does not return where the state was saved, unless training is to continue."""
        until = time.monotonic() + max(1.0, self._strategy.left())
        mine = {"useless": self._has_own() and not self._named}
        agreed = self._connection.agreement.settle("state", mine, _folder, until, self._connection.dead)
        if agreed and not agreed["folder"]:
            log.error(
                "lastcall saved nothing (%s), since this run has checkpoints of its own: training continues, "
                "and a restart resumes from the last one that was reported",
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
        nbytes, objection = 0, ""
        try:
            nbytes = self._write(f"{self._storage.experiment_fs_path}/{folder}")
        except Exception as error:
            log.exception("Could not save the state")
            objection = f"{type(error).__name__}: {error}"
        verdict = self._committing.vote("written", objection)
        if not verdict.ok:
            log.error("Nothing was saved: %s", verdict.because)
            self._strategy.not_saved(verdict.because)
            return False
        if self._connection.rank == 0:
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

        if self._connection.rank != 0 and state.alike_on_all_ranks():
            return 0
        return state.write(
            self._storage.storage_filesystem, folder, self._connection.rank, state.captured(self._named)
        )


def _folder(answers: dict[int, dict[str, Any]]) -> dict[str, str]:
    """Where all ranks write; nowhere, if the script of one of them will resume from a checkpoint of its
    own."""
    useless = any(answer.get("useless") for answer in answers.values())
    return {"folder": "" if useless else f"{uncommitted.STATES}{time.time_ns()}"}


def current() -> Fallback | None:
    """That of this process, if it is a train worker that is protected."""
    return getattr(internals.train_context(), _ATTRIBUTE, None)


def install(context: Any, fallback: Fallback) -> None:
    setattr(context, _ATTRIBUTE, fallback)
