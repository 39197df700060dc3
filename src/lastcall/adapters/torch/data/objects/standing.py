"""What the samplers of a pass held from its beginning: weights, lengths, a temperature.

It does not change while the pass lasts, so `held` does not follow it. But a script that makes a new loader
for each epoch makes it of what training has changed since: a resumed script would draw the order of the
interrupted pass with other weights. So it is saved as it was when the pass began, and stands in until the
pass is over; then the sampler has again what the script gave it.

Only numbers, and what holds nothing else: a path or a name may belong to this process. They are replaced and
not written to, since the script may hold the same tensor.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from lastcall.adapters.torch.data.objects import graph, leaves

log = logging.getLogger("lastcall")
Undo = Callable[[], None]

_OF = ("sampler", "batch_sampler")
_SIZE = ("batch_sampler", ".batch_size")  # what does not match in that is not put back
_NUMBERS = ("f", "ints", "tensor", "array", "number")


@dataclass(frozen=True)
class _Stood:
    """One value that was replaced."""

    leaf: graph.Leaf
    stands: Any

    def undo(self) -> None:
        leaf = self.leaf
        if _child(leaf) is self.stands:  # otherwise the script, or the sampler, has set it since
            graph.set_child(leaf.owner, leaf.token, leaf.value)


def of(begin: dict[graph.Path, leaves.Frozen | None]) -> dict[graph.Path, leaves.Frozen]:
    """What is to be saved of all that was there when a pass began."""
    return {
        path: frozen
        for path, frozen in begin.items()
        if path[0] in _OF and path != _SIZE and frozen is not None and _its_own(path) and _numeric(frozen)
    }


def put(pairs: Iterable[tuple[graph.Path, leaves.Frozen]], found: dict[graph.Path, graph.Leaf]) -> Undo:
    """Where the script has made it otherwise. Returns what brings that back."""
    stood = []
    for path, frozen in pairs:
        leaf = found.get(tuple(path))
        if leaf is None or _told_by_the_script(leaf):
            continue
        now = leaves.freeze(leaf.value)
        if now is None or now == frozen:
            continue
        stands = leaves.thaw(frozen)
        if type(stands) is not type(leaf.value):
            continue
        graph.set_child(leaf.owner, leaf.token, stands)
        stood.append(_Stood(leaf, stands))
        log.info(
            "`%s` differs from what the interrupted pass began with, which is restored until that pass is "
            "over",
            graph.name_of(tuple(path)),
        )

    def undo() -> None:
        for one in stood:
            one.undo()

    return undo


def _its_own(path: graph.Path) -> bool:
    """Of the objects themselves, and not of a class, a closure or a module, which the script has, too."""
    return all(token[0] in ".[" and not token.startswith(".__class__(") for token in path[1:])


def _numeric(frozen: leaves.Frozen) -> bool:
    kind = frozen[0]
    if kind == "v":
        return type(frozen[1]) is int
    if kind == "items":
        return all(map(_numeric, frozen[2]))
    return kind in _NUMBERS or (kind == "dict" and all(_numeric(item) for _, item in frozen[1]))


def _told_by_the_script(leaf: graph.Leaf) -> bool:
    """set_epoch() is followed elsewhere."""
    return leaf.token == ".epoch" and hasattr(leaf.owner, "set_epoch")


def _child(leaf: graph.Leaf) -> Any:
    try:
        return graph.child(leaf.owner, leaf.token)
    except (LookupError, AttributeError, ValueError):
        return None
