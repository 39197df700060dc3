"""torch's own DataLoader iterators, followed: they count what they deliver, and one of them can begin in the
middle of a pass.

The order of events that has to be repeated bit for bit (torch 2.4 to 2.13): the index sampler's iterator is
made, the workers' base seed is drawn, and with workers the sampler's iterator is made once more and drawn
from at once; without workers its first draw comes with the first batch, any amount of training later. So
three moments are remembered: `created` (before the iterator), `begin` (before the sampler's last iterator),
`draw` (before its first draw). Going back to them is done behind the back of the training loop: its
generators are put back afterwards, since an uninterrupted run draws nothing at that point.

Discarded: a wrapper around DataLoader, which code that holds the loader would not see; wrapping the sampler,
which is an attribute users look at; and pickling sampler iterators, most of which are running generators.
"""

from __future__ import annotations

import logging
import threading
import time
import weakref
from collections import deque
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import dataloader as torch_dataloader

from lastcall.adapters.torch.data import loader_facts, position
from lastcall.adapters.torch.data import worker_side as workers
from lastcall.adapters.torch.data.delivery import between, replaying, seen
from lastcall.adapters.torch.data.objects import generators as rng
from lastcall.adapters.torch.data.objects import lazy, seeding

log = logging.getLogger("lastcall")

_LOOKED_AT = 4  # fetches from a dataset with indices that are checked for the use of random numbers

# Private names, the same from torch 2.4 to 2.13. A torch without them must not make `import lastcall` fail.
Single: Any = getattr(torch_dataloader, "_SingleProcessDataLoaderIter", object)
_Multi: Any = getattr(torch_dataloader, "_MultiProcessingDataLoaderIter", object)
_OVERRIDDEN = ("_reset", "_next_index", "_next_data", "_get_data", "_try_put_index")


class _WorkerView:
    """The loader as the iterator's constructor shall see it. The loader itself is not touched, not for a
    moment."""

    def __init__(self, loader: Any, saved: list[position.Worker | None]) -> None:
        self._loader = loader
        self.collate_fn = workers.ReportingCollate(loader.collate_fn)
        self.worker_init_fn = workers.WorkerStart(loader.worker_init_fn, saved, loader.collate_fn)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def __len__(self) -> int:  # looked up on the class: __getattr__ does not serve it
        return len(self._loader)


