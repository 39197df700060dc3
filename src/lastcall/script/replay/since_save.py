"""Which statements a script has run since it last passed its save point, outside of the loop that its steps
are in."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass

from lastcall.script.find.points import Point
from lastcall.script.source.scopes import Loop, Scope, below, spans


@dataclass(frozen=True)
class Since:
    """`loop`: the one that has advanced by a pass since then; `called_again`: there is none, and the
    function was called again."""

    statements: list[ast.stmt]
    loop: Loop | None = None
    called_again: bool = False


def since(point: Point, scope: Scope) -> Since:
    around, holder, current = point.around, point.run[-1], point.current
    inside = list(_before_line([current], scope)) if current is not None else []
    if not point.ahead:
        assert current is not None
        return Since([*around[around.index(holder) + 1 : around.index(current)], *inside])
    before = around[: around.index(current)] if current is not None else []
    return _pass(holder, [*around[around.index(holder) + 1 :], *before, *inside], scope)


def around_call(scope: Scope) -> Since:
    """The same for a function that is at a call on the way to the save point."""
    current = next(each for each in _body(scope.node) if spans(each, scope.line or 0))
    innermost = [
        node for node in (current, *below(current)) if isinstance(node, Loop) and spans(node, scope.line or 0)
    ]
    if innermost:
        inner = next(each for each in innermost[-1].body if spans(each, scope.line or 0))
        return Since([each for each in innermost[-1].body if each is not inner], innermost[-1])
    return Since(list(_before_line(_body(scope.node), scope)), called_again=True)


def before_loops(scope: Scope) -> list[ast.stmt]:
    """What a running function has done up to the first loop that it is in."""
    return list(_before_line(_body(scope.node), scope))


def stored_in_loops(scope: Scope) -> Iterator[ast.Attribute]:
    """Attributes that change with every step."""
    for loop in below(scope.node):
        if isinstance(loop, Loop) and spans(loop, scope.line or 0):
            for node in below(loop):
                callee = scope.called(node) if isinstance(node, ast.Call) else None
                for each in [node, *(below(callee.node) if callee is not None else ())]:
                    if isinstance(each, ast.Attribute) and isinstance(each.ctx, ast.Store):
                        yield each


def _pass(holder: ast.stmt, statements: list[ast.stmt], scope: Scope) -> Since:
    """With what stands further out, up to the loop."""
    node: ast.AST = holder
    while node is not scope.node:
        parent = scope.source.parents[node]
        if node is not holder:
            lists = [
                value for _, value in ast.iter_fields(parent) if isinstance(value, list) and node in value
            ]
            statements = [*statements, *(each for siblings in lists for each in siblings if each is not node)]
        if isinstance(parent, Loop):
            return Since(statements, parent)
        node = parent
    return Since(statements, called_again=True)


def _before_line(body: list[ast.stmt], scope: Scope) -> Iterator[ast.stmt]:
    """Statements before the one that the frame is in, and within that one, unless it is a loop."""
    for statement in body:
        if spans(statement, scope.line or 0):
            if not isinstance(statement, Loop):
                for _, value in ast.iter_fields(statement):
                    if isinstance(value, list) and any(
                        isinstance(each, ast.stmt) and spans(each, scope.line or 0) for each in value
                    ):
                        yield from _before_line(value, scope)
            return
        yield statement


def _body(node: ast.AST) -> list[ast.stmt]:
    body = getattr(node, "body", [])
    return body if isinstance(body, list) else []
