"""What is probably missing when a resumed run differs, judged by the names that differ first."""

from __future__ import annotations

import re
from collections.abc import Sequence

TOLD = 90  # from here on, what a run only reports about itself: metrics, tallies
# What explains most comes first: a wrong learning rate explains wrong weights, and randomness explains both.
_WEIGHTS: tuple[tuple[str, int], ...] = (
    (r"(^|\.)(lr|initial_lr|momentum|weight_decay)$", 0),
    (r"^run\.((epoch|block)_)?randomness\.", 1),
    (r"^(run\.)?carried\b", 2),
    (r"^optimizer[^.]*\.(sizes|class)", 3),
    (r"^(report|tally|trainer|grads)\.", TOLD),  # gradients that matter show in the weights
)
_STATE = 10

_LR = (
    "a learning-rate scheduler (or other code that sets the optimizer's learning rate) that protect() did "
    "not get: "
    "protect(..., scheduler=scheduler). If the loop computes it from a counter of its own, use run.step or "
    "run.carry()"
)
_RANDOM = (
    "random numbers that are drawn elsewhere after a resume: before the loop instead of in it, or by a "
    "generator that protect() did not get: protect(..., generator=generator)"
)
_CARRIED = (
    "a variable that the loop carries from step to step and that was changed before the loop restarted: see "
    "run.carry()"
)
_DATA = (
    "other data, or state that was not passed to protect(): a batch that was fetched before the step "
    "ended, a loader that lastcall does not track (use run.batches(loader)), a second model, an EMA or a "
    "scaler, or a variable that the loop carries (run.carry())"
)
_REPORT = (
    "a number that the loop adds up itself (a running loss): training is identical, but its reports are not. "
    "See run.carry()"
)


def weight(name: str) -> int:
    """How early a name stands among those that differ at the same step: the smaller, the more it explains."""
    return next((weight for pattern, weight in _WEIGHTS if re.search(pattern, name)), _STATE)


def is_state(name: str) -> bool:
    """Whether it is a result of training. The inputs of training, and what it reports, may differ without
    affecting one."""
    return weight(name) in (0, _STATE)


def probable(names: Sequence[str], because: str = "") -> str:
    """`names`: those that differ at the first step where any does. `because`: what lastcall itself recorded
    in the checkpoint."""
    if because:
        return f"lastcall warned: {because}"
    first = min((weight(name) for name in names), default=_STATE)
    return {0: _LR, 1: _RANDOM, 2: _CARRIED, TOLD: _REPORT}.get(first, _DATA)


def shown(value: str | None) -> str:
    if value is None:
        return "missing"
    return f"{value[:12]}… (digest)" if re.fullmatch(r"[0-9a-f]{32}", value) else value
