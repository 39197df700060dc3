"""The tensors of a committed checkpoint under the names that a user would use, whatever its format and
however many ranks wrote it.

For reading a checkpoint without the run that made it: `lastcall export` and `lastcall.dcp.Reader`. What
protect() was given as `model` is the group `model` here, with the names of its state_dict: frozen weights lie
in a file of their own, and tied ones are stored once, but readers need not know that. Tensors that belong to
one rank alone (BatchNorm's buffers, random states) are rank 0's.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lastcall.core.checkpoint import record as records
from lastcall.core.checkpoint.record import Entry, Record
from lastcall.core.engine import writer
from lastcall.core.restore import restore
from lastcall.core.restore.contents import Contents
from lastcall.core.restore.regions import Box
from lastcall.formats import safetensors
from lastcall.types import Region, Target

DCP = "dcp"  # what lastcall.dcp calls its group, and the part of its document that is its own
_FROZEN = ".frozen"
Place = tuple[str, str]  # group and name as stored


@dataclass(frozen=True)
class SeveralTargets:
    """What wants bytes of the same tensor, as Contents.plan() takes it."""

    targets: tuple[Region | Target, ...]


class Inventory:
    """What a checkpoint holds. Its files are taken for hostile: CheckpointError says what is wrong. No tensor
    is read until load()."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.record: Record = records.read(path)
        self._contents = Contents(Entry(path, self.record), 0)
        document: Mapping[str, Any] = self._contents.document
        mine = document.get(DCP)
        # what lastcall.dcp.Writer has noted
        self.dcp: Mapping[str, Any] | None = mine if isinstance(mine, dict) else None
        if self.dcp is None:
            self.groups = _as_known(self._contents.stored, document)
        else:
            self.groups = {DCP: {name: (DCP, name) for name in self._contents.stored.get(DCP, {})}}

    def named(self) -> dict[str, Place]:
        """All tensors by their full names: `model.layer.weight`, or what the state dict handed to dcp.save()
        called them."""
        if self.dcp is not None:
            return dict(self.groups[DCP])
        return {
            f"{group}.{name}": place for group, names in self.groups.items() for name, place in names.items()
        }

    def tensor(self, place: Place) -> safetensors.Stored:
        """The element type and the shape of the whole."""
        return self._contents.stored[place[0]][place[1]]

    def boxes(self, place: Place) -> list[Box]:
        """The pieces that a tensor is stored in."""
        stored = self.tensor(place)
        shared = self._contents.shared.get(place[0], {}).get(place[1])
        # only what is put together begins at 0: in a file, a header comes first
        if shared is None or stored.begin:
            return [((0,) * len(stored.shape), stored.shape)] if stored.begin < stored.end else []
        return [(piece.offset, piece.shape) for piece in shared.pieces]

    def load(self, engine: writer.Engine, wanted: Iterable[tuple[Place, Region | Target]]) -> None:
        """Read tensors, or regions of them, into their targets. Only what is needed is read, and no byte
        reaches a target before its digest is checked: CheckpointError at the first that does not hold."""
        targets: dict[str, dict[str, list[Region | Target]]] = {}
        for (group, name), one in wanted:
            targets.setdefault(group, {}).setdefault(name, []).append(one)
        plan = self._contents.plan(
            {
                group: {name: SeveralTargets(tuple(found)) for name, found in names.items()}
                for group, names in targets.items()
            }
        )
        restore.read(Entry(self.path, self.record), engine, plan)


def _as_known(
    stored: Mapping[str, Mapping[str, safetensors.Stored]], document: Mapping[str, Any]
) -> dict[str, dict[str, Place]]:
    """Frozen tensors among the others, and tied ones under each of their names."""
    found: dict[str, dict[str, Place]] = {}
    for group, tensors in sorted(stored.items()):
        for name in tensors:
            found.setdefault(group.removesuffix(_FROZEN), {}).setdefault(name, (group, name))
    for group, name, place in _references(document):
        if place[1] in stored.get(place[0], {}):
            found.setdefault(group, {}).setdefault(name, place)
    return found


def _references(document: Mapping[str, Any]) -> Iterator[tuple[str, str, Place]]:
    """What the state_dict of each module names, and where it is stored. Anything else is skipped."""
    state = document.get("state")
    for group, node in state.items() if isinstance(state, dict) else ():
        pairs = node.get("tensors") if isinstance(node, dict) else None
        for pair in pairs if isinstance(pairs, list) else ():
            if (
                isinstance(pair, list)
                and len(pair) == 2
                and isinstance(pair[0], str)
                and isinstance(pair[1], dict)
            ):
                place = (pair[1].get("g"), pair[1].get("n"))
                if isinstance(place[0], str) and isinstance(place[1], str):
                    yield group, pair[0], (place[0], place[1])
