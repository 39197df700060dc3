"""How many steps a run of epochs will have made at its end: this is never stated, but the batches and the
epochs that are done tell."""

from __future__ import annotations

from typing import Protocol


class Position(Protocol):
    step: int
    epoch: int
    in_pass: bool
    batches: int  # handed out by the current batches() loop
    length: int | None  # batches that this loop has, where known
    epoch_began: tuple[int, int] | None  # epoch and step where this incarnation saw one begin


class Forecast:
    """Of one run.epochs() loop. Asked from a side thread, once a second."""

    def __init__(self, position: Position, start: int, total: int) -> None:
        self._position = position
        self._start = start
        self._total = total

    def steps(self) -> int | None:
        """None while unknown."""
        where = self._position
        began, epochs, done = where.epoch_began, self._total - self._start, where.epoch - self._start
        if began is not None and began[0] == where.epoch and done > 0:  # all epochs so far, as they were
            return max(where.step, round(began[1] * epochs / done))
        if not where.length or where.step == 0:
            return None
        passed = done + min((where.batches - where.in_pass) / where.length, 1.0)
        return max(where.step, round(where.step * epochs / passed)) if passed > 0 else None
