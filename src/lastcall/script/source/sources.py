"""The source of running code. It is only trusted if it compiles to that very code: a file may have been
edited since."""

from __future__ import annotations

import ast
import functools
import linecache
import sys
from collections.abc import Iterator, Mapping
from types import CodeType
from typing import Any

Function = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda
Body = Function | ast.Module


class SourceFile:
    """A file: its tree, the parent of each node, and the code it compiles to."""

    def __init__(self, filename: str, text: str) -> None:
        self.filename = filename
        self.tree = ast.parse(text)
        self.parents = {child: node for node in ast.walk(self.tree) for child in ast.iter_child_nodes(node)}
        self._codes = list(_all(compile(text, filename, "exec", dont_inherit=True)))

    def body_of(self, code: CodeType) -> Body | None:
        """The function that was compiled to this code."""
        if not any(_same(code, other) for other in self._codes):
            return None
        if code.co_name == "<module>":
            return self.tree
        found = [node for node in ast.walk(self.tree) if isinstance(node, Function) and _starts(node, code)]
        return found[0] if len(found) == 1 else None  # two lambdas in a line are indistinguishable

    def owner(self, node: ast.AST) -> ast.ClassDef | None:
        """The class whose body defines this function."""
        parent = self.parents.get(node)
        return parent if isinstance(parent, ast.ClassDef) else None

    @functools.cached_property
    def stored(self) -> dict[str, list[ast.expr | None]]:
        """What is given, anywhere but in a constructor, to an attribute or an item of this name: `.step +=
        1`, `["step"] = 0`."""
        found: dict[str, list[ast.expr | None]] = {}
        for node in ast.walk(self.tree):
            if (
                isinstance(node, ast.Attribute | ast.Subscript)
                and isinstance(node.ctx, ast.Store)
                and not self._constructing(node)
            ):
                name = node.attr if isinstance(node, ast.Attribute) else ast.unparse(node.slice)
                found.setdefault(name, []).append(getattr(self.parents[node], "value", None))
        return found

    def _constructing(self, node: ast.AST) -> bool:
        at: ast.AST | None = node
        while at is not None and not isinstance(at, ast.FunctionDef):
            at = self.parents.get(at)
        return at is not None and at.name in ("__init__", "__post_init__", "__new__")


def of(code: CodeType, space: Mapping[str, Any]) -> SourceFile | None:
    lines = linecache.getlines(code.co_filename, dict(space) if "__loader__" in space else None)
    return _read(code.co_filename, "".join(lines)) if lines else None


def gather(function: Any) -> dict[str, str]:
    """Where a function is defined that is about to be sent elsewhere by value, and what stands in __main__
    with it: the source, by filename. The other machine may not have these files, and a notebook's cells are
    in no file at all."""
    codes = [
        getattr(value, "__code__", None) for value in [function, *vars(sys.modules["__main__"]).values()]
    ]
    names = {code.co_filename for code in codes if isinstance(code, CodeType)}
    names |= {str(path) for path in [getattr(sys.modules["__main__"], "__file__", None)] if path is not None}
    return {name: text for name in names if (text := "".join(linecache.getlines(name)))}


def provide(texts: Mapping[str, str]) -> None:
    """On the other machine, before the source is looked at. No modification time: a file of that name here is
    another one."""
    for filename, text in texts.items():
        linecache.cache[filename] = (len(text), None, text.splitlines(keepends=True), filename)


@functools.lru_cache(maxsize=64)
def _read(filename: str, text: str) -> SourceFile | None:
    try:
        return SourceFile(filename, text)
    except (SyntaxError, ValueError, RecursionError):
        return None


def _all(code: CodeType) -> Iterator[CodeType]:
    yield code
    for const in code.co_consts:
        if isinstance(const, CodeType):
            yield from _all(const)


def _same(one: CodeType, other: CodeType) -> bool:
    """Not one == other: a function that was pickled may have another filename."""
    return _essence(one) == _essence(other)


def _essence(code: CodeType) -> tuple[Any, ...]:
    # a set's order is by chance
    consts = [repr(const) for const in code.co_consts if not isinstance(const, CodeType | frozenset)]
    return code.co_name, code.co_firstlineno, code.co_code, code.co_names, code.co_varnames, consts


def _starts(node: Function, code: CodeType) -> bool:
    if isinstance(node, ast.Lambda):
        return code.co_name == "<lambda>" and node.lineno == code.co_firstlineno
    return (
        node.name == code.co_name
        and min([node.lineno, *(each.lineno for each in node.decorator_list)]) == code.co_firstlineno
    )