class Followed:
    """Counts deliveries, and catches up with a position on the first draw after a resume."""

    _lc_ledger: position.Ledger
    _lc_pass: position.Pass | None = None
    _lc_watched = False  # every draw is looked at; otherwise only the first one is
    _lc_drawn = False
    _lc_instead: Any = None  # the next pass, where somebody must not see this one's end
    _lc_replay = 0  # batches of an iterable dataset to be made again and thrown away

    def _lc_start(self, passage: position.Pass, loader: Any) -> None:
        self._lc_pass = passage
        passage.iterator = weakref.ref(self)
        self._lc_drawn = False
        self._lc_watched = not (passage.iterable or loader_facts.trusted(loader))
        passage.draws = 0
        passage.over = type(loader.dataset).__name__
        ahead = loader.num_workers * (getattr(loader, "prefetch_factor", None) or 2)
        passage.indices = deque(maxlen=seen.KEPT + ahead)

    def __next__(self) -> Any:
        if self._lc_replay:
            self._lc_make_again()
        if self._lc_instead is not None:
            return next(self._lc_instead)
        passage = self._lc_pass
        assert passage is not None
        if self._lc_ledger.noting or passage.remade:
            return self._lc_noted(passage)
        if not passage.iterable:
            return self._lc_counted(passage)
        began = time.perf_counter()
        batch = self._lc_counted(passage)
        passage.seconds += time.perf_counter() - began
        if passage.seconds >= passage.costly:
            replaying.forewarn(passage)
        return batch

    def _lc_counted(self, passage: position.Pass) -> Any:
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

    def _lc_noted(self, passage: position.Pass) -> Any:
        """As __next__(), for a script that reads ahead of its steps, or may."""
        ledger = self._lc_ledger
        made_with = passage.remade.pop(0) if passage.remade else None
        now = None
        if made_with is not None:  # drawn by the last incarnation already, with these random numbers
            now = rng.take_parts()
            rng.put_parts(made_with)
        try:
            if ledger.noting:
                ledger.draw(passage)
            batch = self._lc_take()
            passage.delivered += 1
        except StopIteration:
            if ledger.noting:
                passage.before_end = passage.recent.pop()[0]
            ledger.finish(passage)
            return self._lc_next_pass(passage)
        except Exception:
            passage.failed += 1
            raise
        finally:
            if now is not None:
                rng.put_parts(now)
        if ledger.noting:
            if threading.get_ident() != ledger.thread:
                ledger.elsewhere = f"thread (`{threading.current_thread().name}`)"
            ledger.task = position.running_task()
            ledger.lead.drawn(passage, batch)
            if passage.moves:
                ledger.moved()
        return batch

    def _lc_next_pass(self, passage: position.Pass) -> Any:
        """The pass is over. All of it was delivered before the interruption: itertools.cycle() takes that for
        an empty loader."""
        loader = self._lc_ledger.source()
        if passage.here or not passage.opened or loader is None or not between.cycled(self):
            raise StopIteration
        self._lc_instead = iter(loader)
        return next(self._lc_instead)

    def _lc_take(self) -> Any:
        return super().__next__()  # type: ignore[misc]

    def _next_index(self) -> Any:
        passage = self._lc_pass
        assert passage is not None
        if not self._lc_drawn:
            return self._lc_first(passage)
        if self._lc_watched:
            return self._lc_draw(passage)
        index = super()._next_index()  # type: ignore[misc]
        passage.indices.append((passage.draws, index))
        passage.draws += 1
        return index

    def _lc_first(self, passage: position.Pass) -> Any:
        self._lc_drawn = True
        ledger = self._lc_ledger
        if passage.draw is not None:
            return self._lc_catch_up(passage)
        now = rng.take(ledger.generators)
        passage.draw = passage.begin if now == passage.begin else now
        passage.held_at_draw = ledger.holding.since(passage.held, ledger.doubts)
        return self._lc_draw(passage)

    def _lc_draw(self, passage: position.Pass) -> Any:
        """One index. Where the draw moves the process's generators, what they were before belongs to the pass
        from then on; where another incarnation found that it does, it is made with those."""
        number, moved = passage.draws, passage.moved
        made_with = moved.get(number)
        if made_with is not None:
            index = self._lc_draw_with(made_with)
        elif not self._lc_watched or number == 0:
            index = super()._next_index()  # type: ignore[misc]
        else:
            watch = self._lc_ledger.watch
            before = watch.before()
            index = super()._next_index()  # type: ignore[misc]
            found = watch.moved(before)
            if found is not None and not passage.remember(number, found):
                self._lc_watched = False
                self._lc_ledger.doubts.add(
                    f"the sampler of the DataLoader over `{passage.over}` draws from a global random "
                    "generator all through the pass, "
                    f"mixed with what training draws from it, and only {lazy.MOST} such draws of a pass are "
                    "saved",
                    "Give the sampler a torch.Generator of its own, or draw the whole order at the start of "
                    "each pass.",
                )
        passage.indices.append((number, index))
        passage.draws += 1
        return index

    def _lc_draw_with(self, made_with: rng.Parts) -> Any:
        now = rng.take_parts()
        rng.put_parts(made_with)
        try:
            return super()._next_index()  # type: ignore[misc]
        finally:
            rng.put_parts(now)

    def _lc_catch_up(self, passage: position.Pass) -> Any:
        """Draw what was delivered before the interruption, without loading it, and then the next index."""
        generators, holding = self._lc_ledger.generators, self._lc_ledger.holding
        skip = 0 if passage.iterable else passage.delivered + passage.failed
        # With workers all of this happens while the iterator is made, and its maker puts the generators back.
        # Those of the sampler must not be put back before the prefetching draws that follow.
        lazy = passage.pool is None and not passage.iterable
        saved = rng.take(generators) if lazy else None
        held_now = holding.take() if lazy else ()
        assert passage.draw is not None
        rng.put(passage.draw, generators)
        holding.put(passage.again)
        first = None
        try:
            for done in range(max(skip, 1)):
                first = self._lc_skip(done, skip)
        finally:
            if saved is not None:
                rng.put(saved, () if passage.anew else generators)
                holding.put(() if passage.anew else held_now)
        if not skip:
            return first
        seen.compare(
            passage.seen, seen.of_indices(passage.indices, skip), passage.over, self._lc_ledger.doubts
        )
        return self._lc_draw(passage)

    def _lc_skip(self, done: int, skip: int) -> Any:
        assert self._lc_pass is not None
        try:
            return self._lc_draw(self._lc_pass)
        except StopIteration:
            if skip:
                log.warning(
                    "%d batches of this pass were delivered before the interruption, but the loader now has "
                    "only %d in a pass: the pass counts as ended, and training continues with the next one.",
                    skip,
                    done,
                )
            raise

    def _lc_make_again(self) -> None:
        count, self._lc_replay = self._lc_replay, 0
        passage = self._lc_pass
        holding = self._lc_ledger.holding
        saved, held_now = rng.take(self._lc_ledger.generators), holding.take()
        try:
            seconds = passage.seconds if passage is not None else 0.0
            done = replaying.replay(
                "An IterableDataset cannot be resumed in the middle", count, seconds, self._lc_take
            )
            if done < count:
                log.warning(
                    "The IterableDataset ended before the %d batches that were delivered before the "
                    "interruption.",
                    count,
                )
            elif passage is not None and not passage.moves_unseen:
                seen.compare(
                    passage.seen,
                    seen.of_batches(passage.glimpses, count),
                    passage.over,
                    self._lc_ledger.doubts,
                )
        finally:
            rng.put(saved, self._lc_ledger.generators)
            if self._lc_pass is not None and self._lc_pass.pool is None:  # what workers hold is theirs
                holding.put(held_now)

    def __del__(self) -> None:
        if self._lc_pass is not None:
            self._lc_ledger.leave(self._lc_pass)


