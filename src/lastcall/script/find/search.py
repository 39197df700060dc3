"""Finds the script's own save in the frames that led to an optimizer step. Works before the first save was
ever reached."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from dataclasses import dataclass
from types import CodeType, FrameType

from lastcall.script.find import points
from lastcall.script.find.observed import Learned
from lastcall.script.find.points import Point, Saves
from lastcall.script.source import scopes
from lastcall.script.source.scopes import Scope, below, spans


@dataclass(frozen=True)
class FoundSaves:
    """`because`: why there are no points. `chain`: the script's frames, from the optimizer's step outward."""

    points: list[Point]
    chain: list[Scope]
    because: str = ""

    @property
    def looped(self) -> bool:
        """Whether the optimizer has stepped in a loop of the script."""
        return any(map(_in_loop, self.chain))


@dataclass(frozen=True)
class Stop:
    """Where a function of the script is when the optimizer steps; `deep`: in a loop of another one, which it
    calls."""

    line: int
    deep: bool


def stops(chain: list[Scope]) -> dict[CodeType, Stop]:
    return {
        scope.code: Stop(scope.line or 0, any(map(_in_loop, chain[:index])))
        for index, scope in enumerate(chain)
    }


def look(
    frame: FrameType | None, saves: Saves, learned: Learned, at: Mapping[CodeType, Stop] | None = None
) -> FoundSaves:
    """From the caller of optimizer.step() outward, up to the first frame that has a save. `at`: from
    elsewhere, as though it were from there."""
    chain = _chain(frame)
    if at is not None:
        chain = [scope for scope in chain if scope.code in at]
        for scope in chain:
            scope.line = at[scope.code].line
    because = (
        "no frame of the training loop calls a function that saves"
        if chain
        else "the source of the training loop is not available"
    )
    deep = at is not None and bool(chain) and at[chain[0].code].deep
    for index, scope in enumerate(chain):
        looped = any(_in_loop(outer) for outer in chain[index + 1 :])
        ways = list(points.ways(scope, scope.node, saves, set())) or list(learned.ways(scope))
        found = [
            point for way in ways if (point := points.point(way, saves, looped=looped, deep=deep)) is not None
        ]
        if found:
            return FoundSaves([point for point in found if not point.metric] or found, chain)
        because = "it saves only when training is over" if ways else because
        deep = deep or _in_loop(scope)
    return FoundSaves([], chain, because)


def _chain(frame: FrameType | None) -> list[Scope]:
    """The script's frames, each bound to the call that made it."""
    found: list[Scope] = []
    while frame is not None:
        scope = None if scopes.is_library(frame.f_globals) else scopes.of_frame(frame)
        if scope is not None:
            if found:
                _bind(found[-1], scope)
            found.append(scope)
        frame = frame.f_back
    return found


def _bind(inner: Scope, outer: Scope) -> None:
    """The arguments of a running function. Its first parameter already has its value."""
    for node in below(outer.node):
        if isinstance(node, ast.Call) and spans(scopes.statement(node, outer), outer.line or 0):
            callee = outer.called(node)
            if callee is not None and callee.code == inner.code:
                inner.bound = callee.bound
                outer.calling = node
                return


def _in_loop(scope: Scope) -> bool:
    return any(map(scope.repeats, below(scope.node)))
