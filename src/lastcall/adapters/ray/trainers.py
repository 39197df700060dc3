"""A Hugging Face Trainer in a train worker: it saves by itself, and Ray's RayTrainReportCallback reports what it has saved.

It is asked to at a completed optimizer step, by the flag that its own callbacks use, and writes a real checkpoint at the end of that
very step (optimizer, scheduler, random numbers, position in the data), on all ranks at the step that they have agreed on.
"""

from __future__ import annotations

from types import FrameType
from typing import Any

_TRAINER = ("transformers.trainer", "Trainer")
_REPORTS = "RayTrainReportCallback"


def trainer_in(frame: FrameType | None) -> Any:
    """The Trainer that is at work in these frames, if it reports to Ray; else None. transformers is not imported for this."""
    while frame is not None:
        found = frame.f_locals.get("self") if frame.f_globals.get("__name__") == _TRAINER[0] else None
        if found is not None and _is_trainer(found) and _reports(found):
            return found
        frame = frame.f_back
    return None


def ask(trainer: Any) -> None:
    """In the training thread, inside the optimizer's step: the flag is reset when a step begins, and read when it has ended."""
    trainer.control.should_save = True


def _is_trainer(value: object) -> bool:
    return any((kind.__module__, kind.__qualname__) == _TRAINER for kind in type(value).__mro__)


def _reports(trainer: Any) -> bool:
    callbacks = trainer.callback_handler.callbacks
    return any(kind.__name__ == _REPORTS for callback in callbacks for kind in type(callback).__mro__)
