"""Which of how many processes this one is, and how the others are found."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from lastcall import errors
from lastcall.core.store import Store


def _nobody() -> Store:
    raise errors.StoreLost("a world of one has no store")


@dataclass(frozen=True)
class World:
    rank: int = 0
    size: int = 1
    meet: Callable[[], Store] = field(default=_nobody, repr=False, compare=False)
    """A store that all ranks of this incarnation see and no other does: where they meet. StoreLost if there
    is none."""
    address: str = "127.0.0.1"
    """Where the other ranks find the machine of rank 0."""

    @property
    def many(self) -> bool:
        return self.size > 1
