"""What runs inside a DataLoader's worker processes: each batch comes back with the generators that it left behind.

A worker's generators can only be known from the worker, and only its batches come back from there. So a batch travels
in an Envelope with the states that changed since that worker's previous one, and a resumed worker starts from the last
states that were *delivered*: batches loaded ahead, but never handed to the training loop, are loaded again with the
same random numbers.

Discarded: seeding each worker anew from (seed, epoch, batch), which is cheaper but gives other random numbers than a
DataLoader that nobody follows; and asking the workers for their state at the time of the notice, when they are batches
ahead and may be dying.

Everything here is picklable by name, for the "spawn" and "forkserver" start methods. Generators that a dataset keeps
in its own attributes are not seen.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch.utils import data as torch_data
from torch.utils.data._utils import pin_memory as torch_pin_memory
from torch.utils.data._utils import worker as torch_worker

from lastcall.adapters.torch.data import randomness as rng

_pin_memory: Any = torch_pin_memory.pin_memory
_StopIteration: Any = getattr(torch_worker, "_IterableDatasetStopIteration", object)


class Envelope:
    """A batch, the worker that made it, and those of its generator states that changed since its previous batch."""

    __slots__ = ("batch", "parts", "worker")

    def __init__(self, batch: Any, worker: int, parts: rng.Parts) -> None:
        self.batch = batch
        self.worker = worker
        self.parts = parts

    def pin_memory(self) -> Envelope:
        return Envelope(_pin_memory(self.batch), self.worker, self.parts)

    def __reduce__(self) -> tuple[type[Envelope], tuple[Any, ...]]:
        return (Envelope, (self.batch, self.worker, self.parts))


class WorkerStop(_StopIteration):  # type: ignore[misc]
    """torch's message that a worker's IterableDataset has ended, with the states it ended with.

    Without them, what a worker drew for a last batch that drop_last threw away would be unknown to the next epoch of a
    persistent worker.
    """

    def __init__(self, worker_id: int) -> None:
        super().__init__(worker_id)
        object.__setattr__(self, "parts", rng.take_parts())  # torch's message is a frozen dataclass


class _Reporter:
    """Remembers what this worker reported last."""

    def __init__(self) -> None:
        self._known = rng.take_parts()

    def changes(self) -> rng.Parts:
        known, self._known = self._known, rng.take_parts()
        torch_part, python_part, numpy_part = (now if now != before else None for now, before in zip(self._known, known, strict=True))
        return (torch_part, python_part, numpy_part)


_reporter: _Reporter | None = None


class WorkerStart:
    """Stands in for the loader's worker_init_fn: runs it, then puts the worker's saved generators back."""

    def __init__(self, inner: Callable[[int], Any] | None, workers: Sequence[rng.Parts | None]) -> None:
        self._inner = inner
        self._workers = tuple(workers)

    def __call__(self, worker_id: int) -> None:
        global _reporter
        if self._inner is not None:
            self._inner(worker_id)
        saved = self._workers[worker_id] if worker_id < len(self._workers) else None
        if saved is not None:
            rng.put_parts(saved)
        if _StopIteration is not object:
            torch_worker._IterableDatasetStopIteration = WorkerStop  # type: ignore[misc]  # in this worker process only
        _reporter = _Reporter()


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
