"""How far a script reads ahead of its steps.

A prefetcher, a look-ahead ("is this the last batch?"), `zip(loader, run.steps(n))` or a warm-up draw from the
loop's own iterator: at every boundary some batches have left the loader that no step has used yet. The
resumed script runs the same code, and draws as many before its first step is over. So the position to be
saved is the one from before these draws: what was trained, not what left the loader.

How many they are shows in the first steps: what was drawn when the first was over, less what each of the next
ones draws. A script that only happens to draw more in its first step (a bad batch that it skips) is
recognised by the batches themselves: those that are read ahead are still held by somebody when the next step
ends. Where run.batches() is drawn from, a step ends only with the next draw, and these are gone by then:
there it is `unclear`, and who draws tells.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Iterator
from typing import Any, Protocol

import torch

UNKNOWN = 1024  # draws that are noted while it is unknown how many matter
_LOOKS = 3  # boundaries that tell it
_DEPTH, _ITEMS = 3, 64  # of a batch, in which its tensors are looked for
# passes without a boundary inside, as of a loader for validation, after which they are no longer read
_FRUITLESS = 3


class Passage(Protocol):
    """What is looked at of a pass over the loader."""

    @property
    def inside(self) -> bool: ...

    @property
    def here(self) -> int: ...


class Lead:
    """Of one loader in this incarnation."""

    def __init__(self) -> None:
        self.held = 0  # batches that are drawn and not trained at a boundary, as far as it is known
        self.settled = False
        # more was drawn in the first step than in those after it, and nothing tells whether it was for them
        self.unclear = False
        self._early: tuple[Passage, int] | None = None  # drawn before the loop began
        self._looked_at: Passage | None = None
        self._counts: list[int] = []
        self._batches: list[weakref.ref[Any] | None] = []
        # the tensors of the latest batches
        self._delivered: deque[list[weakref.ref[Any]]] = deque(maxlen=UNKNOWN)
        # what the first step drew last was dropped before the second ended, and what that one drew was not
        self._gone = False
        self._fruitless = 0
        self._before = 0  # held, as the last incarnation knew

    @property
    def undecided(self) -> bool:
        """Whether batches were drawn, and it is unknown yet how many of them are ahead."""
        return not self.settled and bool(self._delivered)

    def resume(self, held: int) -> None:
        """A pass continues in which the last incarnation had read so many ahead."""
        if not self.settled:
            self.held = self._before = held

    def begin(self, latest: Passage | None) -> None:
        """The loop begins."""
        if latest is not None and latest.inside and latest.here:
            self._early = (latest, latest.here)
            self.held = latest.here

    def drawn(self, passage: Passage, batch: Any) -> None:
        self._delivered.append([weakref.ref(tensor) for tensor in _tensors(batch)])
        if not self.settled and self._looked_at in (None, passage):
            if passage.here == 1:
                self._batches = []
            self._batches.append(_reference(batch))

    def has(self, value: Any, held: int) -> bool | None:
        """Whether a value is made of the last `held` batches. None: of another one, while it is unknown how
        many matter."""
        if not self._delivered:
            return False
        own = {id(tensor) for tensor in _tensors(value)}
        if not own:
            return False
        drawn = [{id(reference()) for reference in batch} for batch in self._delivered]
        if held and own <= set().union(*drawn[-held:]):
            return True
        return None if not self.settled and own <= set().union(*drawn) else False

    def ended(self, passage: Passage) -> None:
        if self._looked_at is passage:
            self._settle(self.held)
        elif self._looked_at is None:
            self._fruitless += 1
            if self._fruitless == _FRUITLESS:
                self._settle(0)

    def boundary(self, passage: Passage | None) -> None:
        """A step is over; `passage` is the loader's position."""
        if self.settled or passage is None or not passage.inside or not passage.here:
            return
        if self._looked_at is None:
            self._looked_at = passage
        elif self._looked_at is not passage:
            self._settle(self.held)
            return
        if not self._counts or passage.here != self._counts[-1]:  # otherwise this step has not drawn from it
            self._counts.append(passage.here)
            self._look()

    def _look(self) -> None:
        counts, early = self._counts, self._drawn_early()
        if len(counts) == 1:
            self.held = max(early, self._before)
            if counts[0] > self.held + 1 and all(map(_alive, self._batches[: counts[0]])):
                self.held = counts[0] - 1  # several in one step, and all of them kept: not an accumulation
        elif len(counts) == 2:
            drawn_first, drawn_now = (
                self._batches[count - 1] if count <= len(self._batches) else None for count in counts
            )
            self._gone = drawn_first is not None and drawn_first() is None and _alive(drawn_now)
        elif len(counts) == _LOOKS:
            each = counts[2] - counts[1]
            steady = counts[1] - counts[0] == each and not self._gone
            self.unclear = self._gone and not early and counts[1] - counts[0] == each < counts[0]
            self._settle(max(early, counts[0] - each) if steady else early)

    def _drawn_early(self) -> int:
        return self._early[1] if self._early is not None and self._early[0] is self._looked_at else 0

    def _settle(self, held: int) -> None:
        self.held, self.settled = held, True
        self._batches, self._early, self._looked_at = [], None, None
        self._delivered = deque(self._delivered, maxlen=held)


def _reference(batch: Any) -> weakref.ref[Any] | None:
    """To the batch, or to something in it that can be referred to weakly."""
    for _ in range(4):
        try:
            return weakref.ref(batch)
        except TypeError:
            pass
        if isinstance(batch, dict):
            batch = next(iter(batch.values()), None)
        elif isinstance(batch, list | tuple) and batch:
            batch = batch[0]
        else:
            break
    return None


def _tensors(value: Any, depth: int = 0) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict | list | tuple) and depth < _DEPTH and len(value) <= _ITEMS:
        for item in value.values() if isinstance(value, dict) else value:
            yield from _tensors(item, depth + 1)


def _alive(reference: weakref.ref[Any] | None) -> bool:
    return reference is not None and reference() is not None
