"""What a loader is like: batches and their size, workers, the epoch its samplers were told, whose samplers
they are."""

from __future__ import annotations

import logging
from typing import Any

from torch.utils import data as torch_data

from lastcall.adapters.torch.data import position
from lastcall.adapters.torch.data.objects import generators as rng
from lastcall.adapters.torch.data.objects import graph
from lastcall.core.checkpoint.doubts import Doubts

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


def compare_batches(loader: Any, state: dict[str, Any], doubts: Doubts) -> None:
    """Whether the batches of an interrupted pass are still of the same size."""
    batch_size, now = state["facts"][1], facts(loader)[1]
    if state["phase"] == position.INSIDE and batch_size != now:
        doubts.add(
            f"batch_size was {batch_size} and is now {now}: the interrupted pass continues at batch "
            f"{state['delivered']}, which is at "
            "other samples, so some will be repeated or missed",
            "Use the batch_size of the interrupted run.",
        )


def compare_length(loader: Any, state: dict[str, Any], doubts: Doubts) -> None:
    """Whether it has as many. Asked when the pass is opened: a script may set its data up at the top of an
    epoch."""
    length, batch_size, *_ = state["facts"]
    length_now, batch_size_now, *_ = facts(loader)
    if state["phase"] == position.INSIDE and length != length_now and batch_size == batch_size_now:
        doubts.add(
            f"a pass had {length} batches and now has {length_now}: it continues at batch "
            f"{state['delivered']} of another order: "
            "some samples will be repeated or missed",
            "Give the loader the dataset of the interrupted run.",
        )


def sampler_facts(loader: Any) -> position.Sampler | None:
    """What the order of a DistributedSampler depends on; None where it is none, or batches are not cut from
    it one after another."""
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


def epochs_told(loader: Any, epochs: tuple[int, ...]) -> tuple[tuple[int, int], ...]:
    """For each sampler: what the script has told it on its way to the loop, and the epoch of the interrupted
    pass. Asked before anything is put back."""
    return tuple(
        (sampler.epoch, epoch) for sampler, epoch in zip(_epoch_samplers(loader), epochs, strict=False)
    )


def compare_epochs(loader: Any, before: tuple[tuple[int, int], ...], doubts: Doubts) -> None:
    """The first pass behind a resumed one: whether the script counts on from there, or from what it had told
    before its loop. A counter that the loop carries comes back only when the loop begins."""
    for sampler, (told, epoch) in zip(_epoch_samplers(loader), before, strict=False):
        if told != epoch and sampler.epoch <= epoch:
            doubts.add(
                f"{type(sampler).__name__}.set_epoch({told}) was called, but the interrupted pass was of "
                f"epoch {epoch}, and the next "
                f"one is of epoch {sampler.epoch}",
                "Count epochs with run.epochs(), or from the number that was saved.",
            )


def set_sampler_epochs(loader: Any, epochs: tuple[int, ...]) -> None:
    for sampler, epoch in zip(_epoch_samplers(loader), epochs, strict=False):
        if sampler.epoch != epoch:
            sampler.set_epoch(epoch)


def _epoch_samplers(loader: Any) -> list[Any]:
    """Also a dataset that gets it, where lastcall does not look into it (Hugging Face's): what others hold is
    put back anyway."""
    told = [*rng.samplers(loader), *([loader.dataset] if graph.opaque(loader.dataset) else [])]
    return [one for one in told if hasattr(one, "set_epoch") and isinstance(getattr(one, "epoch", None), int)]


def trusted(loader: Any) -> bool:
    """torch's own samplers draw from global generators on their first draw only."""
    return all(type(sampler).__module__.startswith("torch.utils.data") for sampler in rng.samplers(loader))
