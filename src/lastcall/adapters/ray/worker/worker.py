"""A train worker's part, put together: signals, Ray's drain notices, optimizer steps, report()."""

from __future__ import annotations

import logging
import signal
from collections.abc import Mapping
from pathlib import Path
from types import FrameType
from typing import Any

from lastcall.adapters.ray import internals
from lastcall.adapters.ray.saves import fallback, trainers, uncommitted
from lastcall.adapters.ray.saves.fallback import Fallback
from lastcall.adapters.ray.saves.script_save import OwnSave
from lastcall.adapters.ray.worker import connection as connections
from lastcall.adapters.ray.worker.api_use import ApiUse
from lastcall.adapters.ray.worker.committing import Committing
from lastcall.adapters.ray.worker.preemption_info import PreemptionInfoWriter
from lastcall.adapters.ray.worker.reporting import Reporting
from lastcall.adapters.ray.worker.responder import ReportSave
from lastcall.settings import JITCheckpointConfig
from lastcall.shield import listening
from lastcall.shield.listening import Guarded

log = logging.getLogger("lastcall")


class TrainWorker:
    """Between Ray's init_train_context and its shutdown, both in the main thread."""

    def __init__(self, jit: JITCheckpointConfig, store_address: Mapping[str, Any]) -> None:
        context = internals.train_context()
        agent = connections.connect(store_address, context.get_world_rank(), context.get_world_size())
        own = OwnSave()
        self._context = context
        self._info_writer = PreemptionInfoWriter(context)
        self._api_use = ApiUse(context)
        private = _private(context.storage_context)
        self._strategy = ReportSave(jit, agent, self._info_writer, own, self._api_use, private)
        training = agent.clone()
        committing = Committing(context, self._strategy, training, self._info_writer)
        self._reporting = Reporting(context, self._strategy, training, own, committing)
        self._fallback = Fallback(context, self._strategy, committing, training)
        self._strategy.fall_back = committing.fall_back = self._fallback.save
        self._strategy.failed = self._reporting.failed
        self._guarded = Guarded(jit, self._strategy.notices.on_signal, self._strategy.notices.on_notice)
        self._signals = [signal.Signals[name] for name in jit.signals]
        self._former: dict[int, Any] = {}

    def begin(self) -> None:
        """Signals last: one that we receive and cannot answer would be worse than one that kills."""
        fallback.install(self._context, self._fallback)
        self._fallback.restore()
        uncommitted.inject(self._context)
        self._api_use.begin()
        trainers.resume_all()
        try:
            if internals.trains_with_torch(self._context):
                self._strategy.boundary.install()
            self._reporting.begin()
            self._strategy.start(internals.name_of(self._context.storage_context, self._api_use.found))
            # Ray's handler raises SystemExit: with one that does nothing below ours, no step is torn
            for signum in self._signals:
                self._former[signum] = signal.signal(signum, _nothing)
            self._guarded.begin()
        except BaseException:
            self.end()
            raise
        listening.taken = "Ray Train"
        self._info_writer.begin(self._strategy.notices.on_drain)

    def end(self) -> None:
        """Handlers first: the next SIGTERM is Ray's own."""
        self._guarded.let_go()
        listening.taken = ""
        for signum, former in self._former.items():
            if signal.getsignal(signum) is _nothing:
                signal.signal(signum, former)
        self._info_writer.end()
        self._strategy.stop()
        self._reporting.end()
        self._api_use.end()
        self._fallback.end()


def _private(storage: Any) -> Path | None:
    """The folder for events and progress, if the run's storage is a folder."""
    if storage.storage_filesystem.type_name != "local":
        return None
    return Path(storage.experiment_fs_path, uncommitted.FOLDER)


def _nothing(signum: int, frame: FrameType | None) -> None:
    """A thread of its own receives the signal (notices/signals.py)."""
