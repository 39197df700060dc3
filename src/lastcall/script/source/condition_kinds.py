"""What a condition is about. A period (steps, epochs, time) may be treated as true; a rank or an option is
evaluated; a metric is not."""

from __future__ import annotations

import ast
import enum
import re
from collections.abc import Iterator
from typing import Any

from lastcall.script.source.scopes import Scope, below

_RANK = re.compile(r"(?<![a-z])(rank|main|master|chief|leader|coordinator|primary)(?![a-z])", re.I)
_CLOCKS = {
    "time",
    "monotonic",
    "perf_counter",
    "process_time",
    "now",
    "utcnow",
    "time_ns",
    "monotonic_ns",
    "perf_counter_ns",
}
_PLAIN = {"len", "int", "bool", "get", "isinstance"}
_COUNTING = {"range", "trange", "enumerate", "count"}


class ConditionKind(enum.Flag):
    FIXED = 0  # the same at every pass
    COUNT = enum.auto()  # steps or epochs
    TIME = enum.auto()
    RANK = enum.auto()
    METRIC = enum.auto()  # a loss, a best value
    UNKNOWN = enum.auto()


def is_period(test: ast.expr, scope: Scope) -> bool:
    kind = of(test, scope)
    if ConditionKind.RANK in kind:
        return False
    return _has_modulo(test) or (
        bool(kind & (ConditionKind.COUNT | ConditionKind.TIME)) and ConditionKind.METRIC not in kind
    )


def is_metric(test: ast.expr, scope: Scope) -> bool:
    return ConditionKind.METRIC in of(test, scope)


def of(node: ast.AST, scope: Scope, seen: frozenset[tuple[int, str]] = frozenset()) -> ConditionKind:
    """All that goes into a value."""
    if isinstance(node, ast.Compare) and all(isinstance(op, ast.Is | ast.IsNot) for op in node.ops):
        return ConditionKind.FIXED  # `is not None`: whether there is something, which the script knows best
    if isinstance(node, ast.Name | ast.Attribute | ast.Subscript) and _constant_path(node):
        return _place(node, scope, seen)
    if isinstance(node, ast.Call):
        return _call(node, scope, seen)
    kind = (
        ConditionKind.COUNT
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mod)
        else ConditionKind.FIXED
    )
    for child in ast.iter_child_nodes(node):
        kind |= of(child, scope, seen)
    ordered = isinstance(node, ast.Compare) and isinstance(node.ops[0], ast.Lt | ast.LtE | ast.Gt | ast.GtE)
    return ConditionKind.METRIC if ordered and kind == ConditionKind.UNKNOWN else kind


def _has_modulo(node: ast.AST) -> bool:
    return any(isinstance(each, ast.BinOp) and isinstance(each.op, ast.Mod) for each in ast.walk(node))


def _constant_path(node: ast.expr) -> bool:
    while isinstance(node, ast.Attribute | ast.Subscript):
        if isinstance(node, ast.Subscript) and not isinstance(node.slice, ast.Constant):
            return False
        node = node.value
    return isinstance(node, ast.Name)


def _call(node: ast.Call, scope: Scope, seen: frozenset[tuple[int, str]]) -> ConditionKind:
    name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
    if name in _CLOCKS:
        return ConditionKind.TIME
    if _RANK.search(name):
        return ConditionKind.RANK
    callee = scope.called(node)
    key = (0, f"{callee.code.co_filename}:{callee.code.co_firstlineno}") if callee is not None else (0, "")
    kind = ConditionKind.FIXED
    if callee is not None and key not in seen:
        for value in _answers(callee):
            kind |= of(value, callee, seen | {key})
        return kind or ConditionKind.UNKNOWN
    receiver = [node.func.value] if isinstance(node.func, ast.Attribute) else []
    for part in [*node.args, *(word.value for word in node.keywords), *receiver]:
        kind |= of(part, scope, seen)
    return kind or (ConditionKind.FIXED if name in _PLAIN else ConditionKind.UNKNOWN)


def _answers(scope: Scope) -> Iterator[ast.expr]:
    """What a function gives back; where that is plain yes or no, what decides about it."""
    values = [
        node.value for node in below(scope.node) if isinstance(node, ast.Return) and node.value is not None
    ]
    yield from [scope.node.body] if isinstance(scope.node, ast.Lambda) else values
    if any(isinstance(value, ast.Constant) and isinstance(value.value, bool) for value in values):
        yield from (node.test for node in below(scope.node) if isinstance(node, ast.If))


def _place(node: ast.expr, scope: Scope, seen: frozenset[tuple[int, str]]) -> ConditionKind:
    """A name, or an attribute or an item of one."""
    text = ast.unparse(node)
    key = (id(scope), text)
    if key in seen:
        return ConditionKind.FIXED
    seen |= {key}
    if _RANK.search(text.rpartition(".")[2]):
        return ConditionKind.RANK
    if isinstance(node, ast.Name) and node.id in scope.bound and node.id not in scope.assigned:
        caller, argument = scope.bound[node.id]
        return of(argument, caller, seen)
    given = _given(node, text, scope)
    if given is None:
        return ConditionKind.FIXED
    value = scope.value(node)
    if type(value) is int:
        return ConditionKind.COUNT
    kind = ConditionKind.FIXED
    for each in given:
        kind |= of(each, scope, seen) if each is not None else ConditionKind.UNKNOWN
    if ConditionKind.TIME in kind:
        return ConditionKind.TIME
    return ConditionKind.METRIC if _is_measure(value) else kind


def _given(node: ast.expr, text: str, scope: Scope) -> list[ast.expr | None] | None:
    """What it gets at a pass of the loop; None if it stays what it is."""
    if isinstance(node, ast.Name):
        all_of_it = scope.assigned.get(text, [])
        if text not in scope.varying and not (all_of_it and scope.line is None):
            return None
        return [_counted(statement, text) if value is None else value for statement, value in all_of_it]
    name = (
        node.attr
        if isinstance(node, ast.Attribute)
        else ast.unparse(node.slice)
        if isinstance(node, ast.Subscript)
        else ""
    )
    return scope.source.stored.get(name)


def _counted(statement: ast.AST, text: str) -> ast.expr | None:
    """What a `for` over numbers gives, as an expression that counts; None for what else is not plainly
    assigned."""
    if not isinstance(statement, ast.For | ast.AsyncFor):
        return None
    calls = [each.func for each in ast.walk(statement.iter) if isinstance(each, ast.Call)]
    names = {getattr(func, "attr", getattr(func, "id", "")) for func in calls}
    target = statement.target
    first = target.elts[0] if isinstance(target, ast.Tuple | ast.List) and target.elts else target
    if names & _COUNTING and ast.unparse(first) == text:
        return ast.BinOp(ast.Constant(0), ast.Mod(), ast.Constant(1))
    return None


def _is_measure(value: Any) -> bool:
    return isinstance(value, float) or type(value).__name__ in (
        "Tensor",
        "Parameter",
        "float32",
        "float64",
        "ndarray",
    )
