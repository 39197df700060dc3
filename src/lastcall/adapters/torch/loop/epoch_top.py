"""What an epoch of run.epochs() sets at its top and an inner loop with tick() carries on: an epoch that was
interrupted comes again from its top, and nothing tells where the inner loop begins, to put it back there.

    for epoch in run.epochs(8):
        n = 0
        while n < 15:
            ...
            n += 1
            run.tick()
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterable
from types import FrameType
from typing import TypeGuard

from lastcall.adapters.torch.carry import clocks, flow, frames, places
from lastcall.core.checkpoint.doubts import Doubts
from lastcall.script.source.scopes import Loop, below

_EPOCHS = frozenset({"epochs"})
_Inner = tuple[FrameType, places.Place, Loop, frozenset[str]]


def check(
    chain: Iterable[FrameType], loses: Callable[[places.Place, str, object], bool], doubts: Doubts
) -> None:
    """`chain`: the script's frames, from the one that ticks on. `loses`: whether the value of a name would be
    missed."""
    for frame, place, loop, before in _inside(chain):
        own = frames.variables(frame)
        names = flow.assigned(loop) & places.exposed(place, loop) & before
        lost = [name for name in sorted(names) if name in own and loses(place, name, own[name])]
        lost += sorted(_counted(place, loop) & before)
        if lost:
            doubts.add(
                f"`{_head(loop)}` ({frames.place(place.code, loop.lineno)}) carries "
                f"{', '.join(f'`{name}`' for name in lost)} and starts from the beginning in an epoch that "
                "is resumed",
                f"Write `{_remedy(loop)}`, without run.tick().",
            )
            return


def _inside(chain: Iterable[FrameType]) -> list[_Inner]:
    """The loops that are running inside run.epochs(), each with what an epoch sets before it comes to it.
    None where the source does not show run.epochs()."""
    found: list[_Inner] = []
    for frame in chain:
        place = places.of(frame)
        if place.node is None:
            return []
        loops = list(place.loops)
        epochs = next((each for each in loops if places.head_reads(each, _EPOCHS)), None)
        if epochs is not None:
            inner = loops[loops.index(epochs) + 1 :]
            return [*found, *((frame, place, loop, _set_before(epochs, loop)) for loop in inner)]
        code = place.code
        given = frozenset(code.co_varnames[: code.co_argcount + code.co_kwonlyargcount])
        found += [(frame, place, loop, given | _set_before(place.node, loop)) for loop in loops]
    return []


def _set_before(top: ast.AST, loop: Loop) -> frozenset[str]:
    """Names, and attributes as text."""
    before = [
        each
        for each in below(top)
        if isinstance(each, ast.stmt) and (each.end_lineno or each.lineno) < loop.lineno
    ]
    names = frozenset(name for each in before for name in flow.assigned(each))
    return names | {ast.unparse(each) for one in before for each in below(one) if _is_stored(each)}


def _counted(place: places.Place, loop: Loop) -> frozenset[str]:
    """The attributes that the passes of a loop add to, or that its head asks for, as text."""
    assert place.node is not None
    asked = {ast.unparse(each) for each in below(loop.test)} if isinstance(loop, ast.While) else set()
    added = [each.target for each in below(loop) if isinstance(each, ast.AugAssign)]
    stored = [each for each in below(loop) if _is_stored(each)]
    return frozenset(
        ast.unparse(each)
        for each in stored
        if (each in added or ast.unparse(each) in asked)
        and not clocks.is_time(clocks.last_name(each), 1.0, place.node)
    )


def _is_stored(node: ast.AST) -> TypeGuard[ast.Attribute]:
    return isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)


def _head(loop: Loop) -> str:
    if isinstance(loop, ast.While):
        return f"while {ast.unparse(loop.test):.60}"
    return f"for {ast.unparse(loop.target)} in {ast.unparse(loop.iter):.60}"


def _remedy(loop: Loop) -> str:
    if isinstance(loop, ast.While):
        return "for i in run.batches(range(n)):"
    return f"for {ast.unparse(loop.target)} in run.batches({ast.unparse(loop.iter):.60}):"
