"""A save point: the way from a running frame of the script to a call that saves, and what must hold on that
way."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Protocol

from lastcall.script.find import payload
from lastcall.script.source.conditions import Need, to_reach
from lastcall.script.source.scopes import Loop, Scope, below, spans
from lastcall.script.source.sources import SourceFile

_DEPTH = 6  # calls from the loop to the save


class Saves(Protocol):
    """What counts as a save."""

    def is_save(self, call: ast.Call, target: object | None) -> bool:
        """`target`: what is called, None if that cannot be told from the source."""

    def payload(self, call: ast.Call) -> ast.expr | None:
        """The argument that holds what is saved. The conditions under which it is made belong to the save,
        too."""


@dataclass(frozen=True, eq=False)
class Way:
    """From a function to the save: a call in it, a call in what that calls, and so on."""

    scope: Scope
    call: ast.Call
    further: Way | None = None

    @property
    def last(self) -> Way:
        return self.further.last if self.further is not None else self


@dataclass(frozen=True, eq=False)
class Point:
    """`around`: the statements of which one holds the save and another one the line where the frame is;
    `run`: those that save."""

    way: Way
    around: list[ast.stmt]
    run: list[ast.stmt]
    current: ast.stmt | None
    needs: tuple[Need, ...]
    near: bool

    @property
    def scope(self) -> Scope:
        return self.way.scope

    @property
    def place(self) -> str:
        last = self.way.last
        return f"{last.scope.code.co_filename}:{last.call.lineno}"

    @property
    def lines(self) -> range:
        return range(self.run[0].lineno, (self.run[-1].end_lineno or self.run[-1].lineno) + 1)

    @property
    def ahead(self) -> bool:
        """Whether it is reached in this pass of the loop, not in the next one."""
        return self.current is None or self.run[0].lineno > self.current.lineno

    @property
    def metric(self) -> bool:
        """Whether a metric decides about it: to say that it was better than before would be a lie."""
        return any(need.metric for need in self.needs)


def ways(scope: Scope, node: ast.AST, saves: Saves, barren: set[object], depth: int = 0) -> Iterator[Way]:
    for call in (each for each in below(node) if isinstance(each, ast.Call)):
        if saves.is_save(call, scope.value(call.func)):
            yield Way(scope, call)
            continue
        for callee in scope.callees(call) if depth < _DEPTH else ():
            if callee.code in barren:
                continue
            barren.add(callee.code)  # a function that calls itself
            found = list(ways(callee, callee.node, saves, barren, depth + 1))
            if found:
                barren.discard(callee.code)
            yield from (Way(scope, call, way) for way in found)


def point(way: Way, saves: Saves, *, looped: bool, deep: bool) -> Point | None:
    """`looped`: a frame further out is in a loop; `deep`: one further in is. None for what is only reached
    when training is over."""
    scope = way.scope
    assert scope.line is not None
    meeting = _meeting(way.call, scope)
    if meeting is None:
        return None
    around, holder, current = meeting
    top = scope.source.parents[holder]
    loops = [node for node in _ancestors(holder, scope.source) if isinstance(node, Loop)]
    if not (loops or looped):
        return None
    near = not deep and not (current is not None and any(map(scope.repeats, (current, *below(current)))))
    ahead = current is None or current.lineno < holder.lineno
    needs = list(to_reach(way.call, top, scope, passed=scope.line if ahead else 0))
    further = way.further
    while further is not None:
        needs += to_reach(further.call, further.scope.node, further.scope)
        further = further.further
    fed = payload.of(way.last.call, way.last.scope, saves.payload(way.last.call), needs)
    needs += fed.needs
    run = _run(
        around, holder, current if ahead else None, [*(need.statement for need in needs), *fed.statements]
    )
    return Point(way, around, run, current, tuple(_once(needs)), near)


def _ancestors(node: ast.AST, source: SourceFile) -> Iterator[ast.AST]:
    while (parent := source.parents.get(node)) is not None and not isinstance(
        parent, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda
    ):
        yield parent
        node = parent


def _meeting(call: ast.AST, scope: Scope) -> tuple[list[ast.stmt], ast.stmt, ast.stmt | None] | None:
    """The innermost statements of which one holds the call and another one the line where the frame is."""
    assert scope.line is not None
    node: ast.AST = call
    while node is not scope.node:
        parent = scope.source.parents[node]
        for siblings in (
            value for _, value in ast.iter_fields(parent) if isinstance(value, list) and node in value
        ):
            if isinstance(node, ast.stmt) and not spans(node, scope.line):
                current = next((each for each in siblings if spans(each, scope.line)), None)
                if current is not None or spans(parent, scope.line):
                    return siblings, node, current
        node = parent
    return None


def _run(
    around: list[ast.stmt], holder: ast.stmt, current: ast.stmt | None, wanted: Iterable[ast.AST]
) -> list[ast.stmt]:
    """The statements from the first one that has to do with the save."""
    end = around.index(holder)
    begin = around.index(current) + 1 if current is not None and current in around else 0
    held = {
        id(node): index for index, statement in enumerate(around) for node in (statement, *below(statement))
    }
    first = min([end, *(held[id(node)] for node in wanted if begin <= held.get(id(node), -1) <= end)])
    return around[first : end + 1]


def _once(needs: Iterable[Need]) -> Iterator[Need]:
    """The first occurrence of each condition."""
    seen: set[int] = set()
    for need in needs:
        if id(need.test) not in seen:
            seen.add(id(need.test))
            yield need
