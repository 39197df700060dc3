"""What must hold for a statement to be reached, and the conditions rewritten so that it is."""

from __future__ import annotations

import ast
import copy
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from lastcall.script.source import condition_kinds
from lastcall.script.source.scopes import Scope, below, statement

_AWAY = (ast.Continue, ast.Break, ast.Return, ast.Raise)
Holder = ast.If | ast.IfExp | ast.BoolOp | ast.match_case


@dataclass(frozen=True, eq=False)
class Need:
    """`holder` must come out as `want`, in this scope."""

    scope: Scope
    holder: Holder
    test: ast.expr
    want: bool

    @property
    def statement(self) -> ast.stmt:
        return statement(self.holder, self.scope)

    @property
    def forced(self) -> ast.expr | None:
        """The test with its periods as they should be, and the rest as it is; None if there is no period in
        it."""
        return force(self.test, self.want, self.scope)

    @property
    def assumed(self) -> ast.expr | None:
        """The same, with the metrics, too."""
        return force(self.test, self.want, self.scope, metrics=True)

    @property
    def metric(self) -> bool:
        """Whether a metric has a say in it, where no period overrules it."""
        return any(
            condition_kinds.is_metric(part, self.scope) and not condition_kinds.is_period(part, self.scope)
            for part in _parts(self.forced or self.test)
        )


def to_reach(node: ast.AST, top: ast.AST, scope: Scope, passed: int = 0) -> Iterator[Need]:
    """From the outside in: the branches around a node below `top`, and those before it that would have led
    away. What ends before the line `passed` has been passed already."""
    parent = scope.source.parents[node]
    if parent is not top:
        yield from to_reach(parent, top, scope, passed)
    if isinstance(node, ast.stmt):
        for sibling in _before(node, parent):
            if (sibling.end_lineno or sibling.lineno) >= passed:
                yield from _staying(sibling, scope)
    yield from _around(node, parent, scope)


def _around(node: ast.AST, parent: ast.AST, scope: Scope) -> Iterator[Need]:
    if isinstance(parent, ast.If | ast.IfExp) and node is not parent.test:
        body = parent.body if isinstance(parent.body, list) else [parent.body]
        yield Need(scope, parent, parent.test, node in body)
    elif isinstance(parent, ast.BoolOp):
        for value in parent.values[: parent.values.index(node)]:  # type: ignore[arg-type]
            yield Need(scope, parent, value, isinstance(parent.op, ast.And))
    elif isinstance(parent, ast.match_case) and node in parent.body:
        match = scope.source.parents[parent]
        assert isinstance(match, ast.Match)
        yield Need(scope, parent, match.subject, True)


def _staying(sibling: ast.stmt, scope: Scope) -> Iterator[Need]:
    if isinstance(sibling, ast.If):
        if _leads_away(sibling.body):
            yield Need(scope, sibling, sibling.test, False)
            for inner in sibling.orelse:
                yield from _staying(inner, scope)
        elif _leads_away(sibling.orelse):
            yield Need(scope, sibling, sibling.test, True)


def _leads_away(body: list[ast.stmt]) -> bool:
    return bool(body) and isinstance(body[-1], _AWAY)


def _before(node: ast.stmt, parent: ast.AST) -> list[ast.stmt]:
    for _, value in ast.iter_fields(parent):
        if isinstance(value, list) and node in value:
            return value[: value.index(node)]
    return []


def force(test: ast.expr, want: bool, scope: Scope, *, metrics: bool = False) -> ast.expr | None:
    if isinstance(test, ast.BoolOp):
        parts = [force(part, want, scope, metrics=metrics) for part in test.values]
        if all(part is None for part in parts):
            return None
        return ast.BoolOp(test.op, [new or old for new, old in zip(parts, test.values, strict=True)])
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        inner = force(test.operand, not want, scope, metrics=metrics)
        return ast.UnaryOp(test.op, inner) if inner is not None else None
    if isinstance(test, ast.NamedExpr):
        value = force(test.value, want, scope, metrics=metrics)
        return ast.NamedExpr(test.target, value) if value is not None else None
    due = condition_kinds.is_period(test, scope) or (metrics and condition_kinds.is_metric(test, scope))
    return ast.Constant(want) if due else None


def _parts(test: ast.expr) -> Iterator[ast.expr]:
    if isinstance(test, ast.BoolOp):
        for part in test.values:
            yield from _parts(part)
    elif isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        yield from _parts(test.operand)
    else:
        yield test


def assumed_copy(root: ast.stmt, needs: Iterable[Need], instead: Mapping[int, ast.AST]) -> ast.stmt:
    """The statement with its conditions as they are needed. `instead`: other nodes, by the id of those whose
    place they take."""
    inside = {id(node) for node in (root, *below(root))}
    memo: dict[int, object] = dict(instead)
    for need in needs:
        assumed = need.assumed
        if assumed is None or id(need.test) not in inside:
            continue
        if isinstance(need.holder, ast.match_case):
            memo[id(need.statement)] = ast.If(ast.Constant(True), need.holder.body, [])
        else:
            memo[id(need.test)] = assumed
    # the second one: what was put in belongs to the script's own tree, too
    return copy.deepcopy(copy.deepcopy(root, memo))
