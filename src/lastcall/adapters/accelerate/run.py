"""protect(accelerator=...): a Run whose checkpoints are Accelerate's own."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from lastcall import errors, settings
from lastcall.adapters.accelerate import loaders, prepared
from lastcall.adapters.accelerate.subject import AcceleratorSubject
from lastcall.adapters.torch.driver import Driver
from lastcall.adapters.torch.run import Run
from lastcall.core.checkpoint.catalog import PRIVATE
from lastcall.core.checkpoint.record import Entry
from lastcall.settings import JITCheckpointConfig, PeriodicCheckpointConfig
from lastcall.storage.files import Files
from lastcall.types import Outcome

log = logging.getLogger("lastcall")


class AcceleratorRun(Run):
    def __init__(
        self,
        accelerator: Any,
        directory: Path,
        jit: JITCheckpointConfig,
        periodic: PeriodicCheckpointConfig,
        state: dict[str, object],
        files: Files | None = None,
    ) -> None:
        if jit.guard:
            log.warning(
                "LASTCALL_GUARD is not used with an accelerator: its checkpoints are Accelerate's own files"
            )
            jit = settings.changed(jit, guard=False)
        loaders.follow()
        self._accelerator = accelerator
        self._accelerated = AcceleratorSubject(accelerator, directory / PRIVATE, state)
        self._prepared = prepared.count(accelerator)
        super().__init__(directory, jit, periodic, self._accelerated, files)

    def _load(self, driver: Driver, entry: Entry) -> None:
        try:
            self._accelerated.load(entry.path)
        except BaseException:
            driver.context.outcome.decide(Outcome.FAILED)
            driver.end()
            raise

    def _begin(self, total: int | None) -> None:
        now = prepared.count(self._accelerator)
        if now != self._prepared:
            raise errors.StateError(
                "the accelerator has prepared or registered something since protect() was called, which "
                "would not be saved: "
                "call prepare() and register_for_checkpointing() first"
            )
        super()._begin(total)
