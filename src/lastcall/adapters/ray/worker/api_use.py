"""Which of Ray's calls the script makes: does it ask for its checkpoint, report one, handle a preemption?
What it does itself is left to it."""

from __future__ import annotations

import logging
from types import FrameType
from typing import Any

from lastcall.adapters.ray import internals

log = logging.getLogger("lastcall")
_ASKING = ("get_checkpoint", "get_all_reported_checkpoints")
_NATIVE = "get_preemption_info"  # not before Ray 2.58
_ATTRIBUTE = "_lastcall_api_use"  # of Ray's train context


class ApiUse:
    """In a train worker, from before its script starts."""

    def __init__(self, context: Any) -> None:
        self.asked = False  # the script has asked for the checkpoint to resume from
        self.reported = False  # it has reported one, by whatever means
        self.native = False  # it handles a preemption itself
        self.found: Any = None  # the checkpoint that it could have asked for
        self._context = context
        self._former: Any = None
        setattr(context, _ATTRIBUTE, self)

    @property
    def own_checkpoints(self) -> bool:
        """Whether a restart begins with what the script makes of its own checkpoints: no state of ours is
        restored over that."""
        return self.asked or self.reported or self.found is not None

    def begin(self) -> None:
        """After the uncommitted checkpoint of the last incarnation, if there is one, has become that of the
        context."""
        self.found = self._context.checkpoint
        for name in _ASKING:
            real = getattr(self._context, name, None)
            if real is not None:
                setattr(self._context, name, self._asking(real))
        self._former = vars(internals.TrainFnUtils).get(_NATIVE)
        if self._former is not None:
            setattr(internals.TrainFnUtils, _NATIVE, self._handling(self._former))

    def look(self, frame: FrameType | None) -> None:
        """At the first step: a function of the script that will look for a preemption may not have done so
        yet."""
        while frame is not None:
            if (
                _NATIVE in frame.f_code.co_names
                and str(frame.f_globals.get("__name__")).partition(".")[0] != "ray"
            ):
                self._is_native()
            frame = frame.f_back

    def _is_native(self) -> None:
        if not self.native and self._former is not None:
            self.native = True
            log.info(
                "The script handles a preemption itself (ray.train.get_preemption_info): lastcall leaves the "
                "save to it"
            )

    def warn(self, *, saves: bool) -> None:
        """At the first step. `saves`: the script makes checkpoints. Training that was saved is never silently
        started from scratch."""
        if self.asked:
            return
        if self.found is not None:
            log.warning(
                "This run has a checkpoint (%s), and the script has not asked for it: it starts from "
                "scratch. Call ray.train.get_checkpoint() in the train function, and load what it returns "
                "before the first step",
                self.found.path,
            )
        elif saves:
            log.warning(
                "The script reports checkpoints, and has not asked for one: after a preemption it would "
                "start from scratch. Call ray.train.get_checkpoint() in the train function, and load what it "
                "returns before the first step"
            )

    def end(self) -> None:
        for name in _ASKING:
            vars(self._context).pop(name, None)
        if self._former is not None:
            setattr(internals.TrainFnUtils, _NATIVE, self._former)
            self._former = None

    def _asking(self, real: Any) -> Any:
        def asking(*args: Any, **kwargs: Any) -> Any:
            self.asked = True
            return real(*args, **kwargs)

        return asking

    def _handling(self, real: Any) -> Any:
        def handling(*args: Any, **kwargs: Any) -> Any:
            self._is_native()
            return real(*args, **kwargs)

        return handling


def of(context: Any) -> ApiUse | None:
    """That of this process, if it is a train worker that is protected."""
    return getattr(context, _ATTRIBUTE, None)
