"""The run's progress in one document: what is served (`page`), what is sent (`push`), and what stays in the
status of a pod (`exit_message`).

The fields with capitals in them are those of OpenShift AI's controller: it refuses the whole answer where a
number that it takes for whole has a fraction, and takes 0 seconds left for the end of training. So 0 and 100
% are reported only for a run that has finished. The other fields are ours. NaN and Infinity are not JSON and
become null. Nothing here waits for training or for a disk: everything in the report is in memory already.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from lastcall.clock import Clock
from lastcall.core.progress import exit_message
from lastcall.core.ranks.heartbeat import HANG
from lastcall.events import EventLog, Progress
from lastcall.types import Kind, Outcome

# saves that answer a notice
ANSWERS = frozenset(kind.value for kind in (Kind.JIT, Kind.RESCUE, Kind.SURVIVORS))
# Transformers' name and the controller's
_THROUGHPUT = ("train_samples_per_second", "throughput_samples_sec")


class ProgressReport:
    """Of one incarnation. What it says of the run comes from the events, and so does the exit message."""

    def __init__(self, progress: Progress, events: EventLog, clock: Clock) -> None:
        self._progress = progress
        self._clock = clock
        self._standing = RunState()
        events.heard = self._hear

    def _hear(self, at: float, kind: str, fields: Mapping[str, object]) -> None:
        standing = self._standing
        standing.tell(at, kind, fields)
        if kind == "start":
            exit_message.clear()
        elif standing.over and (kind == "stop" or standing.answered):
            exit_message.write(self.document())

    def document(self) -> dict[str, object]:
        progress, standing = self._progress, self._standing
        known = progress.document or {}
        step = known.get("step") if progress.where is None else progress.where()
        epoch, total, total_epochs = known.get("epoch"), progress.total, progress.total_epochs
        finished = standing.state == Outcome.FINISHED.value
        metrics, eval_metrics = _sorted_out(known.get("metrics"), known.get("eval_metrics"))
        return {
            "progressPercentage": _percentage(
                _fraction(step, total), _fraction(epoch, total_epochs), finished
            ),
            "estimatedRemainingSeconds": 0 if finished else self._left(known),
            "currentStep": step,
            "totalSteps": total,
            "currentEpoch": _finite(epoch),
            "totalEpochs": None if total_epochs is None else math.ceil(total_epochs),
            "trainMetrics": metrics,
            "evalMetrics": eval_metrics,
            "steps_per_second": _finite(known.get("steps_per_second")),
            "updated_at": known.get("at"),
            **standing.facts(),
        }

    def _left(self, known: Mapping[str, object]) -> int | None:
        """Estimated seconds left, counted down between reports; at least one, since the run has not ended."""
        eta, at = known.get("eta_seconds"), known.get("at")
        if (
            not isinstance(eta, float)
            or not isinstance(at, float)
            or not self._standing.training
            or not math.isfinite(eta)
        ):
            return None
        return max(math.ceil(eta - max(self._clock.wall() - at, 0.0)), 1)


class RunState:
    """The state of this incarnation, computed from its events."""

    def __init__(self) -> None:
        self.state = "starting"  # then "running" and "saving" in turn; in the end an Outcome, as in "saved"
        self.incarnation: object = None
        self.resumed_from: object = None
        self.notice: object = None
        self.checkpoint: dict[str, object] | None = None  # the last one that this incarnation has committed
        self.because: object = None  # why the last attempt to save has failed

    @property
    def training(self) -> bool:
        """Whether it continues, as far as is known."""
        return self.state in ("running", "saving") and self.notice is None

    @property
    def answered(self) -> bool:
        """A checkpoint is committed for the notice. The process may be killed before its last event."""
        return self.state == Outcome.SAVED.value and self.notice is not None

    @property
    def over(self) -> bool:
        """An end that the exit message reports. After an error of the script itself there is none: an empty
        message lets `terminationMessagePolicy: FallbackToLogsOnError` show the end of the log."""
        return self.notice is not None or self.state != Outcome.FAILED.value

    def tell(self, at: float, kind: str, fields: Mapping[str, object]) -> None:
        if kind == "start":
            self.state, self.incarnation, self.resumed_from = (
                "running",
                fields.get("incarnation"),
                fields.get("resumed"),
            )
        elif kind == "notice" and fields.get("source") != HANG:  # after a hang the run may continue
            self.notice = fields.get("reason")
        elif kind == "save-begins":
            self.state = "saving"
        elif kind == "not-saved":
            self.state, self.because = "running", fields.get("because")
        elif kind == "committed":
            answered = self.notice is not None and fields.get("save") in ANSWERS
            # a periodic save that was under way says nothing about the notice
            self.state, self.because = "saved" if answered else "running", None
            named = {"path": "path", "step": "step", "kind": "save", "exact": "exact"}
            self.checkpoint = {ours: fields.get(theirs) for ours, theirs in named.items()} | {"at": at}
        elif kind == "stop":
            self.state = str(fields.get("outcome") or Outcome.FAILED.value)

    def facts(self) -> dict[str, object]:
        return {
            "state": self.state,
            "incarnation": self.incarnation,
            "resumed_from": self.resumed_from,
            "checkpoint": self.checkpoint,
            "notice": self.notice,
            "because": self.because,
        }


# ---- numbers that the controller takes ---------------------------------------------------------------------


def _fraction(done: object, total: float | None) -> float | None:
    return done / total if isinstance(done, int | float) and total and total > 0 else None


def _percentage(by_steps: float | None, by_epochs: float | None, finished: bool) -> int | None:
    fraction = by_epochs if by_steps is None else by_steps
    if fraction is None or not math.isfinite(fraction):
        return 100 if finished else None
    whole = min(max(math.floor(fraction * 100 + 1e-9), 0), 100)  # 0.29 * 100 is less than 29
    return whole if finished else min(whole, 99)


def _sorted_out(metrics: object, eval_metrics: object) -> tuple[dict[str, object], dict[str, object]]:
    """Those of training and those of an evaluation: `run.report(eval_loss=...)` says by the name which they
    are."""
    train: dict[str, object] = {}
    evaluation: dict[str, object] = {}
    for name, value in metrics.items() if isinstance(metrics, dict) else ():
        (evaluation if name.startswith("eval_") else train)[name] = _finite(value)
    for name, value in eval_metrics.items() if isinstance(eval_metrics, dict) else ():
        evaluation[name] = _finite(value)
    if _THROUGHPUT[0] in train:
        train[_THROUGHPUT[1]] = train[_THROUGHPUT[0]]
    return train, evaluation


def _finite(value: object) -> object:
    return None if isinstance(value, float) and not math.isfinite(value) else value
