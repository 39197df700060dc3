"""A Trainer as the core sees it: its checkpoints are HF's own files.

It exists before the trainer has an optimizer (the checkpoint to resume from must be known when train()
begins), so it takes up its state in a second step, when training is about to begin.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lastcall import errors
from lastcall.adapters.torch import framework
from lastcall.adapters.torch.framework import FrameworkSubject
from lastcall.adapters.torch.recorded_save.boundary_buffers import BoundaryBuffers
from lastcall.adapters.torch.subject import TorchSubject
from lastcall.adapters.transformers import recording
from lastcall.adapters.transformers.ledger import Ledger, Tally
from lastcall.adapters.transformers.position import Position
from lastcall.core.subject import Loading, Stored
from lastcall.core.sync.gate import Gate
from lastcall.formats import tree
from lastcall.types import Capture, File

log = logging.getLogger("lastcall")
LEDGER, TALLY = "trainer", "tally"
LEDGER_FILE = "lastcall-trainer.json"  # one for all ranks: what is still to be done must be the same on each


class TrainerSubject(FrameworkSubject):
    loads_by_itself = True

    def __init__(self, trainer: Any, private: Path) -> None:
        super().__init__({})
        self.ledger = Ledger(trainer)
        self.tally = Tally(trainer)
        self.position = Position(trainer)
        self.position.doubts = self.doubts
        self.saved: dict[str, Any] | None = None  # the ledger of the checkpoint that the run resumes from
        self.saved_tally: dict[str, Any] = {}
        self._trainer = trainer
        self._private = private
        self._joining: tuple[str, int, Path] | None = None
        self.training = False
        # the next save is to have everything that a resume needs, whatever save_only_model says
        self.full = True
        # what saves a checkpoint, where a script has hung in one of its own
        self.save: Callable[..., Any] | None = None

    def join(self, run: str, incarnation: int, folder: Path) -> None:
        """The mail needs the state, which comes later."""
        self._joining = (run, incarnation, folder)

    def take_up(self, gate: Gate) -> None:
        """The trainer has prepared everything: this is the state from now on."""
        self.hold(self._values())
        self.position.follow(self._trainer.callback_handler.train_dataloader)
        self.loaders = [self.position]
        self.install(gate)
        if self._joining is not None:
            super().join(*self._joining)
        self.training = True

    def _values(self) -> dict[str, object]:
        trainer = self._trainer
        optimizer = trainer.optimizer
        values: dict[str, object] = {
            "model": trainer.accelerator.unwrap_model(trainer.model, keep_torch_compile=False),
            "optimizer": getattr(optimizer, "optimizer", optimizer),
            "scheduler": trainer.lr_scheduler,
            "scaler": getattr(trainer.accelerator, "scaler", None),
            LEDGER: self.ledger,
            TALLY: self.tally,
        }
        if trainer.is_deepspeed_enabled:
            del values["optimizer"]  # in pieces that only DeepSpeed can put together: it saves them itself
        try:
            TorchSubject(
                {
                    LEDGER: self.ledger,
                    TALLY: self.tally,
                    "scheduler": values["scheduler"],
                    "scaler": values["scaler"],
                }
            )
        except errors.StateError as error:
            log.warning(
                "A rescue cannot copy all of the scheduler's or the scaler's state (%s) and will "
                "read the live objects",
                error,
            )
            del values["scheduler"], values["scaler"]
        return {name: value for name, value in values.items() if value is not None}

    # ---- captures ------------------------------------------------------------------------------------------

    def spread(self) -> bool:
        return recording.collective(self._trainer)

    def unrescuable(self) -> str:
        return super().unrescuable() if self.training else "training has not begun: there is nothing to save"

    def record(self, native: Capture, small: object, buffers: BoundaryBuffers) -> Capture:
        kept: dict[str, Any] = native.document["state"]  # type: ignore[assignment]
        state = self.ledger.to_json(read_ledger(kept[LEDGER]))
        files = recording.record(
            self._trainer, self._private, state, self.save, full=self.full, buffers=buffers
        )
        ledger = framework.small_file(LEDGER_FILE, json.dumps(kept[LEDGER]).encode(), shared=True)
        if not self.full:
            weights = dataclasses.replace(
                native, exact=False, because="save_only_model: the weights and nothing else"
            )
            return self.dressed(weights, (*files, ledger))
        return self.dressed(
            native, (*files, ledger, self.randomness_file(self._trainer.args.process_index, native))
        )

    def randomness_file(self, rank: int, capture: Capture) -> File:
        return recording.randomness_file(rank, self._trainer.args.world_size, self.randomness_of(capture))

    def dressed(self, native: Capture, files: tuple[File, ...]) -> Capture:
        kept: dict[str, Any] = native.document["state"]  # type: ignore[assignment]
        document = {"run": native.document["run"], "state": {TALLY: kept[TALLY]}}
        return dataclasses.replace(native, document=document, groups=(), files=files)

    def _part_of(self, rank: int, step: int, native: Capture) -> Capture | None:
        """What that rank alone had counted is gone with it. Losses of another rank in their place change a
        log line, and no step."""
        kept: dict[str, Any] = native.document["state"]  # type: ignore[assignment]
        common = {name: value for name, value in kept.items() if name not in (LEDGER, TALLY)}
        found = super()._part_of(
            rank, step, dataclasses.replace(native, document={**native.document, "state": common})
        )
        if found is not None:
            found.document["state"][TALLY] = kept[TALLY]  # type: ignore[index]
        return found

    def remembered(self) -> Callable[[], None]:
        """Puts the generators back to where they are now."""
        now = self._randomness.capture()
        return lambda: self._randomness.restore(now)

    def refresh_now(self) -> None:
        """A long stay begins here (an evaluation): the copy is to be of this moment."""
        self.refresh(time.perf_counter())

    # ---- restore -------------------------------------------------------------------------------------------

    def prepare(self, document: dict[str, object], stored: Stored) -> Loading:
        run, state = document.get("run"), document.get("state")
        if not isinstance(run, dict) or not isinstance(state, dict) or TALLY not in state:
            raise errors.MismatchError(
                "the checkpoint was not saved by a Trainer, which could not read it. Use another output_dir."
            )
        return _Resume(self, run, plain(state[TALLY]))


class _Resume:
    """HF loads the files itself; here only the position and the ledger are taken."""

    targets: dict[str, dict[str, object]] = {}
    whole = True
    saved_step = None

    def __init__(self, subject: TrainerSubject, run: dict[str, Any], tally: dict[str, Any]) -> None:
        self._subject = subject
        self._run = run
        self._tally = tally

    def finish(self) -> None:
        self._subject.resume_at(self._run)
        self._subject.restored_randomness = None  # HF puts the generators back
        self._subject.saved_tally = self._tally
        self._subject.position.worlds = self._subject.together.worlds
        if found := self._subject._resumed_loaders:
            self._subject.position.load(found[0])


def plain(encoded: Any) -> dict[str, Any]:
    """What state_dict() gave before it was put into a document."""
    found = tree.decode(encoded.get("v") if isinstance(encoded, dict) else None, tree.refuse_tag)
    return found if isinstance(found, dict) else {}


def read_ledger(encoded: Any) -> dict[str, Any]:
    found = plain(encoded)
    if not {"state", "history", "callbacks", "pending", "origin", "first"} <= found.keys():
        raise errors.CheckpointError(f"{LEDGER_FILE} does not say what the Trainer was doing: it is damaged")
    return found
