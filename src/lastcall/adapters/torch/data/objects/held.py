"""What the objects below a loader hold of their own, and what of it changes: saved and put back by path, or
named in a doubt.

Everything small is looked at when a pass begins, at its first draws and at boundaries. What changes between
two looks (a counter of epochs, a list that is shuffled in place, weights, a generator in a transform) is
saved from then on, as it was when the pass began, when its first index was drawn, and at the boundary. A
resumed pass begins with the first, draws its order again with the second, and continues with the third. What
a script sets before the first pass it will set again: only what changes afterwards counts.

Generators, and lists of indices or files whose order a script may draw again each time it starts, are saved
whether they change or not.

Discarded: state_dict() of samplers and datasets in a plain DataLoader. It says where they stand in the middle
of a pass, and a pass that is drawn again begins at its start; some cannot even be asked without side effects.
Their attributes are what they stand on.
"""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from torch.utils.data import IterableDataset

from lastcall.adapters.torch.data.objects import generators as rng
from lastcall.adapters.torch.data.objects import graph, leaves, standing
from lastcall.core.checkpoint.doubts import Doubts

log = logging.getLogger("lastcall")
Snapshot = dict[graph.Path, leaves.Frozen | None]  # None: it cannot be saved
Pairs = tuple[tuple[graph.Path, leaves.Frozen], ...]

_EACH = 64  # looks that are taken however long they take
_SHARE = 200.0  # ... afterwards one part in so many of the time
_SMALL = 64  # entries of a container that is compared whole
_REMEDY = (
    "Keep it in a number, a list, a small tensor or a generator, or hand it to protect() with state_dict() "
    "and load_state_dict()."
)

_PROCESS = frozenset(
    map(id, (getattr(random, "_inst", None), np.random.mtrand._rand, torch.default_generator))
)


