"""The user's own save: the `if` in the training loop whose body calls save_state(), found in the source of a running frame."""

from __future__ import annotations

import ast
import linecache
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import CodeType, FrameType
from typing import Any

_METHOD = "save_state"
_Loop = ast.For | ast.While | ast.AsyncFor


@dataclass(frozen=True)
class Branch:
    """Where to enter: from a line of the test to the first line of the body. `keep` are parts of the test that are asked all the
    same: those that have nothing to do with the period, such as a rank's."""

    code: CodeType
    test: range
    body: range
    keep: tuple[CodeType, ...] = field(default=(), repr=False)

    @property
    def place(self) -> str:
        return f"{self.code.co_filename}:{self.test.start}"

    def allowed(self, frame: FrameType) -> bool:
        return all(eval(part, frame.f_globals, frame.f_locals) for part in self.keep)  # the script's own expressions


def find(frame: FrameType | None) -> tuple[list[Branch], str]:
    """The branches in the loops of the innermost frame that has one around the line it is at; or why there are none."""
    because = "no frame of the training loop calls save_state()"
    while frame is not None:
        found, reason = _in_frame(frame)
        if found:
            return found, ""
        because = reason or because
        frame = frame.f_back
    return [], because


def _in_frame(frame: FrameType) -> tuple[list[Branch], str]:
    code = frame.f_code
    lines = linecache.getlines(code.co_filename, frame.f_globals)
    if not any(_METHOD in line for line in lines):
        return [], ""
    try:
        tree = ast.parse("".join(lines))
    except SyntaxError:
        return [], f"{code.co_filename} cannot be read"
    scope = _scope(tree, code)
    if scope is None:
        return [], ""
    found: dict[int, Branch] = {}
    reason = ""
    for loop in reversed([loop for loop in _loops(scope) if _spans(loop, frame.f_lineno)]):
        for test in (node for node in _statements(loop) if isinstance(node, ast.If) and _saves(node)):
            branch, problem = _branch(test, code)
            if branch is not None:
                found.setdefault(branch.test.start, branch)
            reason = reason or problem
    return list(found.values()), reason


def _scope(tree: ast.Module, code: CodeType) -> ast.AST | None:
    """The function that the frame runs, or the module."""
    if code.co_name == "<module>":
        return tree
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
    for node in ast.walk(tree):
        if isinstance(node, kinds) and node.name == code.co_name:
            first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
            if first == code.co_firstlineno:
                return node
    return None


def _statements(node: ast.AST) -> Iterator[ast.AST]:
    """What is below a node in the same frame, in the order of the source."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Lambda):
            continue
        yield child
        yield from _statements(child)


def _loops(scope: ast.AST) -> list[_Loop]:
    return [node for node in _statements(scope) if isinstance(node, ast.For | ast.While | ast.AsyncFor)]


def _spans(node: _Loop, line: int) -> bool:
    return node.lineno <= line <= (node.end_lineno or node.lineno)


def _saves(test: ast.If) -> bool:
    """Whether it is about a period, and its body calls save_state()."""
    calls = [
        node
        for statement in test.body
        for node in (statement, *_statements(statement))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == _METHOD
    ]
    return bool(calls) and _periodic(test.test)


def _periodic(test: ast.expr) -> bool:
    return any(isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mod) for node in ast.walk(test))


def _branch(test: ast.If, code: CodeType) -> tuple[Branch | None, str]:
    first, last = test.body[0], test.body[-1]
    if first.lineno <= (test.test.end_lineno or test.lineno):
        return None, f"line {test.lineno} has its condition and its save on one line"
    parts: list[Any] = test.test.values if isinstance(test.test, ast.BoolOp) and isinstance(test.test.op, ast.And) else []
    keep = tuple(compile(ast.Expression(part), code.co_filename, "eval", dont_inherit=True) for part in parts if not _periodic(part))
    end = (test.test.end_lineno or test.lineno) + 1
    return Branch(code, range(test.lineno, end), range(first.lineno, (last.end_lineno or last.lineno) + 1), keep), ""
