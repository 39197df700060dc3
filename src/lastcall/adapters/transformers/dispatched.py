"""Where a DataLoaderDispatcher stands: the first rank reads for all, one round of batches ahead of the
training loop.

A pass is made again from its start: with the randomness that it began with, up to the round that was ahead,
which gets the randomness that it was made with, and then the training loop's is put back. Exact where the
order of a stream depends on its own generators, or on global ones that the training does not draw from.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

from lastcall import errors
from lastcall.adapters.torch.data.objects import generators as rng
from lastcall.adapters.torch.randomness.rng import Captured, Noted, Randomness
from lastcall.core.checkpoint.doubts import Doubts

log = logging.getLogger("lastcall")
KIND, VERSION = "accelerate-dispatched", 1


class DispatchedTracker:
    """The interface of LoaderTracker for a DataLoaderDispatcher."""

    def __init__(self, loader: Any) -> None:
        self.loader = loader
        self.worlds: tuple[int, int] | None = None
        self.doubts = Doubts()
        self.randomness = Randomness()
        self._usual = loader.skip_batches
        self._begin: rng.State | None = None  # before the pass
        self._round: _Round | None = None
        self._loaded: dict[str, Any] | None = None

    def attach(self) -> None:
        vars(self.loader.base_dataloader)["__iter__"] = self._open  # Accelerate calls it by this name

    def detach(self) -> None:
        vars(self.loader.base_dataloader).pop("__iter__", None)

    @property
    def size(self) -> int:
        """Batches in a round."""
        one = self.loader.split_batches or getattr(self.loader, "submesh_tp", None)
        return 1 if one else int(self.loader.state.num_processes)

    @property
    def delivered(self) -> int:
        """Rounds that were made, the one ahead among them. Ranks other than the first make none."""
        return 0 if self._round is None else self._round.made // self.size

    @property
    def exhausted(self) -> bool:
        return bool(self.loader.end_of_dataloader)

    def state(self) -> dict[str, Any]:
        if self._loaded is not None:
            return self._loaded
        ahead = self._round.ahead if self._round is not None and not self.exhausted else None
        return {
            "kind": KIND,
            "version": VERSION,
            "iteration": self.loader.iteration,
            "generators": rng.take_generators(rng.find_generators(self.loader.base_dataloader)),
            "begin": None if self.exhausted else self._begin,
            "ahead": None if ahead is None else self.randomness.to_document(self.randomness.captured(ahead)),
        }

    def load(self, state: dict[str, Any]) -> None:
        if state.get("kind") != KIND or state.get("version") != VERSION:
            raise errors.MismatchError(
                f"The saved data position is of kind {state.get('kind')!r}, and this loader needs {KIND!r}: "
                "the data was dispatched "
                f"otherwise. Set dispatch_batches as it was, or start in another directory."
            )
        rng.put_generators(state["generators"], rng.find_generators(self.loader.base_dataloader))
        self.loader.iteration = state["iteration"]
        self._loaded = dict(state) if state["begin"] is not None else None

    def go_on(self, rounds: int) -> None:
        """The next pass begins behind so many rounds, as every rank has counted them."""
        self.loader.skip_batches = self._usual + rounds
        if rounds:
            log.info(
                "One rank reads for all: reading %d batches of the epoch again and skipping them", rounds
            )

    def iterate(self) -> Iterator[Any]:
        return iter(self.loader)

    def _open(self) -> _Round:
        base = self.loader.base_dataloader
        loaded, self._loaded = self._loaded, None
        generators = rng.find_generators(base)
        if loaded is None:
            self.loader.skip_batches = self._usual
            self._begin = rng.take(generators)
            self._round = _Round(self, type(base).__iter__(base))
            return self._round
        now = self.randomness.capture()
        self._begin = loaded["begin"]
        rng.put(loaded["begin"], generators)
        skipped = (self.loader.skip_batches - self._usual) * self.size
        ahead = None if loaded["ahead"] is None else self.randomness.from_document(loaded["ahead"])
        self._round = _Round(self, type(base).__iter__(base), skipped, ahead, now)
        if self.loader.state.process_index != 0:  # it never draws
            self.randomness.restore(now)
        return self._round


class _Round:
    """The iterator of the DataLoader underneath, as Accelerate draws from it on the first rank."""

    def __init__(
        self,
        tracker: DispatchedTracker,
        iterator: Any,
        skipped: int = 0,
        made_with: Captured | None = None,
        now: Captured | None = None,
    ) -> None:
        self.made = 0
        self.ahead: Noted | None = None  # the randomness before the latest round
        self._tracker = tracker
        self._iterator = iterator
        self._skipped = skipped
        self._made_with = made_with
        self._now = now

    def __iter__(self) -> _Round:
        return self

    def __next__(self) -> Any:
        randomness, size = self._tracker.randomness, self._tracker.size
        if self._now is not None and self.made == self._skipped and self._made_with is not None:
            randomness.restore(self._made_with)
        if self.made % size == 0:
            self.ahead = randomness.note()
        try:
            batch = next(self._iterator)
        except StopIteration:
            self._settle()
            raise
        self.made += 1
        if self.made == self._skipped + size:
            self._settle()
        return batch

    def _settle(self) -> None:
        now, self._now = self._now, None
        if now is not None:
            self._tracker.randomness.restore(now)
