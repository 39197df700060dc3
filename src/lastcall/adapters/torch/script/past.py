"""Values of a script's variables before statements that have run since: counted back, or computed from what was counted back."""

from __future__ import annotations

import ast
import copy
import logging
from collections.abc import Iterator, Mapping
from typing import Any

from lastcall.adapters.torch.script.scopes import Loop, Scope, assignments, below

log = logging.getLogger("lastcall")
_PLAIN = (ast.Name, ast.Attribute, ast.Constant, ast.BinOp, ast.UnaryOp, ast.operator, ast.unaryop, ast.expr_context)


class Past:
    def __init__(self) -> None:
        self._values: dict[Any, dict[str, Any]] = {}
        self._owned: dict[tuple[int, str], tuple[Any, str, Any]] = {}

    def of(self, scope: Scope) -> Mapping[str, Any]:
        return self._values.get(scope.code, {})

    def attributes(self) -> list[tuple[Any, str, Any]]:
        return list(self._owned.values())

    def knows(self, owner: Any, attribute: str) -> bool:
        return (id(owner), attribute) in self._owned

    def step(self, scope: Scope, loop: Loop | None, statements: list[ast.stmt], remembered: Mapping[str, Any]) -> None:
        """`loop` has gone on by a pass, and these statements have run."""
        known = self._values.setdefault(scope.code, {})
        for name, (caller, argument) in scope.bound.items():
            value = self._computed(argument, caller)
            if value is not None:
                known[name] = value
        if isinstance(loop, ast.For | ast.AsyncFor):
            self._count_back(loop, scope)
        for statement in statements:
            for target, _ in assignments(statement):
                self._undo(statement, target, scope, remembered)
            self._hidden(statement, scope, remembered)
            if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call):
                callee = scope.called(statement.value)
                if callee is not None and isinstance(callee.node, ast.FunctionDef):
                    self._values.pop(callee.code, None)
                    self.step(callee, None, [each for each in callee.node.body if not isinstance(each, ast.Expr)], {})

    def _count_back(self, loop: ast.For | ast.AsyncFor, scope: Scope) -> None:
        target = loop.target.elts[0] if isinstance(loop.target, ast.Tuple) else loop.target
        live = scope.value(target)
        if type(live) is int:
            self._set(target, _earlier(live, loop.iter, scope), scope)

    def _undo(self, statement: ast.stmt, target: ast.expr, scope: Scope, remembered: Mapping[str, Any]) -> None:
        text = ast.unparse(target)
        if text in self._values[scope.code] or not isinstance(target, ast.Name | ast.Attribute):
            return
        live, by = scope.value(target), _added(statement, text)
        if by is not None and isinstance(live, int | float):
            self._set(target, live - by, scope)
        elif isinstance(statement, ast.Assign) and (earlier := self._computed(statement.value, scope)) is not None:
            self._set(target, earlier, scope)
        elif text in remembered and live != remembered[text]:
            self._set(target, remembered[text], scope)

    def _hidden(self, statement: ast.stmt, scope: Scope, remembered: Mapping[str, Any]) -> None:
        """Under a condition: nobody knows whether it was done."""
        for node in below(statement):
            for target, _ in assignments(node):
                text = ast.unparse(target)
                if text in remembered and text not in self._values[scope.code] and scope.value(target) != remembered[text]:
                    self._set(target, remembered[text], scope)

    def _set(self, target: ast.expr, value: Any, scope: Scope) -> None:
        self._values[scope.code][ast.unparse(target)] = value
        if isinstance(target, ast.Attribute) and (owner := scope.value(target.value)) is not None:
            self._owned.setdefault((id(owner), target.attr), (owner, target.attr, value))

    def _computed(self, node: ast.expr, scope: Scope) -> Any:
        """The expression with earlier values, if they make a difference."""
        known = self._values.get(scope.code, {})
        if not all(isinstance(each, _PLAIN) for each in ast.walk(node)):
            return None
        if not any(isinstance(each, ast.expr) and ast.unparse(each) in known for each in ast.walk(node)):
            return None
        try:
            expression = ast.fix_missing_locations(ast.Expression(_Earlier(known).visit(copy.deepcopy(node))))
            return eval(compile(expression, scope.source.filename, "eval"), {**scope.space, **scope.own})
        except Exception:
            log.debug("%s cannot be computed", ast.unparse(node), exc_info=True)
            return None


class _Earlier(ast.NodeTransformer):
    def __init__(self, known: Mapping[str, Any]) -> None:
        self._known = known

    def visit(self, node: ast.AST) -> Any:
        if isinstance(node, ast.Name | ast.Attribute) and (text := ast.unparse(node)) in self._known:
            return ast.Constant(self._known[text])
        return self.generic_visit(node)


def _added(statement: ast.stmt, text: str) -> int | float | None:
    """`count += 1`, `count = count + 1`"""
    if isinstance(statement, ast.AugAssign):
        operator, amount = statement.op, statement.value
    elif isinstance(statement, ast.Assign) and isinstance(statement.value, ast.BinOp) and ast.unparse(statement.value.left) == text:
        operator, amount = statement.value.op, statement.value.right
    else:
        return None
    if not isinstance(amount, ast.Constant) or not isinstance(amount.value, int | float):
        return None
    return amount.value if isinstance(operator, ast.Add) else -amount.value if isinstance(operator, ast.Sub) else None


def _earlier(live: int, over: ast.expr, scope: Scope) -> int:
    """The number before this one in what a loop goes over. Before the first one: a step less."""
    listed = scope.value(over)
    if isinstance(listed, list | tuple) and live in listed[1:]:
        return int(listed[listed.index(live) - 1])
    calls = [node for node in _calls(over) if getattr(node.func, "id", "") == "range"]
    step: Any = scope.value(calls[0].args[2]) if calls and len(calls[0].args) == 3 else 1
    if calls and len(calls[0].args) == 3 and isinstance(calls[0].args[2], ast.UnaryOp):
        step = -1
    backwards = any(getattr(node.func, "id", "") == "reversed" for node in _calls(over))
    return live + (step if backwards else -step) if isinstance(step, int) else live - 1


def _calls(node: ast.expr) -> Iterator[ast.Call]:
    return (each for each in ast.walk(node) if isinstance(each, ast.Call))