class Holding:
    """Of one loader. `tops`: its sampler, dataset and functions; `replayed`: those of them that a resumed
    pass makes again."""

    def __init__(self, *, asked: bool = False) -> None:
        self._asked = asked  # objects with a state_dict() are asked for it by somebody else
        # what has changed since the first pass began, in the order in which that was seen
        self.moving: dict[graph.Path, None] = {}
        self.random = False  # samples are made with random numbers
        self.tops: dict[str, Any] = {}
        self._others = _PROCESS  # generators that are saved anyway
        self._replayed: tuple[str, ...] = ()
        self._known: dict[graph.Path, tuple[Any, leaves.Frozen | None]] = {}
        self._holders: dict[graph.Path, Any] = {}
        self._kept: Snapshot = {}  # what is saved although it does not change
        self._first: dict[graph.Path, Any] = {}  # marks of what cannot be saved, as of the first pass
        self._outgrown: set[graph.Path] = set()  # what could be saved once
        # what changes and cannot be saved, and only matters where samples are random
        self._suspects: dict[graph.Path, None] = {}
        self._looks = 0
        self._next = 0.0

    def of(self, loader: Any) -> None:
        """This is the loader. Known by what is below it: a new loader over the same dataset is still the
        same."""
        self.below(graph.roots(loader), isinstance(loader.dataset, IterableDataset))
        self._others = _PROCESS | frozenset(map(id, rng.find_generators(loader)))

    def below(self, tops: dict[str, Any], iterable: bool) -> None:
        self.tops = tops
        self._replayed = ("sampler", "batch_sampler", *(("dataset", "collate_fn") if iterable else ()))

    # ---- looking -------------------------------------------------------------------------------------------

    def begin(self, doubts: Doubts) -> Snapshot:
        """A pass begins: all that can be saved, as it is now."""
        self.look(doubts)
        for path, (mark, frozen) in self._known.items():
            if (
                frozen is None
                and path[0] in self._replayed
                and (path in self._outgrown or self._first.setdefault(path, mark) != mark)
            ):
                self._doubt(path, doubts)
        return {path: frozen for path, (_, frozen) in self._known.items()}

    def since(self, begin: Snapshot | None, doubts: Doubts) -> Snapshot | None:
        """All that can be saved, as it is now; None where that is what it was at the beginning."""
        self.glance(doubts)
        now = {path: frozen for path, (_, frozen) in self._known.items()}
        return None if now == begin else now

    def glance(self, doubts: Doubts) -> None:
        """As look(), where it is affordable."""
        if self._looks < _EACH or time.perf_counter() >= self._next:
            self.look(doubts)

    def look(self, doubts: Doubts) -> None:
        began = time.perf_counter()
        found, holders = graph.walk(self.tops, self._others, self._asked)
        self._holders = holders
        known, first_look = self._known, not self._looks
        self._looks += 1
        for path, leaf in found.items():
            before = known.get(path)
            now = _seen(leaf.value, before)
            if now is before:
                continue
            known[path] = now
            if first_look:
                self._keep(path, leaf.value, now[1])
            elif before is None or before[1] != now[1] or (now[1] is None and before[0] != now[0]):
                self._moved(path, leaf, before, now, doubts)
        for path in [path for path in {**known, **self.moving} if path not in found and path[:-1] in holders]:
            gone = not graph.has_child(holders[path[:-1]], path[-1])
            if not gone:  # it is an object now, which is looked into, or stands elsewhere, too
                self.moving.pop(path, None)
            elif known.get(path, (None, None))[1] not in (None, leaves.MISSING):
                self.moving[path] = None
            known[path] = (None, leaves.MISSING if gone else None)
        if self.random:
            for path in self._suspects:
                self._doubt(path, doubts)
        now_is = time.perf_counter()
        self._next = now_is + _SHARE * (now_is - began)

    def _keep(self, path: graph.Path, value: Any, frozen: leaves.Frozen | None) -> None:
        if frozen is not None and (frozen[0] == "generator" or leaves.index_like(frozen)):
            self._kept[path] = frozen
        elif (order := leaves.order_of(value)) is not None:
            self._kept[path] = order

    def _moved(self, path: graph.Path, leaf: graph.Leaf, before: Any, now: Any, doubts: Doubts) -> None:
        if now[1] is not None:
            self.moving[path] = None
            return
        self.moving.pop(path, None)
        made_late = before is None or before[1] in (leaves.MISSING, ("v", None))
        if not made_late and before[1] is not None:
            self._outgrown.add(path)
        if made_late or path[0] in self._replayed or not _of_the_user(leaf.owner, path):
            # what is opened at its first use; what is made again with its pass; the insides of a library
            return
        if leaves.advances(leaf.value):
            self._doubt(path, doubts)
        else:
            self._suspects[path] = None

    def _doubt(self, path: graph.Path, doubts: Doubts) -> None:
        doubts.add(
            f"`{graph.name_of(path)}` changes while the data is read, and cannot be saved with its position",
            _REMEDY,
        )

    # ---- saving --------------------------------------------------------------------------------------------

    def now(self) -> Snapshot:
        """What has changed or may be other the next time, as it is now."""
        if not self.moving:
            return self._kept
        values: Snapshot = dict(self._kept)
        for path in self.moving:
            owner = self._holders.get(path[:-1])
            try:
                values[path] = (
                    leaves.MISSING if owner is None else leaves.freeze(graph.child(owner, path[-1]))
                )
            except (LookupError, AttributeError, ValueError):
                values[path] = leaves.MISSING
        return values

    def then(self, everything: Snapshot) -> Snapshot:
        """The same, as it was when a pass began: `everything` is what begin() gave."""
        return {**self._kept, **{path: everything.get(path, leaves.MISSING) for path in self.moving}}

    # ---- putting back --------------------------------------------------------------------------------------

    def resume(self, document: dict[str, Any]) -> None:
        """What another incarnation has saved(). Everything is as it was at the boundary."""
        for path in document["moving"]:
            self.moving[tuple(path)] = None
        self.put(document["now"])

    def put(self, pairs: Iterable[Any]) -> None:
        values = {tuple(path): frozen for path, frozen in pairs}
        if not values:
            return
        found, holders = graph.walk(self.tops, self._others, self._asked)
        self._holders = holders
        for path, frozen in values.items():
            leaf = found.get(path)
            if path in self.moving:
                _put(path, frozen, leaf, holders)
            elif leaf is not None:
                _put_kept(path, frozen, leaf)

    def stand(self, pairs: Iterable[Any]) -> standing.Undo:
        """What the samplers of the interrupted pass held all through it, and are not seen to change."""
        values = [(path, frozen) for path, frozen in pairs if tuple(path) not in self.moving]
        found = graph.walk(self.tops, self._others, self._asked)[0] if values else {}
        return standing.put(values, found)

    def take(self) -> Pairs:
        """What put() puts back to this moment."""
        return (
            _pairs({path: frozen for path, frozen in self.now().items() if path in self.moving})
            if self.moving
            else ()
        )


