"""torch's own DataLoader iterators, followed: they count what they deliver, and one of them can begin in the middle of
a pass.

The order of events that has to be repeated bit for bit (torch 2.4 to 2.13): the index sampler's iterator is made, the
workers' base seed is drawn, and with workers the sampler's iterator is made once more and drawn from at once; without
workers its first draw comes with the first batch, any amount of training later. So three moments are remembered:
`created` (before the iterator), `begin` (before the sampler's last iterator), `draw` (before its first draw). Going
back to them is done behind the back of the training loop: its generators are put back afterwards, since an
uninterrupted run draws nothing at that point.

Discarded: a wrapper around DataLoader, which code that holds the loader would not see; wrapping the sampler, which is
an attribute users look at; and pickling sampler iterators, most of which are running generators.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

from torch.utils.data import dataloader as torch_dataloader

from lastcall.adapters.torch.data import facts, position
from lastcall.adapters.torch.data import inside as workers
from lastcall.adapters.torch.data import randomness as rng

log = logging.getLogger("lastcall")

# Draws of a pass over a foreign sampler that are checked for lazy use of global generators. Each costs about 200 µs.
_LOOKED_AT = 4

# Private names, the same from torch 2.4 to 2.13. A torch without them must not make `import lastcall` fail.
_Single: Any = getattr(torch_dataloader, "_SingleProcessDataLoaderIter", object)
_Multi: Any = getattr(torch_dataloader, "_MultiProcessingDataLoaderIter", object)
_OVERRIDDEN = ("_reset", "_next_index", "_get_data", "_try_put_index")


class _WorkerView:
    """The loader as the iterator's constructor shall see it. The loader itself is not touched, not for a moment."""

    def __init__(self, loader: Any, saved: list[rng.Parts | None]) -> None:
        self._loader = loader
        self.collate_fn = workers.ReportingCollate(loader.collate_fn)
        self.worker_init_fn = workers.WorkerStart(loader.worker_init_fn, saved)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def __len__(self) -> int:  # looked up on the class: __getattr__ does not serve it
        return len(self._loader)


class _Followed:
    """Counts deliveries, and catches up with a position on the first draw after a resume."""

    _lc_ledger: position.Ledger
    _lc_pass: position.Pass | None = None
    _lc_looked_at = 0  # draws still to be looked at; 0 is the fast path
    _lc_drawn = False
    _lc_replay = 0  # batches of an iterable dataset to be made again and thrown away

    def _lc_start(self, passage: position.Pass, loader: Any) -> None:
        self._lc_pass = passage
        self._lc_drawn = False
        self._lc_looked_at = 1 if passage.iterable or facts.trusted(loader) else _LOOKED_AT

    def __next__(self) -> Any:
        if self._lc_replay:
            self._lc_make_again()
        passage = self._lc_pass
        assert passage is not None
        try:
            batch = self._lc_take()
        except StopIteration:
            self._lc_ledger.finish(passage)
            raise
        except Exception:
            passage.failed += 1
            raise
        passage.delivered += 1
        return batch

    def _lc_take(self) -> Any:
        return super().__next__()  # type: ignore[misc]

    def _next_index(self) -> Any:
        if self._lc_looked_at:
            return self._lc_draw()
        return super()._next_index()  # type: ignore[misc]

    def _lc_draw(self) -> Any:
        passage, ledger = self._lc_pass, self._lc_ledger
        assert passage is not None
        self._lc_looked_at -= 1
        if not self._lc_drawn:
            self._lc_drawn = True
            if passage.draw is not None:
                return self._lc_catch_up(passage)
            now = rng.take(ledger.generators)
            passage.draw = passage.begin if now == passage.begin else now
            return super()._next_index()  # type: ignore[misc]
        before = rng.take_parts()
        index = super()._next_index()  # type: ignore[misc]
        if not ledger.warned and rng.take_parts() != before:
            ledger.warned = True
            log.warning(
                "The sampler draws from a global random generator during the pass, mixed with what training draws "
                "from it: after an interruption the order of the rest of that pass will differ. Give the sampler "
                "a torch.Generator of its own, or draw the whole order at the start of each pass."
            )
        return index

    def _lc_catch_up(self, passage: position.Pass) -> Any:
        """Draw what was delivered before the interruption, without loading it, and then the next index."""
        generators = self._lc_ledger.generators
        skip = 0 if passage.iterable else passage.delivered + passage.failed
        # With workers all of this happens while the iterator is made, and whoever makes it puts the generators back.
        # Those of the sampler must not be put back before the prefetching draws that follow.
        lazy = passage.pool is None and not passage.iterable
        saved = rng.take(generators) if lazy else None
        assert passage.draw is not None
        rng.put(passage.draw, generators)
        first = None
        try:
            for done in range(max(skip, 1)):
                first = self._lc_skip(done, skip)
        finally:
            if saved is not None:
                rng.put(saved, generators)
        return super()._next_index() if skip else first  # type: ignore[misc]

    def _lc_skip(self, done: int, skip: int) -> Any:
        try:
            return super()._next_index()  # type: ignore[misc]
        except StopIteration:
            if skip:
                log.warning(
                    "%d batches of this pass were delivered before the interruption, but the loader now has "
                    "only %d in a pass: the pass counts as ended, and training goes on with the next one.",
                    skip,
                    done,
                )
            raise

    def _lc_make_again(self) -> None:
        count, self._lc_replay = self._lc_replay, 0
        log.info(
            "An IterableDataset cannot be entered in the middle: its first %d batches are replayed and thrown away.",
            count,
        )
        saved = rng.take(self._lc_ledger.generators)
        try:
            for _ in range(count):
                self._lc_take()
        except StopIteration:
            log.warning("The IterableDataset ended before the %d batches that were delivered before the interruption.", count)
        finally:
            rng.put(saved, self._lc_ledger.generators)

    def __del__(self) -> None:
        if self._lc_pass is not None:
            self._lc_ledger.leave(self._lc_pass)


