"""What runs inside a DataLoader's worker processes: each batch comes back with the generators that it left
behind.

A worker's generators can only be known from the worker, and only its batches come back from there. So a batch
travels in an Envelope with the states that changed since that worker's previous one, and a resumed worker
starts from the last states that were *delivered*: batches loaded ahead, but never handed to the training
loop, are loaded again with the same random numbers.

Discarded: reseeding each worker from (seed, epoch, batch), which is cheaper but gives other random numbers
than a plain DataLoader; and asking the workers for their state at the time of the notice, when they are
batches ahead and may be dying.

What the worker's copies of the dataset and the collate function hold of their own (see `held`) travels the
same way.

Everything here is picklable by name, for the "spawn" and "forkserver" start methods.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from torch.utils import data as torch_data
from torch.utils.data._utils import pin_memory as torch_pin_memory
from torch.utils.data._utils import worker as torch_worker

from lastcall.adapters.torch.data.objects import generators as rng
from lastcall.adapters.torch.data.objects import held, seeding
from lastcall.adapters.torch.data.objects.held import Pairs
from lastcall.core.checkpoint.doubts import Doubts

_pin_memory: Any = torch_pin_memory.pin_memory
_StopIteration: Any = getattr(torch_worker, "_IterableDatasetStopIteration", object)


class Report(NamedTuple):
    """What has changed in a worker since its previous batch."""

    parts: rng.Parts  # of the process's generators
    held: Pairs = ()  # of what its dataset and its functions hold
    doubts: tuple[tuple[str, str], ...] = ()  # reasons and remedies: what changes there and cannot be saved


class Envelope:
    """A batch, the worker that made it, and what changed there since its previous batch."""

    __slots__ = ("batch", "report", "worker")

    def __init__(self, batch: Any, worker: int, report: Report) -> None:
        self.batch = batch
        self.worker = worker
        self.report = report

    def pin_memory(self) -> Envelope:
        return Envelope(_pin_memory(self.batch), self.worker, self.report)

    def __reduce__(self) -> tuple[type[Envelope], tuple[Any, ...]]:
        return (Envelope, (self.batch, self.worker, self.report))


class WorkerStop(_StopIteration):  # type: ignore[misc]
    """torch's message that a worker's IterableDataset has ended, with the states it ended with.

    Without them, what a worker drew for a last batch that drop_last threw away would be unknown to the next
    epoch of a persistent worker.
    """

    def __init__(self, worker_id: int) -> None:
        super().__init__(worker_id)
        report = (
            Report(rng.take_parts())
            if _reporter is None
            else _reporter.changes()._replace(parts=rng.take_parts())
        )
        object.__setattr__(self, "report", report)  # torch's message is a frozen dataclass


class _Told(Doubts):
    """Doubts that are found in a worker, for the training process to say."""

    def __init__(self) -> None:
        super().__init__()
        self.new: list[tuple[str, str]] = []

    def add(self, reason: str, remedy: str) -> None:
        if reason not in self._reasons:
            self._reasons[reason] = None
            self.new.append((reason, remedy))


class _Reporter:
    """Remembers what this worker reported last."""

    def __init__(self, tops: dict[str, Any], saved: Pairs) -> None:
        self._doubts = _Told()
        self._holding = held.Holding()
        self._holding.below(tops, isinstance(tops.get("dataset"), torch_data.IterableDataset))
        self._holding.look(self._doubts)
        if saved:
            self._holding.resume({"moving": [path for path, _ in saved], "now": saved})
        self._held = self._holding.now()
        self._known = rng.take_parts()
        self._over = type(tops.get("dataset")).__name__
        self._seeding: seeding.Watch | None = None
        if isinstance(tops.get("dataset"), torch_data.IterableDataset):
            self._seeding = seeding.Watch()
            self._seeding.begin()

    def changes(self) -> Report:
        if self._seeding is not None:  # the first batch is made
            self._seeding.end(self._over, self._doubts)
            self._seeding = None
        known, self._known = self._known, rng.take_parts()
        torch_part, python_part, numpy_part = (
            now if now != before else None for now, before in zip(self._known, known, strict=True)
        )
        holding = self._holding
        holding.random = holding.random or self._known != known
        holding.glance(self._doubts)
        before, self._held = self._held, holding.now()
        moved = tuple(
            (path, frozen)
            for path, frozen in self._held.items()
            if frozen is not None and before.get(path) != frozen
        )
        told, self._doubts.new = tuple(self._doubts.new), []
        return Report((torch_part, python_part, numpy_part), moved, told)


_reporter: _Reporter | None = None


class WorkerStart:
    """Stands in for the loader's worker_init_fn: runs it, then puts back what the worker's generators and
    objects were.

    `stops`: the end of a stream is reported as WorkerStop. torchdata's workers hold torch's own class, which
    could not be pickled then.
    """

    def __init__(
        self, inner: Callable[[int], Any] | None, workers: Sequence[Any], collate: Any, *, stops: bool = True
    ) -> None:
        self._stops = stops
        self._inner = inner
        self._workers = tuple(workers)
        self._collate = collate

    def __call__(self, worker_id: int) -> None:
        global _reporter
        if self._inner is not None:
            self._inner(worker_id)
        saved = self._workers[worker_id] if worker_id < len(self._workers) else None
        if saved is not None:
            rng.put_parts(tuple(saved[:3]))
        if self._stops and _StopIteration is not object:
            torch_worker._IterableDatasetStopIteration = WorkerStop  # type: ignore[misc]  # in this worker process only
        info = torch_data.get_worker_info()
        tops = {"dataset": info.dataset, "collate_fn": self._collate} if info is not None else {}
        _reporter = _Reporter(tops, saved[3] if saved is not None and len(saved) > 3 else ())


class ReportingCollate:
    """Stands in for the loader's collate_fn: the batch, in an Envelope."""

    def __init__(self, inner: Callable[[Any], Any]) -> None:
        self._inner = inner

    def __call__(self, samples: Any) -> Any:
        batch = self._inner(samples)
        info = torch_data.get_worker_info()
        if info is None or _reporter is None:
            return batch
        return Envelope(batch, info.id, _reporter.changes())