def _seen(value: Any, before: tuple[Any, leaves.Frozen | None] | None) -> tuple[Any, leaves.Frozen | None]:
    """A mark and the frozen value; `before` itself where nothing has changed."""
    large = (
        getattr(value, "nbytes", 0) > 4096
        if hasattr(value, "nbytes")
        else hasattr(value, "__len__") and len(value) > _SMALL
    )
    mark = leaves.mark(value, None) if large else None
    if large and before is not None and before[0] == mark:
        return before
    frozen = leaves.freeze(value)
    if frozen is None and mark is None:
        mark = leaves.mark(value, None)
    now = (mark, frozen)
    return before if before is not None and now == before else now


def _put(
    path: graph.Path, frozen: leaves.Frozen, leaf: graph.Leaf | None, holders: dict[graph.Path, Any]
) -> None:
    if frozen == leaves.MISSING:
        if leaf is not None:
            graph.drop_child(leaf.owner, leaf.token)
        return
    if leaf is None:
        owner = holders.get(path[:-1])
        if owner is not None:
            graph.set_child(owner, path[-1], leaves.put(frozen, None))
        return
    value = leaves.put(frozen, leaf.value)
    if value is not leaf.value:
        graph.set_child(leaf.owner, leaf.token, value)


def _put_kept(path: graph.Path, frozen: leaves.Frozen, leaf: graph.Leaf) -> None:
    """What does not change, but may have been drawn again: a generator, an order of files, the indices of a
    subset."""
    if frozen[0] == "generator":
        leaves.put(frozen, leaf.value)
        return
    if frozen[0] == "order":
        moved = leaves.put_order(frozen, leaf.value)
    else:
        now = leaves.freeze(leaf.value)
        indices = now is not None and now != frozen and leaves.index_like(now)
        moved = indices and now is not None and now[:2] == frozen[:2] and len(now[-1]) == len(frozen[-1])
        if moved:
            value = leaves.put(frozen, leaf.value)
            if value is not leaf.value:
                graph.set_child(leaf.owner, leaf.token, value)
    if moved:
        log.info(
            "`%s` differs from the interrupted run and was restored. Seed the generator that it is drawn "
            "from.",
            graph.name_of(path),
        )


def saved(
    moving: tuple[graph.Path, ...],
    begin: Snapshot | None,
    draw: Snapshot | None,
    now: Snapshot,
    stands: Snapshot | None = None,
) -> dict[str, Any] | None:
    """Only text, numbers and bytes. `begin` and `draw` only have what was other than it is now; `stands` is
    what the samplers of the pass held when it began."""
    if not now and not moving and not stands:
        return None
    document: dict[str, Any] = {"moving": moving, "now": _pairs(now)}
    if stands:
        # what moves, or is kept anyway, is in `now`
        document["stands"] = _pairs(
            {path: frozen for path, frozen in stands.items() if path not in now and path not in moving}
        )
    for name, then in (("begin", begin), ("draw", draw)):
        if then is not None:
            document[name] = _pairs(
                {path: then.get(path, leaves.MISSING) for path in moving if then.get(path) != now.get(path)}
            )
    return document


def _pairs(values: Snapshot) -> Pairs:
    return tuple((path, frozen) for path, frozen in values.items() if frozen is not None)


def _of_the_user(owner: Any, path: graph.Path) -> bool:
    kind = type(owner)
    return (
        kind in (list, dict, tuple)
        or path[-1].startswith("<")
        or graph.own(kind.__module__)
        or isinstance(owner, type)
    )
