"""A position that was saved in a world of another size.

torch's DistributedSampler deals one global order out to the ranks, sample by sample. So all of them together
have used up the first so many samples of it, and in a world of any size the position is behind as many, if
whole batches of all ranks come to that number. A loader without it gives every rank the same samples: its
position does not depend on the world. Nothing is known of all others, which begin their epoch again. What is
repeated is always told; nothing is left out but what a sampler pads or drops at the end of its order.
"""

from __future__ import annotations

import logging
from typing import Any

from lastcall.adapters.torch.data import loader_facts, position

log = logging.getLogger("lastcall")
STATEFUL = "stateful-loader"  # the kind of a StatefulDataLoader's position


def taken_up(state: dict[str, Any], loader: Any, worlds: tuple[int, int] | None) -> dict[str, Any]:
    """As rescaled(), with what must be told written to the log."""
    state, told = rescaled(state, loader, *(worlds or (1, 1)))
    if told:
        log.warning("%s", told)
    return state


def rescaled(state: dict[str, Any], loader: Any, old: int, new: int) -> tuple[dict[str, Any], str]:
    """The position for a world of `new` ranks of a position that was saved by one of `old`, and what must be
    told about it ("" where it is exact). `loader`: the loader of this rank, or its tracker."""
    loader = getattr(loader, "loader", loader)
    if state.get("kind") == STATEFUL:
        return (state, "") if old == new else _stateful(state, old, new)
    if state.get("kind") != position.KIND or state.get("phase") != position.INSIDE:
        return state, ""  # between two passes there is nothing to recompute
    saved, now = state.get("sampler"), loader_facts.sampler_facts(loader)
    # the ranks may share the work otherwise all the same
    if old == new and (saved is None or now is None or saved[0] == now[0]):
        return state, ""
    if saved is None and now is None and not state["facts"][3] and loader_facts.trusted(loader):
        return state, ""
    if saved is None or now is None:
        what = (
            "an IterableDataset"
            if state["facts"][3]
            else "a sampler that is not torch's DistributedSampler, or was not"
        )
        return _again(state, old, new, f"nothing is known about the order of {what}")
    if saved[1:] != now[1:]:
        return _again(state, old, new, f"the sampler had {_named(saved)} and has {_named(now)} now")
    return _moved(state, loader, saved[0], now[0])


def _moved(
    state: dict[str, Any], loader: Any, replicas: int, replicas_now: int
) -> tuple[dict[str, Any], str]:
    length, batch, workers, iterable = state["facts"]
    length_now: Any
    batch_now: Any
    length_now, batch_now, _, _ = loader_facts.facts(loader)
    if None in (length, batch, length_now, batch_now):
        return _again(state, replicas, replicas_now, "the size of a batch is not known")
    done = state["delivered"] + state["failed"]
    used, together = done * batch * replicas, batch_now * replicas_now
    delivered, repeated = divmod(used, together)
    # all was delivered, the last and shorter batch included; only the end was not seen
    if done >= length or delivered >= length_now:
        delivered, repeated = length_now, 0
    moved = {
        **state,
        "delivered": delivered,
        "failed": 0,
        "facts": (length_now, batch_now, workers, iterable),
        "sampler": loader_facts.sampler_facts(loader),
        "pool": _fresh_workers(state["pool"]),
        "seen": (),  # the same batches are other ones now
    }
    if not repeated:
        return moved, ""
    return moved, (
        f"The data position of {replicas} ranks is resumed on {replicas_now}: they had used {used} samples "
        "of the epoch, which is no "
        f"multiple of {replicas_now} ranks x batch_size={batch_now}. The epoch continues at sample "
        f"{used - repeated}: the {repeated} "
        f"samples from there on are repeated."
    )


def _again(state: dict[str, Any], old: int, new: int, because: str) -> tuple[dict[str, Any], str]:
    """The same pass from its beginning."""
    done = state["delivered"] + state["failed"]
    begun = {**state, "delivered": 0, "failed": 0, "pool": _fresh_workers(state["pool"])}
    return begun, _told(old, new, because, f"the {done} batches that each rank was given")


def _stateful(state: dict[str, Any], old: int, new: int) -> tuple[dict[str, Any], str]:
    inner = state["inner"]
    if not inner or inner.get("_iterator_finished"):
        return state, ""
    count = inner.get("_num_yielded")
    batches = (
        f"the {count} batches that each rank was given"
        if isinstance(count, int)
        else "the batches that each rank was given"
    )
    because = "only torchdata can read the state of a StatefulDataLoader, and it is that of one rank"
    return {**state, "inner": None}, _told(old, new, because, batches)


def _told(old: int, new: int, because: str, what: str) -> str:
    return (
        f"The data position of {old} ranks cannot be resumed on {new}: {because}. The epoch begins again, "
        f"and {what} in it come "
        f"again. Resume on {old} ranks for an exact position, or use torch.utils.data.DistributedSampler."
    )


def _fresh_workers(pool: Any) -> Any:
    """Other batches go to other workers: the generators that they had belong to no rank."""
    return None if pool is None else (pool[0], pool[1], (None,) * len(pool[2]))


def _named(sampler: tuple[Any, ...]) -> str:
    _, length, seed, shuffle, drop_last = sampler
    return f"{length} samples, seed={seed}, shuffle={shuffle}, drop_last={drop_last}"
