"""Whether to start the next incarnation here, after how long, and why."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from lastcall.core.process.registry import Member
from lastcall.launch.options import LaunchOptions
from lastcall.launch.outcome import ExitVerdict, Result
from lastcall.types import Notice

PAUSED = "paused"
_LONGEST = 60.0  # seconds of back-off
_SAME = 3  # failures at one place that are enough


@dataclass(frozen=True)
class RestartDecision:
    again: bool
    because: str
    delay: float = 0.0
    hopeless: bool = False  # the platform should not restart it, either


class Policy:
    """Tracks the progress of the run across incarnations."""

    def __init__(self, options: LaunchOptions) -> None:
        self._options = options
        self._restarts = 0
        self._furthest: tuple[int, frozenset[str]] | None = None
        self._without_progress = 0  # consecutive incarnations without progress

    def after(
        self, verdict: ExitVerdict, members: Sequence[Member], notice: Notice | None
    ) -> RestartDecision:
        """An incarnation has ended. `notice` is what the launcher itself got: this machine is going away, or
        a person stopped it."""
        progress = self._progress(members)
        self._without_progress = 0 if progress else self._without_progress + 1
        if notice is not None:
            return RestartDecision(False, f"{notice.reason} was for this machine, not for one process")
        if not self._wanted(verdict.result):
            return RestartDecision(False, f"--restart {self._options.restart}")
        if verdict.crashed and members and self._without_progress >= _SAME - 1:
            steps = sorted({member.step for member in members})
            return RestartDecision(
                False,
                f"{_SAME} incarnations have failed at step {', '.join(map(str, steps))} without any progress "
                "in "
                "between: restarting it would not help. See the error above",
                hopeless=True,
            )
        if verdict.result is Result.SAVED and paused(members):
            return RestartDecision(True, PAUSED)  # asked for by a person: not counted as a failure
        if self._restarts >= self._options.max_restarts:
            return RestartDecision(False, f"--max-restarts {self._options.max_restarts} is used up")
        self._restarts += 1
        delay = min(_LONGEST, self._options.backoff * 2.0 ** min(self._without_progress, 16))
        return RestartDecision(
            True, f"restart {self._restarts} of at most {self._options.max_restarts}, in {delay:g} s", delay
        )

    def _wanted(self, result: Result) -> bool:
        if self._options.restart == "on-failure":
            return result in (Result.FAILED, Result.SAVED)
        return self._options.restart == "on-preempt" and result is Result.SAVED

    def _progress(self, members: Sequence[Member]) -> bool:
        """Whether this incarnation came further than all before it: to a later step, or to a checkpoint that
        is new. A command without training processes shows none."""
        step = max((member.step for member in members), default=0)
        checkpoints = frozenset(
            f"{member.root}/{member.checkpoint}" for member in members if member.checkpoint
        )
        before, self._furthest = self._furthest, _further(self._furthest, step, checkpoints)
        if before is None:
            return True
        return step > before[0] or not checkpoints <= before[1]


def _further(
    before: tuple[int, frozenset[str]] | None, step: int, checkpoints: frozenset[str]
) -> tuple[int, frozenset[str]]:
    return (step, checkpoints) if before is None else (max(step, before[0]), before[1] | checkpoints)


def paused(members: Sequence[Member]) -> list[Path]:
    """The requests of `lastcall pause` for the runs of these."""
    wishes = {Path(member.root) / ".lastcall" / "pause.json" for member in members}
    # Path.exists raises where it has no permission
    return sorted(wish for wish in wishes if os.path.exists(wish))
