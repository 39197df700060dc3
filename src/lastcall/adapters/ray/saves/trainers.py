"""Trainers that save on their own, and a callback of Ray's (RayTrainReportCallback) that reports their
checkpoints.

Hugging Face's saves when its flag is set at a completed optimizer step, as its own callbacks set it: a real
checkpoint at the end of that very step (optimizer, scheduler, random numbers, position in the data), on all
ranks at the step that they have agreed on. Where the script does not ask for its checkpoint, train() resumes
from it, as it does outside Ray.

Lightning's reports at the end of an epoch, and is left alone.
"""

from __future__ import annotations

import functools
import inspect
import logging
import os
from types import FrameType, ModuleType
from typing import Any

from lastcall.adapters.ray import internals
from lastcall.adapters.ray.worker import api_use as api_uses
from lastcall.auto import imports

log = logging.getLogger("lastcall")
_TRAINER = ("transformers.trainer", "Trainer")
_REPORTS = "RayTrainReportCallback"
_STATE = "trainer_state.json"
_MARK = "_lastcall_resumes"


def trainer_in(frame: FrameType | None) -> Any:
    """The Trainer that runs in these frames, if it reports to Ray; else None. transformers is not imported
    for this."""
    while frame is not None:
        found = frame.f_locals.get("self") if frame.f_globals.get("__name__") == _TRAINER[0] else None
        if found is not None and _is_trainer(found) and _reports(found.callback_handler.callbacks):
            return found
        frame = frame.f_back
    return None


def reporter_in(frame: FrameType | None) -> str:
    """The name of what runs in these frames with a callback that reports to Ray; empty if there is none."""
    while frame is not None:
        found = frame.f_locals.get("self")
        callbacks = getattr(found, "callbacks", None) if type(found).__name__ == _TRAINER[1] else None
        if isinstance(callbacks, list) and _reports(callbacks):
            return f"{type(found).__module__.partition('.')[0]}'s {type(found).__name__}"
        frame = frame.f_back
    return ""


def ask(trainer: Any) -> None:
    """In the training thread, inside the optimizer's step: the Trainer resets the flag when a step begins,
    and reads it when the step has ended."""
    trainer.control.should_save = True


# ---- resuming ----------------------------------------------------------------------------------------------


def resume_all() -> None:
    """In a train worker, before its script starts: transformers is imported later, if at all."""
    imports.Finder({_TRAINER[0]: f"{__name__}:patch"}).install()


def patch(module: ModuleType) -> None:
    trainer: Any = getattr(module, _TRAINER[1])
    original = trainer.train
    if hasattr(original, _MARK):
        return
    signature = inspect.signature(original)

    @functools.wraps(original)
    def train(self: Any, *args: Any, **kwargs: Any) -> Any:
        call = signature.bind(self, *args, **kwargs)
        checkpoint = _not_asked_for(self) if call.arguments.get("resume_from_checkpoint") is None else None
        if checkpoint is None:
            return original(*call.args, **call.kwargs)
        with checkpoint.as_directory() as folder:
            call.arguments["resume_from_checkpoint"] = os.path.join(folder, _inside(checkpoint) or "")
            log.info(
                "Resuming the %s from %s: the script has not asked for it",
                type(self).__name__,
                checkpoint.path,
            )
            return original(*call.args, **call.kwargs)

    setattr(train, _MARK, True)
    trainer.train = train


def _not_asked_for(trainer: Any) -> Any:
    """The checkpoint of this run that this Trainer has written and the script has not asked for; once, for
    the first Trainer."""
    try:
        use = api_uses.of(internals.train_context())
    except RuntimeError:
        return None
    if use is None or use.asked or use.found is None or not _reports(trainer.callback_handler.callbacks):
        return None
    if _inside(use.found) is None:
        return None
    use.asked = True
    return use.found


def _inside(checkpoint: Any) -> str | None:
    """Where the Trainer's own folder is within Ray's checkpoint."""
    return next(
        (
            os.path.dirname(name)
            for name in internals.files_of(checkpoint)
            if os.path.basename(name) == _STATE
        ),
        None,
    )


def _is_trainer(value: object) -> bool:
    return any((kind.__module__, kind.__qualname__) == _TRAINER for kind in type(value).__mro__)


def _reports(callbacks: Any) -> bool:
    return any(kind.__name__ == _REPORTS for callback in callbacks for kind in type(callback).__mro__)
