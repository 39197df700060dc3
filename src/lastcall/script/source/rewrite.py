"""Compiles statements of a function to run outside of it, in a copy of its variables."""

from __future__ import annotations

import ast
import copy
from collections.abc import Iterable, Mapping, Set
from types import CodeType, FrameType, MappingProxyType
from typing import Any

from lastcall.script.source.conditions import Need, assumed_copy
from lastcall.script.source.scopes import Scope

_LEFT = "__lastcall_left__"


class ReturnedEarly(BaseException):
    """A `return` of the script's, which has no function to leave here."""


def expression(node: ast.expr, scope: Scope) -> CodeType:
    mangled = _Outside(scope).visit(copy.deepcopy(node))
    return compile(
        ast.fix_missing_locations(ast.Expression(mangled)), scope.source.filename, "eval", dont_inherit=True
    )


def program(
    statements: Iterable[ast.stmt],
    needs: Iterable[Need],
    scope: Scope,
    instead: Mapping[int, ast.AST] = MappingProxyType({}),
) -> CodeType:
    """With the conditions as they are needed. A loop of one pass around it: a `continue` or a `break` of the
    script's ends it."""
    needs = list(needs)
    measured = {
        ast.unparse(node)
        for need in needs
        if need.metric
        for node in ast.walk(need.test)
        if isinstance(node, ast.expr)
    }
    outside = _Outside(scope, measured)
    body = [outside.visit(assumed_copy(each, needs, instead)) for each in statements]
    once = ast.For(
        ast.Name("__lastcall_once__", ast.Store()), ast.Tuple([ast.Constant(0)], ast.Load()), body, []
    )
    module = ast.fix_missing_locations(ast.Module([ast.copy_location(once, body[0])], []))
    return compile(module, scope.source.filename, "exec", dont_inherit=True)


def run(code: CodeType, frame: FrameType, instead: dict[str, Any] | None = None) -> dict[str, Any]:
    """One namespace for globals and locals: a comprehension or a lambda looks for its names in the globals.
    Returns the variables."""
    space = {**frame.f_globals, **frame.f_locals, **(instead or {}), _LEFT: ReturnedEarly}
    try:
        exec(code, space)
    except ReturnedEarly:
        pass
    return space


class _Outside(ast.NodeTransformer):
    """What means something else outside of its class or function."""

    def __init__(self, scope: Scope, measured: Set[str] = frozenset()) -> None:
        self._measured = measured  # the recorded best value stays unchanged
        owner = scope.source.owner(scope.node)
        self._prefix = f"_{owner.name.lstrip('_')}" if owner is not None else ""
        self._first = _first_parameter(scope.node)

    def visit_Return(self, node: ast.Return) -> ast.stmt:
        value = ast.Expr(self.visit(node.value)) if node.value is not None else None
        left = ast.copy_location(ast.Raise(ast.Name(_LEFT, ast.Load()), None), node)
        if value is None:
            return left
        return ast.copy_location(ast.If(ast.Constant(True), [ast.copy_location(value, node), left], []), node)

    def visit_Assign(self, node: ast.Assign) -> ast.AST:
        if all(ast.unparse(target) in self._measured for target in node.targets):
            return ast.copy_location(ast.Pass(), node)
        return self.generic_visit(node)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.FunctionDef:
        return node

    def visit_Lambda(self, node: ast.Lambda) -> ast.Lambda:
        return node

    def visit_Call(self, node: ast.Call) -> ast.AST:
        if isinstance(node.func, ast.Name) and node.func.id == "super" and not node.args and self._first:
            node.args = [ast.Name("__class__", ast.Load()), ast.Name(self._first, ast.Load())]
        return self.generic_visit(node)

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        if self._prefix and node.attr.startswith("__") and not node.attr.endswith("__"):
            node.attr = self._prefix + node.attr
        return self.generic_visit(node)


def _first_parameter(node: ast.AST) -> str:
    arguments = getattr(node, "args", None)
    if not isinstance(arguments, ast.arguments):
        return ""
    names = [*arguments.posonlyargs, *arguments.args]
    return names[0].arg if names else ""
