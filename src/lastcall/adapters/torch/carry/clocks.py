"""Variables that hold times of this machine. Brought back they would be wrong: no training was between two
incarnations."""

from __future__ import annotations

import ast
import datetime
import functools

from lastcall.script.source.scopes import assignments

_CLOCKS = frozenset(
    {
        "time",
        "time_ns",
        "perf_counter",
        "perf_counter_ns",
        "monotonic",
        "monotonic_ns",
        "process_time",
        "default_timer",
    }
)
_DATES = frozenset({"now", "utcnow", "today"})
_ROUNDS = 5
_NANOSECONDS = 10**15  # the year 1970 in nanoseconds


def is_time(name: str, value: object, where: ast.AST) -> bool:
    """Whether a variable or attribute of this name, which has this value now, is given times in a part of the
    source."""
    number = value if type(value) is int else 0
    timely = type(value) is float or isinstance(value, datetime.date) or abs(number) > _NANOSECONDS
    return timely and name in _timed(where)


@functools.lru_cache(maxsize=256)
def _timed(where: ast.AST) -> frozenset[str]:
    pairs = [pair for node in ast.walk(where) for pair in _pairs(node)]
    found: frozenset[str] = frozenset()
    for _ in range(_ROUNDS):
        more = frozenset(name for name, value in pairs if _is_time(value, found))
        if more <= found:
            break
        found |= more
    return found


def _pairs(node: ast.AST) -> list[tuple[str, ast.expr]]:
    if isinstance(node, ast.Assign) and isinstance(node.value, ast.Tuple):
        targets = [
            target
            for target in node.targets
            if isinstance(target, ast.Tuple) and len(target.elts) == len(node.value.elts)
        ]
        return [
            (last_name(each), value)
            for target in targets
            for each, value in zip(target.elts, node.value.elts, strict=True)
        ]
    return [(last_name(target), value) for target, value in assignments(node) if value is not None]


def last_name(node: ast.expr) -> str:
    return node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")


def _is_time(node: ast.expr, known: frozenset[str]) -> bool:
    if isinstance(node, ast.Call):
        name = last_name(node.func)
        base = last_name(node.func.value) if isinstance(node.func, ast.Attribute) else ""
        return (name in _CLOCKS and base in ("", "time", "timeit")) or (
            name in _DATES and base in ("datetime", "date", "dt")
        )
    if isinstance(node, ast.Name | ast.Attribute):
        return last_name(node) in known
    if isinstance(node, ast.BinOp):
        return _is_time(node.left, known) or _is_time(node.right, known)
    return isinstance(node, ast.IfExp) and (_is_time(node.body, known) or _is_time(node.orelse, known))
