"""Ranks as threads, each with a context like Ray's: a report() that is a barrier without a time-out, and a
controller that commits."""

from __future__ import annotations

import tempfile
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from ray.train import Checkpoint

from lastcall.adapters.ray.saves.script_save import OwnSave
from lastcall.adapters.ray.worker.api_use import ApiUse
from lastcall.adapters.ray.worker.committing import Committing
from lastcall.adapters.ray.worker.connection import RankConnection
from lastcall.adapters.ray.worker.preemption_info import PreemptionInfoWriter
from lastcall.adapters.ray.worker.reporting import Reporting
from lastcall.adapters.ray.worker.responder import ReportSave
from lastcall.core.store import memory
from lastcall.settings import JITCheckpointConfig
from lastcall.types import Notice

PATIENCE = 60.0


class Parked(Exception):
    """In the place of waiting for ever."""


class Context:
    """As much of Ray's TrainContext as is used."""

    def __init__(self, group: Group, rank: int) -> None:
        self.report_call_index = self.current_report_index = 3  # Ray goes on counting after a restart
        self.report_order_condition = threading.Condition()
        self.storage_context = group.storage
        self.checkpoint: Any = None
        self.train_run_context = SimpleNamespace(train_loop_config={"lr": 0.1})
        self.barrier_entered = threading.Event()
        self._group = group
        self._rank = rank

    def report(self, metrics: Any, checkpoint: Any = None) -> None:
        self.report_call_index += 1
        self.barrier_entered.set()
        try:
            self._group.barrier.wait(PATIENCE)
        except threading.BrokenBarrierError:
            if not self._group.released:
                raise
            self.report_call_index -= 1  # as Ray does it: this report is skipped
            return
        if checkpoint is not None:
            self.checkpoint = self.storage_context.persist_current_checkpoint(
                checkpoint, f"checkpoint_{self.report_call_index}"
            )
        self.current_report_index += 1
        self._group.delivered(self._rank, self.report_call_index - 3, self.checkpoint)

    def get_synchronization_actor(self) -> Any:
        return SimpleNamespace(reset=SimpleNamespace(remote=self._group.release))


class Group:
    def __init__(self, storage: Any, size: int, *, degraded: bool = False) -> None:
        self.storage = storage
        self.barrier = threading.Barrier(size)
        self.released = False
        self.committed: list[int] = []
        self._store = memory.MemoryStore()
        self._delivered: dict[int, int] = {}
        self._lock = threading.Lock()
        self._line = RankConnection(self._store, -1, 0)
        self.ranks = [Rank(self, rank, size, self._store, degraded) for rank in range(size)]

    def delivered(self, rank: int, number: int, checkpoint: Any) -> None:
        """The controller: a report is committed when all ranks have delivered it."""
        with self._lock:
            self._delivered[number] = self._delivered.get(number, 0) + 1
            if self._delivered[number] == len(self.ranks):
                self.committed.append(number)
                self._line.agreement.tell(f"committed/{number}", {})

    def release(self) -> None:
        self.released = True
        self.barrier.abort()

    def mark_dead(self, rank: int) -> None:
        self._line.mark_dead(rank)


class Rank:
    def __init__(self, group: Group, rank: int, size: int, store: memory.MemoryStore, degraded: bool) -> None:
        self.context: Any = Context(group, rank)
        if not degraded:
            self.context.preemption_context = type("Context", (), {"preemption_info": None})()
        line, own, self.writer = (
            RankConnection(store.clone(), rank, size),
            OwnSave(),
            PreemptionInfoWriter(self.context),
        )
        self.writer.begin(lambda left, nodes: None)
        self.api_use = ApiUse(self.context)
        self.api_use.asked = True  # as scripts do
        self.strategy = ReportSave(
            JITCheckpointConfig(kill_wait=0.0, environ={}), line, self.writer, own, self.api_use
        )
        training = line.clone()
        self.committing = Committing(self.context, self.strategy, training, self.writer)
        self.reporting = Reporting(self.context, self.strategy, training, own, self.committing)
        self.reporting.begin()
        self.fell_back: list[str] = []
        self.committing.fall_back = self.fell_back.append
        self.parked = False
        self.failure: BaseException | None = None

    def told(self, grace: float = PATIENCE) -> None:
        """Only what report() needs to know: the agent's own way is left out."""
        now = time.monotonic()
        self.strategy.latch.offer(Notice("signal", "SIGTERM", now, now + grace))
        self.strategy.report_by_proxy()

    def report(self, checkpoint: Any = None) -> threading.Thread:
        def work() -> None:
            try:
                self.context.report({"loss": 1.0}, checkpoint)
            except Parked:
                self.parked = True
            except BaseException as error:
                self.failure = error

        thread = threading.Thread(target=work, daemon=True)
        thread.start()
        return thread


def made(*names: str) -> Checkpoint:
    """A checkpoint as a script makes it: files in a temporary folder."""
    folder = Path(tempfile.mkdtemp(prefix="checkpoint-"))
    for name in names or ("model.pt",):
        (folder / name).write_bytes(b"weights")
    return Checkpoint.from_directory(str(folder))
