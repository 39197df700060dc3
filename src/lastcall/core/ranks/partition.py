"""Who writes what of a state that several ranks hold together. Each rank computes its own portion, alone;
they fit because all compute the same: tensors that the same ranks hold are laid end to end and cut into as
many parts as there are writers among them.
"""

from __future__ import annotations

import bisect
import dataclasses
import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

from lastcall import memory
from lastcall.formats import manifest
from lastcall.types import Group, Share, Source, TensorEntry

_FINE = 64  # cuts lie on pages where that makes parts unequal by less than one part in so many


class Slice:
    """A part of a source that is not plain memory."""

    __slots__ = ("_begin", "_source", "nbytes")

    def __init__(self, source: Source, begin: int, nbytes: int) -> None:
        self._source = source
        self._begin = begin
        self.nbytes = nbytes

    def read_into(self, address: int, offset: int, nbytes: int) -> None:
        self._source.read_into(address, self._begin + offset, nbytes)


def portion(groups: Sequence[Group], rank: int, writers: Collection[int]) -> tuple[Group, ...]:
    """What this rank has to write: its own tensors, and its part of those that it holds together with others.
    All ranks that hold the same tensors must have them in the same order. Parts that no writer holds are left
    out: ask `missing` before."""
    plans = {
        holders: _RowShares(holders, entries, rank, writers)
        for holders, entries in _by_holders(groups).items()
    }
    portions = []
    for group in groups:
        taken = {
            entry.name for entry in group.entries if entry.share is None or entry.shape == entry.share.whole
        }
        entries: list[TensorEntry] = []
        for entry in group.entries:
            if entry.share is None:
                entries.append(entry)
            elif (piece := plans[entry.share.holders].piece(entry, rank)) is not None:
                entries.append(_named(piece, taken))
        if entries:
            portions.append(dataclasses.replace(group, entries=tuple(entries)))
    return tuple(portions)


def missing(
    holdings: Mapping[int, Sequence[tuple[int, ...]]], writers: Collection[int]
) -> list[tuple[int, ...]]:
    """The groups of holders without a writer among them: their pieces cannot be saved."""
    known = {holders for named in holdings.values() for holders in named}
    return sorted(holders for holders in known if not set(holders) & set(writers))


def holdings(groups: Iterable[Group]) -> list[tuple[int, ...]]:
    """Which ranks hold the same pieces as this one, for `missing`. Empty pieces count for no rank."""
    return sorted(
        {share.holders for group in groups for entry, share in _shared(group) if entry.source.nbytes}
    )


def _shared(group: Group) -> Iterator[tuple[TensorEntry, Share]]:
    for entry in group.entries:
        if entry.share is not None:
            yield entry, entry.share


def _by_holders(groups: Iterable[Group]) -> dict[tuple[int, ...], list[TensorEntry]]:
    found: dict[tuple[int, ...], list[TensorEntry]] = {}
    for group in groups:
        for entry, share in _shared(group):
            found.setdefault(share.holders, []).append(entry)
    return found


class _RowShares:
    """Which rows of each entry this rank writes, of entries that the same ranks hold."""

    def __init__(
        self, holders: tuple[int, ...], entries: Sequence[TensorEntry], rank: int, writers: Collection[int]
    ) -> None:
        able = sorted(set(holders) & set(writers))
        self._starts: dict[int, int] = {}
        total = 0
        for entry in entries:
            self._starts[id(entry)] = total
            total += entry.source.nbytes
        place = bisect.bisect_left(able, rank)
        self._writes = rank in able
        self._first = place == 0  # takes what has no bytes and can therefore not be split
        self._low = total * place // max(len(able), 1)
        self._high = total * (place + 1) // max(len(able), 1)
        self._part = total // max(len(able), 1)

    def piece(self, entry: TensorEntry, rank: int) -> TensorEntry | None:
        share = entry.share
        assert share is not None
        if not self._writes:
            return None
        if not entry.source.nbytes:
            if not (self._first and 0 in share.whole):
                return None  # an empty shard: others hold the rows
            return dataclasses.replace(entry, share=dataclasses.replace(share, holders=(rank,)))
        begin, end = self._row(entry, self._low), self._row(entry, self._high)
        if begin >= end:
            return None
        return _rows(entry, share, begin, end, rank)

    def _row(self, entry: TensorEntry, cut: int) -> int:
        """The row of an entry at which a cut goes through it. It grows with the cut, and is 0 or all for one
        that passes it by."""
        rows = entry.shape[0] if entry.shape else 1
        start, nbytes = self._starts[id(entry)], entry.source.nbytes
        if cut <= start:
            return 0
        if cut >= start + nbytes:
            return rows
        unit = nbytes // rows
        # cut on pages, a part is written straight from memory as the whole would be
        block = math.lcm(unit, memory.ALIGNMENT)
        if block * _FINE > self._part:
            block = unit
        return min(rows, (2 * (cut - start) + block) // (2 * block) * (block // unit))


def _rows(entry: TensorEntry, share: Share, begin: int, end: int, rank: int) -> TensorEntry:
    """Rows [begin, end) of an entry."""
    if not entry.shape or (begin, end) == (0, entry.shape[0]):
        return dataclasses.replace(entry, share=dataclasses.replace(share, holders=(rank,)))
    unit = entry.source.nbytes // entry.shape[0]
    nbytes = (end - begin) * unit
    source: Source
    if isinstance(entry.source, memory.HostMemory):
        source = memory.HostMemory(entry.source.address + begin * unit, nbytes, entry.source.owner)
    else:
        source = Slice(entry.source, begin * unit, nbytes)
    offset = (share.offset[0] + begin, *share.offset[1:])
    return TensorEntry(
        entry.name, entry.dtype, (end - begin, *entry.shape[1:]), source, Share(share.whole, offset, (rank,))
    )


def _named(piece: TensorEntry, taken: set[str]) -> TensorEntry:
    """The piece under the key that it has in its file. A tensor of the rank's own may have the name of a part
    of another."""
    assert piece.share is not None
    if piece.shape == piece.share.whole:
        return piece
    plain = unique = manifest.key(piece.name, piece.share.offset)
    count = 1
    while unique in taken:
        count += 1
        unique = f"{plain}#{count}"
    taken.add(unique)
    return dataclasses.replace(piece, name=unique)
