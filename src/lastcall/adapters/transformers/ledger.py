"""The small state of a Trainer at a boundary: its TrainerState, the losses that wait to be logged, the
callbacks' own state, and what of the step is still to be done. Copied often, so it holds no more than it
must: the log history only grows, and is known by its length.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import time
from typing import Any

import numpy as np
import torch
from transformers.trainer_callback import ExportableState

from lastcall.adapters.transformers.attributes import Attributes

log = logging.getLogger("lastcall")
_APART = ("log_history", "stateful_callbacks")  # kept in another form
_HERE = ("is_local_process_zero", "is_world_process_zero")  # of this process, and not of the run


@dataclasses.dataclass(frozen=True)
class Pending:
    """What follows the optimizer step and has not been done yet. A resumed run does it first."""

    phase: str = ""  # "step": then the end of the epoch may follow | "epoch" | "": nothing
    log: bool = False
    evaluate: bool = False
    save: bool = False
    stop_epoch: bool = False
    stop: bool = False
    grad_norm: float | None = None
    learning_rate: float | None = None


# what most steps leave: made once, since making one costs a microsecond or two
NOTHING, AFTER_STEP = Pending(), Pending("step")


class Ledger:
    """With state_dict() and load_state_dict(), so that it is a value like any other in the protected
    state."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self.pending = NOTHING
        self.origin = ""  # the checkpoint that the user named, and that this run began from
        self.first = 0  # the step that the run began at

    def state_dict(self) -> dict[str, Any]:
        state = self._trainer.state
        known = {
            field.name: _plain(getattr(state, field.name))
            for field in dataclasses.fields(state)
            if field.name not in _APART and field.name not in _HERE
        }
        return {
            "state": known,
            "history": len(state.log_history),
            "callbacks": self._callbacks(),
            "pending": dataclasses.asdict(self.pending),
            "origin": self.origin,
            "first": self.first,
        }

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Put back what HF's own resume leaves out. TrainerState and the log history it has read itself by
        then."""
        self.origin, self.first = str(saved["origin"]), int(saved["first"])
        self._restore_callbacks([(str(name), known) for name, known in saved["callbacks"]])
        self.pending = Pending(**saved["pending"])

    def _callbacks(self) -> list[tuple[str, dict[str, Any]]]:
        exportable = [*self._trainer.callback_handler.callbacks, self._trainer.control]
        return [
            (type(callback).__name__, _plain(callback.state()))
            for callback in exportable
            if isinstance(callback, ExportableState)
        ]

    def to_json(self, copied: dict[str, Any]) -> bytes:
        """trainer_state.json as it was when the copy was taken."""
        state = self._trainer.state
        body = dataclasses.asdict(dataclasses.replace(state, log_history=[], stateful_callbacks={}))
        body.update(copied["state"])
        body["log_history"] = state.log_history[: copied["history"]]
        stateful: dict[str, Any] = {}
        for name, known in copied["callbacks"]:
            if name not in stateful:
                stateful[name] = known
            elif isinstance(stateful[name], list):
                stateful[name].append(known)
            else:
                stateful[name] = [stateful[name], known]
        body["stateful_callbacks"] = stateful
        return (json.dumps(body, indent=2, sort_keys=True) + "\n").encode()

    def _restore_callbacks(self, saved: list[tuple[str, dict[str, Any]]]) -> None:
        left = list(saved)
        for callback in self._trainer.callback_handler.callbacks:
            name = type(callback).__name__
            found = next((item for item in left if item[0] == name), None)
            if isinstance(callback, ExportableState) and found is not None:
                left.remove(found)
                for attribute, value in found[1].get("attributes", {}).items():
                    setattr(callback, attribute, value)


class Tally:
    """What this rank has counted alone since the last query: losses, operations, time, and what a subclass
    counts in attributes of its own. Other ranks have other numbers."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self.before = 0.0  # seconds of training in former incarnations
        self.began = time.monotonic()  # ... and when this one began to train
        self._attributes = Attributes(trainer)

    def state_dict(self) -> dict[str, Any]:
        trainer = self._trainer
        return {
            "waiting": _number(getattr(trainer, "_tr_loss", 0.0)),
            "total": float(getattr(trainer, "_total_loss_scalar", 0.0)),
            "logged": int(getattr(trainer, "_globalstep_last_logged", 0)),
            "flos": float(getattr(trainer, "current_flos", 0.0)),
            "seconds": self.before + time.monotonic() - self.began,
            "attributes": self._attributes.copy(),
        }

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        trainer = self._trainer
        trainer._tr_loss.fill_(saved["waiting"])
        trainer._total_loss_scalar = saved["total"]
        trainer._globalstep_last_logged = int(saved["logged"])
        trainer.current_flos = saved["flos"]
        self.before = saved["seconds"]
        self._attributes.restore(saved.get("attributes", {}))


def _plain(value: Any) -> Any:
    """As JSON has it: numpy's and torch's numbers are what metrics are made of."""
    if value is None or type(value) in (bool, int, float, str):
        return value
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, np.generic | torch.Tensor):
        return value.item() if isinstance(value, np.generic) or value.numel() == 1 else value.tolist()
    return int(value) if isinstance(value, int) else float(value) if isinstance(value, float) else str(value)


def _number(value: Any) -> float:
    return float(value.detach().item()) if isinstance(value, torch.Tensor) else float(value)
