"""torchdata's StatefulDataLoader, followed through its own state_dict().

It is known by the name of its class, so that torchdata is imported only by those who use it. What is exact is
what torchdata saves: the order of the samples and the state of objects that have one. Four things are set
right here: the workers' random generators, and what objects without a state_dict() hold, come back as with a
DataLoader (see worker_side.py, objects/held.py); making an iterator from a loaded state draws from the
training loop's generators, which an uninterrupted run does not do at that point; the generator of its sampler
loses the draw of the workers' seed; and asking for the state before the first pass would start the workers.

A pass that was left with `break` counts as unfinished until the next one is begun: torchdata keeps the
iterator alive.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch.utils.data import IterableDataset, RandomSampler

from lastcall import errors
from lastcall.adapters.torch.data import position, rescaling, worker_side
from lastcall.adapters.torch.data import subclassing as data_classes
from lastcall.adapters.torch.data.objects import generators as rng
from lastcall.adapters.torch.data.objects import graph, held
from lastcall.core.checkpoint.doubts import Doubts

VERSION = 1
KIND = rescaling.STATEFUL


def is_stateful(obj: object) -> bool:
    return any(
        kind.__name__ == "StatefulDataLoader" and kind.__module__.startswith("torchdata")
        for kind in type(obj).__mro__
    )


class StatefulTracker:
    """The interface of LoaderTracker for a StatefulDataLoader."""

    def __init__(self, loader: Any) -> None:
        self.loader = loader
        # ranks of the run that saved the position, and of this one
        self.worlds: tuple[int, int] | None = None
        self._crew = _Crew()
        self._own_class: type[Any] | None = None

    @property
    def doubts(self) -> Doubts:
        return self._crew.doubts

    @doubts.setter
    def doubts(self, doubts: Doubts) -> None:
        self._crew.doubts = doubts

    def attach(self) -> None:
        if self._own_class is None:
            self._own_class = type(self.loader)
            object.__setattr__(self.loader, "__class__", _followed_class(self._own_class, self._crew))

    def detach(self) -> None:
        if self._own_class is not None:
            object.__setattr__(self.loader, "__class__", self._own_class)
            self._own_class = None

    def state(self) -> dict[str, Any]:
        loader = self.loader
        if loader._iterator is not None:
            inner = _freeze(loader.state_dict())
        else:
            inner = _freeze(loader.next_iter_state)
        generators = rng.take_generators(rng.find_generators(loader))
        return {
            "kind": KIND,
            "version": VERSION,
            "inner": inner,
            "generators": generators,
            "workers": self._crew.state(),
            "held": self._crew.hold(loader),
            "created": self._crew.created,
        }

    def note(self) -> dict[str, Any]:
        """torchdata's own state changes with the next batch: it must be taken now."""
        return self.state()

    def state_of(self, noted: dict[str, Any]) -> dict[str, Any]:
        return noted

    def load(self, state: dict[str, Any]) -> None:
        if state.get("kind") != KIND or state.get("version") != VERSION:
            raise errors.MismatchError(
                f"The saved data position is of kind {state.get('kind')!r}, version "
                f"{state.get('version')!r}, "
                f"but a StatefulDataLoader needs kind {KIND!r}, version {VERSION}. Use the loader class that "
                "it was saved with, or leave the loader out of protect() to start its data from the "
                "beginning."
            )
        state = rescaling.taken_up(state, self.loader, self.worlds)
        self.loader.load_state_dict({} if state["inner"] is None else _thaw(state["inner"]))
        rng.put_generators(state["generators"], rng.find_generators(self.loader))
        self._crew.saved = tuple(state.get("workers", ()))
        self._crew.created = state.get("created")
        self._crew.held = state.get("held") or {}
        self._crew.holding.of(self.loader)
        if self._crew.held:
            self._crew.holding.resume(self._crew.held)

    def iterate(self) -> Iterator[Any]:
        return iter(self.loader)

    @property
    def delivered(self) -> int:
        """Batches delivered in the latest pass; 0 between load() and iter(): only torchdata can read its
        state."""
        return int(getattr(self.loader._iterator, "_num_yielded", 0))

    @property
    def exhausted(self) -> bool:
        if self.loader._iterator is None:
            return bool((self.loader.next_iter_state or {}).get("_iterator_finished", False))
        return bool(self.loader._iterator._finished)


