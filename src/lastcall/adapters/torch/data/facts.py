"""What a loader is like: batches and their size, workers, the epoch its samplers were told, whose samplers they are."""

from __future__ import annotations

import logging
from typing import Any

from torch.utils import data as torch_data

from lastcall.adapters.torch.data import position
from lastcall.adapters.torch.data import randomness as rng

log = logging.getLogger("lastcall")


def facts(loader: Any) -> position.Facts:
    iterable = isinstance(loader.dataset, torch_data.IterableDataset)
    batch_size = loader.batch_size
    if batch_size is None:
        batch_size = getattr(loader.batch_sampler, "batch_size", None)
    length = None
    if not iterable:  # len() of a loader over an iterable dataset makes torch warn about lengths later
        try:
            length = len(loader)
        except (TypeError, NotImplementedError):
            pass
    return (length, batch_size if isinstance(batch_size, int) else None, loader.num_workers, iterable)


def sampler_facts(loader: Any) -> position.Sampler | None:
    """What the order of a DistributedSampler depends on; None where it is none, or batches are not cut from it one after another."""
    batches = getattr(loader, "batch_sampler", None)
    sampler: Any = getattr(batches, "sampler", None) if type(batches) is torch_data.BatchSampler else None
    own = torch_data.DistributedSampler
    if not isinstance(sampler, own) or type(sampler).__iter__ is not own.__iter__:
        return None
    length = len(sampler.dataset)  # type: ignore[arg-type]
    return (sampler.num_replicas, length, sampler.seed, sampler.shuffle, sampler.drop_last)


def sampler_epochs(loader: Any) -> tuple[int, ...]:
    """What set_epoch() of the samplers was last told (DistributedSampler and its kind)."""
    return tuple(sampler.epoch for sampler in _epoch_samplers(loader))


def set_sampler_epochs(loader: Any, epochs: tuple[int, ...], quiet: bool) -> None:
    for sampler, epoch in zip(_epoch_samplers(loader), epochs, strict=False):
        if sampler.epoch != epoch:
            if not quiet:
                log.warning(
                    "%s.set_epoch(%d) was called, but the interrupted pass was of epoch %d: it is continued "
                    "as epoch %d. Count epochs with run.epochs(), or from the number that was saved.",
                    type(sampler).__name__,
                    sampler.epoch,
                    epoch,
                    epoch,
                )
            sampler.set_epoch(epoch)


def _epoch_samplers(loader: Any) -> list[Any]:
    return [s for s in rng.samplers(loader) if hasattr(s, "set_epoch") and isinstance(getattr(s, "epoch", None), int)]


def trusted(loader: Any) -> bool:
    """torch's own samplers draw from global generators on their first draw only."""
    return all(type(sampler).__module__.startswith("torch.utils.data") for sampler in rng.samplers(loader))