class FollowedSingle(_Followed, _Single):  # type: ignore[misc]
    """num_workers=0."""

    _lc_take: Any = getattr(_Single, "__next__", None)  # without a call in between: this runs at every batch

    def __init__(self, loader: Any, ledger: position.Ledger, passage: position.Pass, resumed: bool) -> None:
        self._lc_ledger = ledger
        self._lc_start(passage, loader)
        super().__init__(loader)
        if resumed and passage.iterable:
            self._lc_replay = passage.delivered
        ledger.begin(passage, resumed)


class FollowedMulti(_Followed, _Multi):  # type: ignore[misc]
    """Worker processes. `resumed`: the pass to continue. `meanwhile`: the generators to go back to before a first pass
    is begun with workers that, without the interruption, would have been there already."""

    _lc_draining = False
    _lc_rotate = 0

    def __init__(
        self,
        loader: Any,
        ledger: position.Ledger,
        pool: position.Pool,
        resumed: position.Pass | None = None,
        meanwhile: rng.State | None = None,
    ) -> None:
        self._lc_ledger = ledger
        self._lc_pool = pool
        self._lc_resumed = resumed
        self._lc_meanwhile = meanwhile
        super().__init__(_WorkerView(loader, pool.workers))

    def _reset(self, loader: Any, first_iter: bool = False) -> None:
        ledger, pool = self._lc_ledger, self._lc_pool
        resumed, self._lc_resumed = self._lc_resumed, None
        if not first_iter:
            self._lc_drop_pass()
        if resumed is None:
            passage = self._lc_begin(loader)
        else:
            passage = resumed
            rng.put(passage.begin, ledger.generators)
            self._lc_rotate = 0 if passage.iterable else (passage.delivered + passage.failed) % self._num_workers
            self._lc_replay = passage.delivered if passage.iterable else 0
        self._lc_start(passage, loader)
        self._lc_draining = not first_iter
        super()._reset(loader, first_iter)
        self._lc_draining = False
        pool.restart()
        passage.workers_at_begin = tuple(pool.workers)
        ledger.begin(passage, resumed is not None)

    def _lc_begin(self, loader: Any) -> position.Pass:
        if self._lc_meanwhile is not None:
            rng.put(self._lc_meanwhile, self._lc_ledger.generators)
            self._lc_meanwhile = None
        return new_pass(loader, rng.take(self._lc_ledger.generators), self._lc_pool)

    def _lc_drop_pass(self) -> None:
        """Workers finish what was prefetched before the next pass: their generators move on, delivered or not."""
        if self._lc_pass is not None:
            self._lc_ledger.leave(self._lc_pass)
        self._lc_replay = 0
        for _, info in sorted(self._task_info.items()):
            if len(info) == 2:
                self._lc_pool.absorb(info[1])

    def _lc_take(self) -> Any:
        batch = super()._lc_take()
        if type(batch) is workers.Envelope:
            self._lc_pool.absorb(batch)
            return batch.batch
        return batch

    def _get_data(self) -> Any:
        message = super()._get_data()
        if self._lc_draining or type(message[1]) is workers.WorkerStop:
            self._lc_pool.absorb(message[1])
        return message

    def _try_put_index(self) -> None:
        # Batch j belongs to worker j % num_workers; _reset() makes the cycle anew just before the first call of this.
        for _ in range(self._lc_rotate):
            next(self._worker_queue_idx_cycle)
        self._lc_rotate = 0
        super()._try_put_index()

    def __del__(self) -> None:
        _Followed.__del__(self)
        if hasattr(self, "_workers_done_event"):  # otherwise __init__ failed before there was anything to shut down
            super(_Followed, self).__del__()


class PassHandle:
    """One pass of a persistent iterator. torch hands out one for all passes: only a handle can tell of a `break`."""

    def __init__(self, iterator: FollowedMulti) -> None:
        self._iterator = iterator
        self._pass = iterator._lc_pass

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        return self._iterator.__next__()

    def __len__(self) -> int:
        return len(self._iterator)

    def __getattr__(self, name: str) -> Any:
        if name in ("_iterator", "_pass"):  # not set yet: copy and pickle ask an empty handle
            raise AttributeError(name)
        return getattr(self._iterator, name)

    def __del__(self) -> None:
        if self._pass is not None:
            self._iterator._lc_ledger.leave(self._pass)


def new_pass(loader: Any, begin: rng.State, pool: position.Pool | None) -> position.Pass:
    told, sampler = facts.sampler_epochs(loader), facts.sampler_facts(loader)
    return position.Pass(facts.facts(loader), told, begin, pool=pool, sampler=sampler)


def missing() -> list[str]:
    """What this torch's iterators lack of what is overridden here."""
    return [name for name in _OVERRIDDEN if not hasattr(_Multi, name)]
