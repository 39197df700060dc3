"""Where what is saved comes from: a checkpoint that is None unless the period has come is created under a
condition that also belongs to the save."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass, field

from lastcall.script.source import condition_kinds
from lastcall.script.source.conditions import Need, to_reach
from lastcall.script.source.scopes import Scope, below


@dataclass
class Fed:
    needs: list[Need] = field(default_factory=list)
    statements: list[ast.AST] = field(default_factory=list)
    _seen: set[tuple[int, str]] = field(default_factory=set)

    def value(self, node: ast.expr, scope: Scope, to: ast.AST) -> None:
        """All that `node` is made of, as it is when `to` is reached."""
        for each in _shallow(node):
            if isinstance(each, ast.IfExp):
                self._choice(each, scope)
            elif isinstance(each, ast.BoolOp) and isinstance(each.op, ast.And):
                self.needs += [Need(scope, each, part, True) for part in each.values[:-1]]
            elif isinstance(each, ast.Call):
                self._made(each, scope)
            elif isinstance(each, ast.Name):
                self._named(each.id, scope, to)

    def _choice(self, node: ast.IfExp, scope: Scope) -> None:
        self.needs.append(Need(scope, node, node.test, not _is_none(node.body)))

    def _made(self, call: ast.Call, scope: Scope) -> None:
        callee = scope.called(call)
        if callee is None or not self._first(callee, ""):
            return
        for node in below(callee.node):
            if isinstance(node, ast.Return) and node.value is not None and not _is_none(node.value):
                self.needs += to_reach(node, callee.node, callee)
                self.value(node.value, callee, node)

    def _named(self, name: str, scope: Scope, to: ast.AST) -> None:
        if not self._first(scope, name):
            return
        if name in scope.bound and name not in scope.assigned:
            caller, argument = scope.bound[name]
            self.value(argument, caller, argument)
            return
        shared = set(map(id, _ancestors(to, scope)))
        for node, value in scope.assigned.get(name, []):
            if (
                not isinstance(node, ast.stmt | ast.expr)
                or node.lineno > getattr(to, "lineno", 0)
                or (value is not None and _is_none(value))
            ):
                continue
            top = next(each for each in _ancestors(node, scope) if id(each) in shared)
            self.statements.append(node)
            if isinstance(node, ast.Assign | ast.AnnAssign | ast.NamedExpr):
                self.needs += to_reach(node, top, scope, passed=scope.line or 0)
            if value is not None:
                self.value(value, scope, node)

    def _first(self, scope: Scope, name: str) -> bool:
        key = (id(scope.code), name)
        new = key not in self._seen
        self._seen.add(key)
        return new


def of(call: ast.Call, scope: Scope, payload: ast.expr | None, needs: list[Need]) -> Fed:
    """Of this call that saves."""
    fed = Fed()
    if payload is not None:
        fed.value(payload, scope, call)
    for need in needs:  # `if checkpoint is not None: report(...)`
        if need.forced is None and condition_kinds.of(need.test, need.scope) in (
            condition_kinds.ConditionKind.FIXED,
            condition_kinds.ConditionKind.UNKNOWN,
        ):
            fed.value(need.test, need.scope, need.statement)
    return fed


def _shallow(node: ast.AST) -> Iterator[ast.AST]:
    """The parts of a value that decide whether it is there. The first part of an attribute or a call is a
    tool, not a part."""
    yield node
    if isinstance(node, ast.IfExp):
        yield from _shallow(node.orelse if _is_none(node.body) else node.body)
        return
    children: list[ast.AST] = list(ast.iter_child_nodes(node))
    if isinstance(node, ast.Call):
        children = [*node.args, *(word.value for word in node.keywords)]
    for child in children:
        yield from _shallow(child)


def _ancestors(node: ast.AST, scope: Scope) -> Iterator[ast.AST]:
    while node is not scope.node:
        node = scope.source.parents[node]
        yield node


def _is_none(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value is None