class FollowedSingle(Followed, Single):  # type: ignore[misc]
    """num_workers=0."""

    _lc_take: Any = getattr(Single, "__next__", None)  # without a call in between: this runs at every batch
    _lc_fetched = 0
    _lc_buffers: lazy.Buffers | None = None
    _lc_before: Any = None  # the generators after the sampler's draw

    def __init__(self, loader: Any, ledger: position.Ledger, passage: position.Pass, resumed: bool) -> None:
        self._lc_ledger = ledger
        self._lc_start(passage, loader)
        super().__init__(loader)
        if resumed and passage.iterable:
            self._lc_replay = passage.delivered
        ledger.begin(passage, resumed)

    def _next_data(self) -> Any:
        passage = self._lc_pass
        assert passage is not None
        if passage.iterable:
            return self._lc_fetch(passage)
        if self._lc_fetched >= _LOOKED_AT or self._lc_ledger.holding.random:
            return super()._next_data()
        self._lc_fetched += 1
        batch = super()._next_data()
        before, self._lc_before = self._lc_before, None
        self._lc_ledger.holding.random = (
            before is not None and self._lc_ledger.watch.moved(before) is not None
        )
        return batch

    def _next_index(self) -> Any:
        index = super()._next_index()
        if self._lc_fetched <= _LOOKED_AT:  # what a sampler draws does not make the samples random
            self._lc_before = self._lc_ledger.watch.before()
        return index

    def _lc_fetch(self, passage: position.Pass) -> Any:
        """A batch of a stream, made with what another incarnation found that it was made with, or watched."""
        number = self._lc_fetched
        if not number and self._lc_ledger.begun <= 1:
            with seeding.watched(self._lc_ledger.name, self._lc_ledger.doubts):
                return self._lc_fetch_one(passage, number)
        return self._lc_fetch_one(passage, number)

    def _lc_fetch_one(self, passage: position.Pass, number: int) -> Any:
        made_with = passage.moved.get(number)
        now = None
        if made_with is not None:
            now = rng.take_parts()
            rng.put_parts(made_with)
        watch = self._lc_ledger.watch
        before = watch.before()
        try:
            batch = super()._next_data()
            found = watch.moved(before) if number and made_with is None and not passage.moves_unseen else None
        finally:
            if now is not None:
                rng.put_parts(now)
        self._lc_fetched += 1
        passage.glimpses.append((number, seen.glimpse(batch)))
        if found is not None and not passage.remember(number, found):
            self._lc_too_often(passage)
        return batch

    def _lc_too_often(self, passage: position.Pass) -> None:
        """What is drawn for a sample that is handed out at once need not be drawn again. What waits in a
        buffer must be."""
        kept = lazy.buffers(getattr(self._dataset_fetcher, "dataset_iter", None))
        if self._lc_buffers is None:
            self._lc_buffers = kept
            return
        passage.moves_unseen = True
        if lazy.keeps(self._lc_buffers, kept):
            self._lc_ledger.doubts.add(
                f"`{passage.over}` keeps samples back (a shuffle buffer?) and draws from a global random "
                "generator all through the "
                f"pass, mixed with what training draws from it, and only {lazy.MOST} such draws of a pass "
                "are saved",
                "Give the dataset a generator of its own, or use num_workers=1, where it has the worker's "
                "generators to itself.",
            )


