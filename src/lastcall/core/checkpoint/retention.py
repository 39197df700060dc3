"""Rotation: which checkpoints may be deleted, and which is the best."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from lastcall.core.checkpoint.record import Entry
from lastcall.types import Kind

_ASKED_FOR = (Kind.PERIODIC, Kind.MANUAL, Kind.FINAL)


@dataclass(frozen=True)
class Keep:
    """What rotation has to keep."""

    limit: int | None = None
    monitor: str | None = None
    mode: str = "min"
    always: frozenset[str] = frozenset()  # names of checkpoints that something refers to
    # training has finished: the limit holds to the letter, the newest and those of `always` counted
    over: bool = False
    resumable: bool = True  # ... and the newest stays, also where it was saved for a restart only


def superfluous(entries: Sequence[Entry], keep: Keep) -> list[Entry]:
    """The entries (newest first) that may be deleted. Without a limit only superseded just-in-time
    checkpoints are: periodic ones are the user's. The last two complete ones stay whatever the limit says,
    and so does the best."""
    asked = [entry for entry in entries if entry.record.kind in _ASKED_FOR]
    if keep.over and asked:
        return _after_the_end(entries, asked, keep)
    kept = {entry.path for entry in [entry for entry in entries if entry.record.complete][:2]}
    kept |= {entry.path for entry in entries[:1]}
    kept |= {entry.path for entry in entries if entry.path.name in keep.always}
    if (top := best(entries, keep)) is not None:
        kept.add(top.path)
    if keep.limit is not None:
        # one that was saved for a restart replaces none of them
        kept |= {entry.path for entry in asked[: keep.limit]}
    else:
        kept |= {entry.path for entry in entries if entry.record.kind in (Kind.PERIODIC, Kind.MANUAL)}
    return [entry for entry in entries if entry.path not in kept]


def _after_the_end(entries: Sequence[Entry], asked: Sequence[Entry], keep: Keep) -> list[Entry]:
    left = [entry for entry in entries if entry in asked or (keep.resumable and entry is entries[0])]
    protected = {left[0].path.name, *keep.always}
    room = (
        len(left)
        if keep.limit is None
        else max(keep.limit, len(protected & {entry.path.name for entry in left}))
    )
    for entry in reversed(list(left)):
        if len(left) > room and entry.path.name not in protected:
            left.remove(entry)
    return [entry for entry in entries if entry not in left and entry.path.name not in keep.always]


def best(entries: Sequence[Entry], keep: Keep) -> Entry | None:
    """The entry with the best value of the monitored metric."""
    monitor = keep.monitor
    if monitor is None:
        return None
    scored = [entry for entry in entries if not math.isnan(entry.record.metrics.get(monitor, math.nan))]
    sign = 1.0 if keep.mode == "min" else -1.0
    return min(scored, key=lambda entry: sign * entry.record.metrics[monitor], default=None)