class _Crew:
    """The worker processes of the latest iterator: what they reported with the batches that were
    delivered."""

    def __init__(self) -> None:
        self.doubts = Doubts()
        self.saved: tuple[Any, ...] = ()  # of the pass that is continued
        self.holding = held.Holding(asked=True)
        self.held: dict[str, Any] = {}  # of the pass that is continued
        # the process's generators, before the iterator of the latest pass was made
        self.created: rng.Parts | None = None
        self._begin: held.Snapshot | None = None
        self._pool: position.Pool | None = None

    def hold(self, loader: Any) -> dict[str, Any] | None:
        """What objects in this process hold that torchdata does not ask for their state."""
        if self.held:
            return self.held
        self.holding.of(loader)
        self.holding.glance(self.doubts)
        for path in self.holding.moving:
            told_by_the_script = path[1:] == (".epoch",) and hasattr(loader.sampler, "set_epoch")
            if path[0] in ("sampler", "batch_sampler") and not told_by_the_script:
                self.doubts.add(
                    f"`{graph.name_of(path)}` changes with every pass, and torchdata begins the order of an "
                    "interrupted pass twice",
                    "Give the sampler state_dict() and load_state_dict(), or use torch's own DataLoader.",
                )
        return held.saved(tuple(self.holding.moving), self._begin, None, self.holding.now())

    def make(self, loader: Any, build: Callable[[], Any]) -> Any:
        holding = self.holding
        holding.of(loader)
        known, self.held = self.held, {}
        inside_a_pass = loader.next_iter_state is not None and not _finished(loader)
        if inside_a_pass:
            holding.put(known.get("now", ()))
            holding.put(known.get("begin", ()))
        self._begin = holding.begin(self.doubts)
        # torchdata begins its order again, and skips: with a seed that it draws from the process's generator
        anew = inside_a_pass and type(loader.sampler) is RandomSampler and loader.sampler.generator is None
        if anew and self.created is not None:
            rng.put_parts(self.created)
        elif not inside_a_pass:
            self.created = rng.take_parts()
        iterator = self._staffed(loader, build)
        if anew or (inside_a_pass and known.get("begin")):
            _draw_order(iterator)
        if inside_a_pass and known.get("begin"):
            holding.put(known["now"])
        return iterator

    def state(self) -> tuple[Any, ...]:
        return self.saved or (() if self._pool is None else tuple(self._pool.workers))

    def _staffed(self, loader: Any, build: Callable[[], Any]) -> Any:
        """An iterator whose workers report. The loader is itself again afterwards."""
        count, iterable = loader.num_workers, isinstance(loader.dataset, IterableDataset)
        saved, self.saved = self.saved, ()
        if not count:
            return build()
        resumed = (
            loader.next_iter_state is not None
            and (loader.persistent_workers or not _finished(loader))
            and not iterable
        )
        pool = self._pool = position.Pool(
            _NOTHING, saved if resumed and len(saved) == count else [None] * count, loader.persistent_workers
        )
        collate, start = loader.collate_fn, loader.worker_init_fn
        loader.collate_fn = worker_side.ReportingCollate(collate)
        loader.worker_init_fn = worker_side.WorkerStart(start, pool.workers, collate, stops=False)
        try:
            iterator = build()
        finally:
            loader.collate_fn, loader.worker_init_fn = collate, start
        pool.asked = hasattr(loader.dataset, "state_dict")
        skips = iterable or getattr(loader, "snapshot_every_n_steps", 1) != 1
        iterator.__class__ = _opening_class(type(iterator), self, pool, skips)
        return iterator

    def open(self, envelope: worker_side.Envelope, pool: position.Pool, skips: bool) -> Any:
        pool.absorb(envelope)
        for reason, remedy in envelope.report.doubts:
            self.doubts.add(reason, remedy)
        held = envelope.report.held and not pool.asked  # torchdata asks a dataset with state_dict() for it
        if skips and (envelope.report.parts != (None, None, None) or held):
            self.doubts.add(
                "the workers of the StatefulDataLoader draw random numbers, and torchdata makes some batches "
                "again when it continues, "
                "with other ones",
                "Use snapshot_every_n_steps=1 and a dataset with indices, or torch's own DataLoader.",
            )
        return envelope.batch


_NOTHING: Any = (None, None, None, ())


def _draw_order(iterator: Any) -> None:
    """torchdata skips in the order of a sampler without a state when the first batch is made: here it is made
    to skip at once."""
    waiting = getattr(iterator, "_sampler_iter", None)
    if isinstance(waiting, itertools.islice):
        iterator._sampler_iter = itertools.chain(list(itertools.islice(waiting, 1)), waiting)


def _finished(loader: Any) -> bool:
    return bool((loader.next_iter_state or {}).get("_iterator_finished", False))


def _opening_class(own: type[Any], crew: _Crew, pool: position.Pool, skips: bool) -> type[Any]:
    def next_data(self: Any) -> Any:
        batch = own._next_data(self)
        return crew.open(batch, pool, skips) if type(batch) is worker_side.Envelope else batch

    return data_classes.derive(own, (own,), {"_next_data": next_data})


def _followed_class(own: type[Any], crew: _Crew) -> type[Any]:
    def get_iterator(self: Any) -> Any:
        build = super(followed, self)._get_iterator
        if self.next_iter_state is None:
            return crew.make(self, build)
        generators = rng.find_generators(self)
        saved = rng.take(generators)
        try:
            return crew.make(self, build)
        finally:
            rng.put(saved, generators)

    followed = data_classes.derive(own, (own,), {"_get_iterator": get_iterator})
    return followed


def _freeze(value: Any) -> Any:
    """A copy that shares nothing with torchdata's live state; tensors and arrays (sampler generators) become
    bytes."""
    if isinstance(value, dict):
        return {key: _freeze(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_freeze(item) for item in value) if type(value) in (list, tuple) else value
    if isinstance(value, torch.Tensor):
        array = value.detach().cpu().numpy()
        return {
            "__lastcall__": "tensor",
            "dtype": array.dtype.str,
            "shape": tuple(array.shape),
            "data": array.tobytes(),
        }
    if isinstance(value, np.ndarray):
        return {
            "__lastcall__": "array",
            "dtype": value.dtype.str,
            "shape": tuple(value.shape),
            "data": value.tobytes(),
        }
    return value


def _thaw(value: Any) -> Any:
    if isinstance(value, dict):
        if "__lastcall__" in value:
            array = np.frombuffer(bytearray(value["data"]), dtype=value["dtype"]).reshape(value["shape"])
            return torch.from_numpy(array) if value["__lastcall__"] == "tensor" else array
        return {key: _thaw(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_thaw(item) for item in value)
    return value