class FollowedMulti(Followed, _Multi):  # type: ignore[misc]
    """Worker processes. `resumed`: the pass to continue. `meanwhile`: the generators to go back to before a
    first pass is begun with workers that, without the interruption, would have been there already."""

    _lc_draining = False
    _lc_rotate = 0
    _lc_in_order = True

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
        self._lc_in_order = loader.num_workers == 1 or getattr(loader, "in_order", True)
        super().__init__(_WorkerView(loader, pool.workers))

    def _reset(self, loader: Any, first_iter: bool = False) -> None:
        ledger, pool = self._lc_ledger, self._lc_pool
        resumed, self._lc_resumed = self._lc_resumed, None
        if not first_iter:
            self._lc_drop_pass()
        if resumed is None:
            passage = self._lc_begin(loader, first_iter)
        else:
            passage = resumed
            rng.put(passage.begin, ledger.generators)
            self._lc_rotate = (
                0 if passage.iterable else (passage.delivered + passage.failed) % self._num_workers
            )
            self._lc_replay = passage.delivered if passage.iterable else 0
        self._lc_start(passage, loader)
        self._lc_draining = not first_iter
        super()._reset(loader, first_iter)
        self._lc_draining = False
        pool.restart()
        passage.workers_at_begin = tuple(pool.workers)
        ledger.begin(passage, resumed is not None)

    def _lc_begin(self, loader: Any, first_iter: bool) -> position.Pass:
        if self._lc_meanwhile is not None:
            rng.put(self._lc_meanwhile, self._lc_ledger.generators)
            self._lc_meanwhile = None
            first_iter = False  # other incarnations had its workers
        passage = new_pass(loader, self._lc_ledger, rng.take(self._lc_ledger.generators), self._lc_pool)
        if first_iter:
            self._lc_pool.made_for = passage
        return passage

    def _lc_drop_pass(self) -> None:
        """Workers finish what was prefetched before the next pass: their generators move on, delivered or
        not."""
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
            for reason, remedy in batch.report.doubts:
                self._lc_ledger.doubts.add(reason, remedy)
            batch = batch.batch
        passage = self._lc_pass
        if not self._lc_in_order and torch.is_grad_enabled():  # a validation pass may deliver in any order
            self._lc_any_order(passage)
        if passage is not None and passage.iterable:
            passage.glimpses.append((passage.taken_out, seen.glimpse(batch)))
            passage.taken_out += 1
        return batch

    def _lc_any_order(self, passage: position.Pass | None) -> None:
        if passage is None or not passage.here:
            return  # the first batch may be a peek
        self._lc_in_order = True  # it was said
        self._lc_ledger.doubts.add(
            f"`{self._lc_ledger.name}` has in_order=False, which delivers batches in the order in which the "
            "workers finish: after an "
            "interruption some of the pass may be repeated or missed",
            "Use in_order=True.",
        )

    def _get_data(self) -> Any:
        message = super()._get_data()
        if self._lc_draining or type(message[1]) is workers.WorkerStop:
            self._lc_pool.absorb(message[1])
        return message

    def _try_put_index(self) -> None:
        # Batch j belongs to worker j % num_workers; _reset() makes a new cycle just before the first call of
        # this.
        for _ in range(self._lc_rotate):
            next(self._worker_queue_idx_cycle)
        self._lc_rotate = 0
        super()._try_put_index()

    def __del__(self) -> None:
        Followed.__del__(self)
        # otherwise __init__ failed before there was anything to shut down
        if hasattr(self, "_workers_done_event"):
            super(Followed, self).__del__()


class PassHandle:
    """One pass of a persistent iterator. torch hands out one for all passes: only a handle can tell of a
    `break`."""

    def __init__(self, iterator: FollowedMulti) -> None:
        self._iterator = iterator
        self._pass = iterator._lc_pass
        if self._pass is not None:
            self._pass.iterator = weakref.ref(self)

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


def new_pass(
    loader: Any, ledger: position.Ledger, begin: rng.State, pool: position.Pool | None
) -> position.Pass:
    told, sampler = loader_facts.sampler_epochs(loader), loader_facts.sampler_facts(loader)
    if ledger.told:
        loader_facts.compare_epochs(loader, ledger.told, ledger.doubts)
        ledger.told = ()
    held = ledger.holding.begin(ledger.doubts)
    return position.Pass(loader_facts.facts(loader), told, begin, pool=pool, sampler=sampler, held=held)


def missing() -> list[str]:
    """What this torch's iterators lack of what is overridden here."""
    return [name for name in _OVERRIDDEN if not hasattr(_Multi, name)]
