"""The controller's part: the store in which the ranks meet, and what only the controller knows: who is dead,
and what is committed."""

from __future__ import annotations

import logging
import os
from typing import Any

import ray

from lastcall import errors
from lastcall.adapters.ray import internals
from lastcall.adapters.ray.saves import uncommitted
from lastcall.adapters.ray.worker import connection
from lastcall.core.process import logs
from lastcall.core.store.server import StoreServer
from lastcall.settings import JITCheckpointConfig

log = logging.getLogger("lastcall")


class Controller:
    """In the controller's process, for the whole run. Each worker group is an incarnation with keys of its
    own."""

    def __init__(self, jit: JITCheckpointConfig, run: Any = None) -> None:
        """`run`: Ray's TrainRunContext."""
        self._visible = logs.Visible(jit.log_level)
        self._secret = os.urandom(16).hex()
        self._server = StoreServer(secret=self._secret)
        self._incarnation = 0
        self._line: connection.Line | None = None
        self._reports = 0
        self._noticed = False
        self._run = run

    def start(self) -> None:
        self._visible.__enter__()
        self._server.start()

    def stop(self) -> None:
        if self._line is not None:
            self._line.close()
        self._server.stop()
        self._visible.__exit__()

    def finished(self, result: Any) -> None:
        """The run is over. One that failed may be submitted again, and then goes on from what it left."""
        if self._run is not None and result is not None and result.error is None:
            uncommitted.forget_state(self._run.run_config.storage_context)

    def next_incarnation(self) -> dict[str, Any]:
        """A new worker group is about to start: where its ranks meet."""
        self._incarnation += 1
        self._reports = 0
        self._noticed = False
        place = {
            "host": internals.address(),
            "port": self._server.address[1],
            "secret": self._secret,
            "incarnation": self._incarnation,
        }
        if self._line is not None:
            self._line.close()
        self._line = connection.connect({**place, "host": "127.0.0.1"}, -1, 0)
        return place

    def reported(self, checkpoint: Any) -> None:
        """All ranks have delivered their report, and the checkpoint manager has registered what came with
        it."""
        self._reports += 1
        if self._line is not None and checkpoint is not None:
            self._line.agreement.tell(f"committed/{self._reports}", {"path": str(checkpoint.path)})

    def polled(self, status: Any) -> None:
        """Before the controller itself looks at it. After a notice a dead worker was preempted, whatever Ray
        calls its death: where a node's raylet ends some milliseconds before the announced deadline, Ray 2.60
        calls that a failure, charges max_failures and fails the run. What the others then fail of (a
        collective without its peer) is a consequence of it; and so is what fails once the notice was answered
        by a save, which ends this incarnation. Any other error is the script's own, and is charged."""
        workers = status.worker_statuses
        self._noticed = self._noticed or any(
            getattr(worker, "preemption_info", None) is not None for worker in workers.values()
        )
        for rank, worker in workers.items():
            if worker.error is None:
                continue
            death = internals.actor_death(worker.error)
            if death is not None and self._line is not None:
                self._line.bury(rank)
            # an older Ray has no budget for preemptions
            if not hasattr(status, "has_preempted_worker") or not self._notice():
                continue
            if death is None:
                if not internals.lost_peer(worker.error) and not self._saved():
                    continue
                log.warning(
                    "Rank %d failed after the notice, and the run is about to be restarted: %s",
                    rank,
                    worker.error,
                )
                worker.error = death = ray.exceptions.RayActorError(error_msg=str(worker.error))
            death._preempted = True

    def _saved(self) -> bool:
        try:
            return self._line is not None and self._line.agreement.wait_for(connection.SAVED, 0.0) is not None
        except errors.StoreLost:
            return False

    def _notice(self) -> bool:
        """Whether there was one in this incarnation. Perhaps only the rank that is dead now knew of it, and
        told the others."""
        if not self._noticed and self._line is not None:
            try:
                self._noticed = self._line.agreement.heard(0.0) is not None
            except errors.StoreLost:
                log.debug("our own store cannot be read")
        return self._noticed
