"""Values of a script's variables before statements that have run since: counted back, or computed from what
was counted back."""

from __future__ import annotations

import ast
import copy
import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from lastcall.script.source.scopes import Loop, Scope, assignments, below

log = logging.getLogger("lastcall")
_PLAIN = (
    ast.Name,
    ast.Attribute,
    ast.Subscript,
    ast.Constant,
    ast.BinOp,
    ast.UnaryOp,
    ast.operator,
    ast.unaryop,
    ast.expr_context,
)


@dataclass(frozen=True)
class Slot:
    """An attribute of an object or an item of a dict, and the value that it is to have."""

    owner: Any
    key: Any
    value: Any

    def fill(self) -> Slot:
        """Returns what was there before."""
        if isinstance(self.owner, dict):
            before = Slot(self.owner, self.key, self.owner[self.key])
            self.owner[self.key] = self.value
        else:
            before = Slot(self.owner, self.key, getattr(self.owner, self.key))
            setattr(self.owner, self.key, self.value)
        return before


class Past:
    def __init__(self) -> None:
        self._values: dict[Any, dict[str, Any]] = {}
        self._owned: dict[tuple[int, Any], Slot] = {}

    def of(self, scope: Scope) -> Mapping[str, Any]:
        return self._values.get(scope.code, {})

    def slots(self) -> list[Slot]:
        return list(self._owned.values())

    def knows(self, owner: Any, key: Any) -> bool:
        return (id(owner), key) in self._owned

    def step(
        self, scope: Scope, loop: Loop | None, statements: list[ast.stmt], remembered: Mapping[str, Any]
    ) -> None:
        """`loop` has advanced by a pass, and these statements have run."""
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
                    self.step(
                        callee,
                        None,
                        [each for each in callee.node.body if not isinstance(each, ast.Expr)],
                        {},
                    )

    def _count_back(self, loop: ast.For | ast.AsyncFor, scope: Scope) -> None:
        for target, over in _counted(loop.target, loop.iter):
            live = scope.value(target)
            if type(live) is int:
                self._set(target, _earlier(live, over, scope), scope)

    def _undo(
        self, statement: ast.stmt, target: ast.expr, scope: Scope, remembered: Mapping[str, Any]
    ) -> None:
        text = ast.unparse(target)
        if text in self._values[scope.code] or not isinstance(
            target, ast.Name | ast.Attribute | ast.Subscript
        ):
            return
        live, by = scope.value(target), _added(statement, text)
        if by is not None and isinstance(live, int | float):
            self._set(target, live - by, scope)
        elif (
            isinstance(statement, ast.Assign)
            and (earlier := self._computed(statement.value, scope)) is not None
        ):
            self._set(target, earlier, scope)
        elif text in remembered and live != remembered[text]:
            self._set(target, remembered[text], scope)

    def _hidden(self, statement: ast.stmt, scope: Scope, remembered: Mapping[str, Any]) -> None:
        """Under a condition: it is unknown whether it ran."""
        for node in below(statement):
            for target, _ in assignments(node):
                text = ast.unparse(target)
                if (
                    text in remembered
                    and text not in self._values[scope.code]
                    and scope.value(target) != remembered[text]
                ):
                    self._set(target, remembered[text], scope)

    def _set(self, target: ast.expr, value: Any, scope: Scope) -> None:
        self._values[scope.code][ast.unparse(target)] = value
        if (
            isinstance(target, ast.Attribute | ast.Subscript)
            and (owner := scope.value(target.value)) is not None
        ):
            key = target.attr if isinstance(target, ast.Attribute) else ast.literal_eval(target.slice)
            self._owned.setdefault((id(owner), key), Slot(owner, key, value))

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
        if (
            isinstance(node, ast.Name | ast.Attribute | ast.Subscript)
            and (text := ast.unparse(node)) in self._known
        ):
            return ast.Constant(self._known[text])
        return self.generic_visit(node)


def _added(statement: ast.stmt, text: str) -> int | float | None:
    """`count += 1`, `count = count + 1`"""
    if isinstance(statement, ast.AugAssign):
        operator, amount = statement.op, statement.value
    elif (
        isinstance(statement, ast.Assign)
        and isinstance(statement.value, ast.BinOp)
        and ast.unparse(statement.value.left) == text
    ):
        operator, amount = statement.value.op, statement.value.right
    else:
        return None
    if not isinstance(amount, ast.Constant) or not isinstance(amount.value, int | float):
        return None
    return (
        amount.value
        if isinstance(operator, ast.Add)
        else -amount.value
        if isinstance(operator, ast.Sub)
        else None
    )


def _counted(target: ast.expr, over: ast.expr) -> Iterator[tuple[ast.expr, ast.expr]]:
    """What counts along with a loop, and what it goes over: `for number, epoch in enumerate(range(...))`"""
    if not isinstance(target, ast.Tuple | ast.List):
        yield target, over
    elif isinstance(over, ast.Call) and getattr(over.func, "id", "") == "zip":
        yield from zip(target.elts, over.args, strict=False)
    elif target.elts:
        yield target.elts[0], ast.Constant(None)
        if isinstance(over, ast.Call) and getattr(over.func, "id", "") == "enumerate" and over.args:
            yield from ((each, over.args[0]) for each in target.elts[1:])


def _earlier(live: int, over: ast.expr, scope: Scope) -> int:
    """The number before this one in what a loop goes over. Before the first one: a step less."""
    listed = scope.value(over)
    if isinstance(listed, list | tuple) and live in listed[1:]:
        return int(listed[listed.index(live) - 1])
    calls = {getattr(node.func, "id", ""): node for node in ast.walk(over) if isinstance(node, ast.Call)}
    given = calls["range"].args[2:] if "range" in calls else []
    step = scope.value(given[0]) if given else 1
    if given and isinstance(given[0], ast.UnaryOp) and isinstance(given[0].op, ast.USub):
        step = -(scope.value(given[0].operand) or 1)
    step = step if type(step) is int else 1
    return live + step if "reversed" in calls else live - step
