"""Which names of a function are still needed where it stands: read later before they are surely written. From
its source alone.

Everything here errs on one side: a name that may be needed is needed. Saving it costs bytes; leaving it out
costs the trajectory.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator

from lastcall.script.source.scopes import Loop, below
from lastcall.script.source.sources import Body

Names = frozenset[str]
_NONE: Names = frozenset()
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
_COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
_ROUNDS = 50


class Flow:
    """`head`: for each loop, the names needed where it asks for its next item. `after`: for each statement,
    those needed behind it."""

    def __init__(self, body: Body) -> None:
        self.head: dict[ast.AST, Names] = {}
        self.after: dict[ast.AST, Names] = {}
        self._exposed: dict[ast.AST, Names] = {}
        self.shared = _shared(body)  # read by functions defined in it, which may be called at any time
        self.rebound = _rebound(body)  # ... and assigned by them
        if not isinstance(body, ast.Lambda):
            self._all(body.body, _NONE, _NONE, _NONE)

    def _all(self, statements: list[ast.stmt], out: Names, leave: Names, again: Names) -> Names:
        """The names needed before the statements, where `out` are needed behind them, `leave` behind the
        loop, `again` at its head."""
        for statement in reversed(statements):
            self.after[statement] = self.after.get(statement, _NONE) | out
            out = self._one(statement, out, leave, again)
        return out

    def _one(self, node: ast.stmt, out: Names, leave: Names, again: Names) -> Names:
        match node:
            case ast.Break():
                return leave
            case ast.Continue():
                return again
            case ast.Return() | ast.Raise():
                return reads(node)
            case ast.For() | ast.AsyncFor():
                return self._loop(node, out) | reads(node.iter)
            case ast.While():
                return self._loop(node, out)
            case ast.If():
                inside = self._all(node.body, out, leave, again) | self._all(node.orelse, out, leave, again)
                return (inside - _walrus(node.test)) | reads(node.test)
            case ast.With() | ast.AsyncWith():
                inside = self._all(node.body, out, leave, again)
                for item in reversed(node.items):
                    bound = stored(item.optional_vars) if item.optional_vars is not None else _NONE
                    inside = (inside - bound) | reads(item)
                return inside
            case ast.Try() | ast.TryStar():
                return self._try(node, out, leave, again)
            case ast.Match():
                cases = [
                    self._all(case.body, out, leave, again) - _captured(case.pattern) | reads(case.guard)
                    for case in node.cases
                ]
                return out.union(*cases) | reads(node.subject)
            case ast.AugAssign():
                return out | reads(node) | stored(node.target)
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                return (out - {node.name}) | reads(node)
            case _:
                return (out - _surely(node)) | reads(node)

    def exposed(self, loop: Loop) -> Names:
        """The names that a pass of the loop may read as the pass before has left them."""
        known = self._exposed.get(loop)
        if known is None:
            known = self._exposed[loop] = _Inside(loop).head[loop]
        return known

    def _loop(self, node: ast.For | ast.AsyncFor | ast.While, out: Names) -> Names:
        behind = self._all(node.orelse, out, _NONE, _NONE)
        head: Names = self.head.get(node, _NONE)
        for _ in range(_ROUNDS):
            inside = self._all(node.body, head, out, head)
            if isinstance(node, ast.While):
                now = (inside - _walrus(node.test)) | behind | reads(node.test)
            else:
                now = (inside - stored(node.target)) | behind
            if now <= head:
                break
            head = head | now
        self.head[node] = head
        return head

    def _try(self, node: ast.Try | ast.TryStar, out: Names, leave: Names, again: Names) -> Names:
        """Any statement of the body may be the last one before a handler."""
        finally_ = self._all(node.finalbody, out, leave, again)
        handlers = _NONE.union(
            *(self._all(each.body, finally_, leave, again) - {each.name or ""} for each in node.handlers)
        )
        handlers = handlers.union(*(reads(each.type) for each in node.handlers if each.type is not None))
        inside = self._all(node.body, self._all(node.orelse, finally_, leave, again) | handlers, leave, again)
        for statement in node.body:
            self.after[statement] |= handlers
        return inside | handlers | (finally_ if node.finalbody else _NONE)


class _Inside(Flow):
    """A loop alone, as though nothing came behind it."""

    def __init__(self, loop: Loop) -> None:
        self.head, self.after = {}, {}
        self._one(loop, _NONE, _NONE, _NONE)


def loops_at(body: Body, line: int) -> list[Loop]:
    """The loops that a line is in, the outermost first."""
    spanning = [
        node
        for node in below(body)
        if isinstance(node, Loop) and node.lineno <= line <= (node.end_lineno or node.lineno)
    ]
    return sorted(
        (node for node in spanning if not _in_else(node, line)),
        key=lambda node: (node.lineno, node.col_offset),
    )


def statement_at(body: Body, line: int) -> ast.stmt | None:
    """The innermost statement that a line is in."""
    found = None
    for node in below(body):
        if isinstance(node, ast.stmt) and node.lineno <= line <= (node.end_lineno or node.lineno):
            found = node
    return found


def at_head(loop: Loop, line: int) -> bool:
    return line < loop.body[0].lineno or loop.body[0].lineno == loop.lineno


def assigned(node: ast.AST) -> Names:
    """The names that are assigned anywhere in it, in the same frame."""
    found = {
        each.id for each in below(node) if isinstance(each, ast.Name) and not isinstance(each.ctx, ast.Load)
    }
    for each in below(node):
        if isinstance(each, _COMPREHENSIONS):
            found -= {name for part in each.generators for name in stored(part.target)} - _outside(each, node)
        elif isinstance(each, ast.ExceptHandler | ast.MatchAs | ast.MatchStar) and each.name:
            found.add(each.name)
        elif isinstance(each, ast.Import | ast.ImportFrom):
            found |= {alias.asname or alias.name.partition(".")[0] for alias in each.names}
    for each in ast.walk(node):
        if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) and each is not node:
            found.discard(each.name)
    return frozenset(found)


def _outside(comprehension: ast.AST, node: ast.AST) -> set[str]:
    """Names assigned in `node` by others than comprehensions."""
    inside = {id(each) for c in below(node) if isinstance(c, _COMPREHENSIONS) for each in ast.walk(c)}
    return {
        each.id
        for each in below(node)
        if isinstance(each, ast.Name) and not isinstance(each.ctx, ast.Load) and id(each) not in inside
    }


def reads(node: ast.AST | None) -> Names:
    """The names that an expression or a simple statement reads. Of a function, what it reads from around
    it."""
    if node is None:
        return _NONE
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
        given: list[ast.AST] = [
            *node.args.defaults,
            *(each for each in node.args.kw_defaults if each is not None),
        ]
        given += [] if isinstance(node, ast.Lambda) else node.decorator_list
        return _free(node).union(*map(reads, given))
    if isinstance(node, ast.Name):
        return frozenset({node.id}) if isinstance(node.ctx, ast.Load) else _NONE
    return _NONE.union(*(reads(child) for child in ast.iter_child_nodes(node)))


def stored(target: ast.AST | None) -> Names:
    """The names that a target binds."""
    nodes: Iterable[ast.AST] = ast.walk(target) if target is not None else ()
    return frozenset(
        node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
    )


def _surely(node: ast.stmt) -> Names:
    """The names that a simple statement writes or removes."""
    match node:
        case ast.Assign():
            return _NONE.union(*map(stored, node.targets)) | _walrus(node.value)
        case ast.AnnAssign():
            return stored(node.target) if node.value is not None else _NONE
        case ast.Delete():
            return frozenset(each.id for each in node.targets if isinstance(each, ast.Name))
        case ast.Import() | ast.ImportFrom():
            return frozenset(alias.asname or alias.name.partition(".")[0] for alias in node.names)
        case ast.Expr():
            return _walrus(node.value)
    return _NONE


def _walrus(node: ast.expr) -> Names:
    """What `(name := ...)` binds whichever way the expression goes."""
    if isinstance(node, ast.NamedExpr):
        return stored(node.target) | _walrus(node.value)
    if isinstance(node, ast.Compare):
        return _walrus(node.left)
    if isinstance(node, ast.UnaryOp):
        return _walrus(node.operand)
    if isinstance(node, ast.BoolOp):
        return _walrus(node.values[0])
    return _NONE


def _captured(pattern: ast.pattern) -> Names:
    nodes = list(ast.walk(pattern))
    names = {node.name for node in nodes if isinstance(node, ast.MatchAs | ast.MatchStar) and node.name}
    return frozenset(
        names | {node.rest for node in nodes if isinstance(node, ast.MatchMapping) and node.rest}
    )


def _in_else(loop: Loop, line: int) -> bool:
    return bool(loop.orelse) and line >= loop.orelse[0].lineno


def _nested(body: ast.AST) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda]:
    for node in ast.walk(body):
        if isinstance(node, _FUNCTIONS) and node is not body:
            yield node


def _declared(node: ast.AST) -> Names:
    """The names that a function assigns in a scope around it: `global`, `nonlocal`."""
    inner = [node.body] if isinstance(node, ast.Lambda) else getattr(node, "body", [])
    found = [
        each for part in inner for each in (part, *below(part)) if isinstance(each, ast.Global | ast.Nonlocal)
    ]
    return _NONE.union(*(frozenset(each.names) for each in found))


def _free(node: ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda) -> Names:
    """What a function reads that is not its own."""
    inner: list[ast.AST] = [node.body] if isinstance(node, ast.Lambda) else [*node.body]
    arguments = [
        *node.args.posonlyargs,
        *node.args.args,
        *node.args.kwonlyargs,
        node.args.vararg,
        node.args.kwarg,
    ]
    own = {each.arg for each in arguments if each is not None}
    if not isinstance(node, ast.Lambda):
        own |= assigned(node) | {
            each.name for each in ast.walk(node) if isinstance(each, ast.FunctionDef) and each is not node
        }
    return _NONE.union(*map(reads, inner)) - (own - _declared(node))


def _shared(body: Body) -> Names:
    return _NONE.union(*(_free(node) for node in _nested(body)))


def _rebound(body: Body) -> Names:
    return _NONE.union(*(_declared(node) & assigned(node) for node in _nested(body)))
