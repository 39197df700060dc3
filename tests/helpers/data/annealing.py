"""What scripts keep in a module of their own: a number that a function changes."""

from __future__ import annotations

_calls = 0


def annealed() -> float:
    global _calls
    _calls += 1
    return 1 / (1 + 0.05 * _calls)
