"""The controller's part: the store in which the ranks meet, and what only the controller knows: which ranks
are dead, and what is committed."""

from __future__ import annotations

import logging
import os
from typing import Any

import ray

from lastcall import errors
from lastcall.adapters.ray import internals
from lastcall.adapters.ray.saves import uncommitted
from lastcall.adapters.ray.worker import connection as connections
from lastcall.adapters.ray.worker.connection import RankConnection
from lastcall.core.process import logs
from lastcall.core.store.server import StoreServer
from lastcall.settings import JITCheckpointConfig

log = logging.getLogger("lastcall")


class Controller:
    """In the controller's process, for the whole run. Each worker group is an incarnation, with keys of its
    own."""

    def __init__(self, jit: JITCheckpointConfig, run: Any = None) -> None:
        """`run`: Ray's TrainRunContext."""
        self._visible = logs.Visible(jit.log_level)
        self._secret = os.urandom(16).hex()
        self._server = StoreServer(secret=self._secret)
        self._incarnation = 0
        self._connection: RankConnection | None = None
        self._reports = 0
        self._noticed = False
        self._run = run

    def start(self) -> None:
        self._visible.__enter__()
        self._server.start()

    def stop(self) -> None:
        if self._connection is not None:
            self._connection.close()
        self._server.stop()
        self._visible.__exit__()

    def finished(self, result: Any) -> None:
        """The run is over. One that failed may be submitted again, and then resumes from what it left."""
        if self._run is not None and result is not None and result.error is None:
            uncommitted.forget_state(self._run.run_config.storage_context)

    def next_incarnation(self) -> dict[str, Any]:
        """A new worker group is about to start. Returns where its ranks meet."""
        self._incarnation += 1
        self._reports = 0
        self._noticed = False
        address = {
            "host": internals.address(),
            "port": self._server.address[1],
            "secret": self._secret,
            "incarnation": self._incarnation,
        }
        if self._connection is not None:
            self._connection.close()
        self._connection = connections.connect({**address, "host": "127.0.0.1"}, -1, 0)
        return address

    def reported(self, checkpoint: Any) -> None:
        """All ranks have delivered their report, and the checkpoint manager has registered its checkpoint."""
        self._reports += 1
        if self._connection is not None and checkpoint is not None:
            self._connection.agreement.tell(f"committed/{self._reports}", {"path": str(checkpoint.path)})

    def polled(self, status: Any) -> None:
        """Before the controller itself reads the status. After a notice a dead worker was preempted, whatever
        Ray calls its death: where a node's raylet ends some milliseconds before the announced deadline, Ray
        2.60 calls that a failure, charges max_failures and fails the run. The errors of the other ranks that
        follow (a collective without its peer) are a consequence of it; so is an error after a save answered
        the notice, since that ends this incarnation. Any other error is the script's own, and is charged."""
        workers = status.worker_statuses
        self._noticed = self._noticed or any(
            getattr(worker, "preemption_info", None) is not None for worker in workers.values()
        )
        for rank, worker in workers.items():
            if worker.error is None:
                continue
            death = internals.actor_death(worker.error)
            if death is not None and self._connection is not None:
                self._connection.mark_dead(rank)
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
        if self._connection is None:
            return False
        try:
            return self._connection.agreement.wait_for(connections.SAVED, 0.0) is not None
        except errors.StoreLost:
            return False

    def _notice(self) -> bool:
        """Whether there was one in this incarnation. Perhaps only the rank that is dead now received and
        announced it."""
        if not self._noticed and self._connection is not None:
            try:
                self._noticed = self._connection.agreement.heard(0.0) is not None
            except errors.StoreLost:
                log.debug("Could not read our own store")
        return self._noticed
