"""The script's own save: a report() with a checkpoint, found in its source, entered or replayed; or that of
the Trainer that it uses."""

from __future__ import annotations

import ast
import logging
from collections.abc import Callable
from types import FrameType
from typing import Any

from ray.train import report

from lastcall import script as scripts
from lastcall.adapters.ray.saves import trainers

log = logging.getLogger("lastcall")
_NAME = "report"
_ARGUMENT = "checkpoint"
_LOOKS = 8  # steps outside any loop before the search ends


class Reports:
    """What counts as a save: train.report(metrics, checkpoint=...), under whatever name."""

    def is_save(self, call: ast.Call, target: object | None) -> bool:
        if target is not None and target is not report:
            return False
        if target is None and _last_name(call.func) != _NAME:
            return False
        given = self.payload(call)
        return given is not None and not (isinstance(given, ast.Constant) and given.value is None)

    def payload(self, call: ast.Call) -> ast.expr | None:
        if len(call.args) > 1:
            return call.args[1]
        return next((word.value for word in call.keywords if word.arg in (_ARGUMENT, None)), None)


class OwnSave:
    """In the training thread, except for position()."""

    def __init__(self) -> None:
        self._script: scripts.Script | None = None
        self._trainer: Any = None
        self._looks = 0
        self.reporter = ""  # what reports checkpoints at times of its own, where the script's code does not

    def look(self, frame: FrameType) -> bool:
        """At the first step: the source is read once, before there is any hurry. False where that was no step
        of a loop: something stepped an optimizer before the training loop, so the next step is looked at
        too."""
        self._looks += 1
        self._trainer = trainers.trainer_in(frame)
        if self._trainer is not None:
            log.info(
                "A notice will make the %s save, and Ray's callback report its checkpoint",
                type(self._trainer).__name__,
            )
            return True
        self._script = scripts.find(frame, Reports())
        if self._script.points:
            log.info("A notice will run the script's own save: %s", self._script.place)
            return True
        self.reporter = trainers.reporter_in(frame)
        if self.reporter:
            log.warning(
                "A notice cannot make %s save: training will continue until its next report, and the steps "
                "since the last one are lost if that does not come within the grace. Report more often than "
                "that",
                self.reporter,
            )
            return True
        if not self._script.looped and self._looks < _LOOKS:
            return False
        log.warning("A notice cannot run a save of the script's own: %s", self._script.because)
        return True

    @property
    def saves(self) -> bool:
        """Whether it is known to save on its own; not a Trainer, which is resumed as it is outside Ray
        (trainers.py)."""
        return bool(self.reporter) or (self._script is not None and bool(self._script.points))

    def remember(self, frame: FrameType) -> None:
        if self._script is not None:
            self._script.remember(frame)

    def position(self) -> dict[str, Any]:
        points = self._script is not None and bool(self._script.points)
        return {
            "looked": self._looks > 0,
            "points": points,
            "near": self.near,
            "framework": self._trainer is not None,
            "checkpoints": bool(self.reporter),
            "because": "no optimizer has stepped yet" if self._script is None else self._script.because,
        }

    @property
    def near(self) -> bool:
        return self._script is not None and self._script.near

    @property
    def inside(self) -> bool:
        return self._script is not None and self._script.inside

    def ask_trainer(self) -> None:
        trainers.ask(self._trainer)

    def enter(self, frame: FrameType, left: Callable[[], None]) -> bool:
        """False where the save cannot be entered from this frame. `left`: called when the script has left its
        save without a report."""
        return (
            self._script is not None
            and bool(self._script.points)
            and self._script.enter(frame, left, wait=True)
        )

    def replay(self, frame: FrameType) -> str:
        """Returns, if it does, why nothing was reported."""
        assert self._script is not None
        self._script.cancel()
        return self._script.replay(frame)


def _last_name(node: ast.expr) -> str:
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""
