"""What scripts keep in a module of their own: a number that a function changes; the loop."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

_calls = 0


def annealed() -> float:
    global _calls
    _calls += 1
    return 1 / (1 + 0.05 * _calls)


def train(
    protect: Callable[..., Any], batches: Iterator[Any], step: Callable[[Any], None], steps: int
) -> None:
    with protect() as run:
        while run.step < steps:
            step(next(batches))
            run.tick()
