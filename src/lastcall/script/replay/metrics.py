"""Metrics that do not exist yet, before the end of the first epoch, are left out of the report: nothing is
lost by that."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from lastcall.script.find.points import Point, Saves
from lastcall.script.source.scopes import assignments, below


def left_out(point: Point, statements: list[ast.stmt], saves: Saves) -> dict[int, ast.AST]:
    """What takes the place of the nodes that cannot be evaluated, by their ids."""
    own = point.scope.own
    nodes = [node for statement in statements for node in (statement, *below(statement))]
    made = {ast.unparse(target) for node in nodes for target, _ in assignments(node)}
    missing = {
        name for name in point.scope.assigned if name.isidentifier() and name not in own and name not in made
    }
    instead: dict[int, ast.AST] = {}
    payload = saves.payload(point.way.call) if point.way.further is None else None
    for argument in [*point.way.call.args, *(word.value for word in point.way.call.keywords)]:
        if argument is not payload:
            instead |= dict(_replaced(argument, missing))
    for node in nodes:
        if isinstance(node, ast.FormattedValue) and _names(node) & missing:  # a line of the log
            instead[id(node)] = ast.Constant("?")
    return instead


def _replaced(node: ast.expr, missing: set[str]) -> Iterator[tuple[int, ast.AST]]:
    if isinstance(node, ast.Dict):
        kept = [
            (key, value)
            for key, value in zip(node.keys, node.values, strict=True)
            if not _names(value) & missing
        ]
        yield id(node), ast.Dict([key for key, _ in kept], [value for _, value in kept])
    elif isinstance(node, ast.Call) and getattr(node.func, "id", "") == "dict":
        yield (
            id(node),
            ast.Call(
                node.func, node.args, [word for word in node.keywords if not _names(word.value) & missing]
            ),
        )
    elif _names(node) & missing and isinstance(node, ast.Name):
        yield id(node), ast.Dict([], [])


def _names(node: ast.AST) -> set[str]:
    return {each.id for each in ast.walk(node) if isinstance(each, ast.Name)}
