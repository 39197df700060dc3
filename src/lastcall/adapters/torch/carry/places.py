"""A frame of the script and where it stands: the loops around it, the names that it still needs, and those
that its loops change."""

from __future__ import annotations

import ast
import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import CodeType, FrameType
from typing import Any

from lastcall.adapters.torch.carry import clocks, flow, frames, guards
from lastcall.script.source import sources
from lastcall.script.source.scopes import Loop, below

READ_AGAIN = frozenset({"step", "epoch", "resumed"})  # what a loop may ask the run for, to begin where it was


@dataclass(frozen=True, eq=False)
class Place:
    """`needed`: assigned in a loop around it, and read later before they are surely written. `carried`: those
    that a pass of a loop hands to the next. `fresh`: those that the script creates again on its way to this
    place, each time it comes here."""

    code: CodeType
    line: int
    loops: tuple[Loop, ...]
    changing: frozenset[str]
    needed: frozenset[str]
    carried: frozenset[str]
    fresh: frozenset[str]
    node: ast.AST | None  # None: there is no source

    @property
    def key(self) -> str:
        return (
            self.code.co_qualname
            if self.node is not None
            else f"{self.code.co_qualname} of {self.code.co_filename}"
        )

    @functools.cached_property
    def asked(self) -> tuple[str, ...]:
        return tuple(sorted(self.needed))

    @functools.cached_property
    def remade(self) -> tuple[str, ...]:
        """The names whose values are other objects from pass to pass, and whose insides are looked at."""
        return tuple(sorted((self.carried | self.fresh) & self.changing))

    def is_left(self, name: str) -> bool:
        """Whether a pass assigns it before it reads it."""
        return name in self.changing and name not in self.carried and name not in self.fresh

    def is_time(self, name: str, value: object) -> bool:
        return self.node is not None and clocks.is_time(name, value, self.node)

    def is_guard(self, name: str, is_lost: Callable[[str], bool]) -> bool:
        return self.node is not None and guards.is_guard(name, self.node, is_lost)


def of(frame: FrameType) -> Place:
    return _of(frame.f_code, frame.f_lineno) or _place(frame.f_code, frame.f_lineno, frame.f_globals)


_known: dict[tuple[CodeType, int], Place] = {}


def _of(code: CodeType, line: int) -> Place | None:
    return _known.get((code, line))


def _place(code: CodeType, line: int, space: Mapping[str, Any]) -> Place:
    if len(_known) > 500:
        _known.clear()
    source = sources.of(code, space)
    node = source.body_of(code) if source is not None else None
    made = (
        Place(code, line, (), frozenset(), frozenset(), frozenset(), frozenset(), None)
        if node is None
        else _look(code, line, node)
    )
    return _known.setdefault((code, line), made)


@functools.lru_cache(maxsize=64)
def _flow(node: sources.Body) -> flow.Flow:
    return flow.Flow(node)


def _look(code: CodeType, line: int, node: sources.Body) -> Place:
    found, loops = _flow(node), flow.loops_at(node, line)
    if not loops:
        return Place(code, line, (), frozenset(), frozenset(), frozenset(), frozenset(), node)
    outer, inner = loops[0], loops[-1]
    statement = flow.statement_at(node, line)
    if flow.at_head(inner, line) or statement is None:
        live = found.head.get(inner, frozenset())
    else:
        live = found.after.get(statement, frozenset())
    always = found.shared | frozenset(code.co_cellvars)
    changing = flow.assigned(outer) | found.rebound
    carried = frozenset().union(*(found.exposed(loop) & flow.assigned(loop) for loop in loops)) | (
        always & changing
    )
    needed = (live | always) & changing
    fresh = needed - carried - flow.assigned(inner)
    return Place(code, line, tuple(loops), changing, needed, carried, fresh, node)


def exposed(place: Place, loop: Loop) -> frozenset[str]:
    """The names that a pass of this loop may read as the pass before has left them."""
    return _flow(place.node).exposed(loop) if place.node is not None else frozenset()


def rebound(space: Mapping[str, Any], code: CodeType) -> tuple[frozenset[str], ast.AST] | None:
    """The globals of a module that its functions assign, and its source."""
    if len(_spaces) > 200:
        _spaces.clear()
    known = _spaces.get(code)
    if known is None:
        known = _spaces[code] = _rebound(space, code) or ()
    return known or None


_spaces: dict[CodeType, Any] = {}


def _rebound(space: Mapping[str, Any], code: CodeType) -> tuple[frozenset[str], ast.AST] | None:
    source = sources.of(code, space)
    return (_flow(source.tree).rebound, source.tree) if source is not None else None


def shown(place: Place) -> str:
    return frames.place(place.code, place.loops[-1].lineno if place.loops else place.line)


def head_reads(loop: Loop, attributes: frozenset[str]) -> bool:
    """Whether the head of a loop reads one of these attributes of something: `range(run.step, n)`, `while
    run.step < n`."""
    head = loop.test if isinstance(loop, ast.While) else loop.iter
    return any(isinstance(node, ast.Attribute) and node.attr in attributes for node in ast.walk(head))


def asks(loop: Loop, line: int) -> bool:
    """Whether the line is the head of a loop that asks where to begin."""
    return flow.at_head(loop, line) and head_reads(loop, READ_AGAIN)


def changed_before(place: Place) -> frozenset[str]:
    """Of the method that stands there: the attributes of its object that it assigns before it comes to this
    line."""
    if place.node is None or not place.code.co_argcount:
        return frozenset()
    itself = place.code.co_varnames[0]
    nodes = (
        node
        for node in below(place.node)
        if isinstance(node, ast.Attribute) and not isinstance(node.ctx, ast.Load)
    )
    return frozenset(
        node.attr
        for node in nodes
        if isinstance(node.value, ast.Name) and node.value.id == itself and node.lineno < place.line
    )


def ends_pass(frame: FrameType) -> bool:
    """Whether what a frame is doing is the last thing in a pass of its loop, as far as its source tells."""
    place = of(frame)
    if not place.loops or place.node is None:
        return False
    block: list[ast.stmt] = place.loops[-1].body
    while True:
        last = block[-1]
        if not last.lineno <= place.line <= (last.end_lineno or last.lineno):
            return False
        if not isinstance(last, ast.If | ast.With):
            return isinstance(last, ast.Expr | ast.Assign)
        blocks = [last.body] if isinstance(last, ast.With) else [last.body, last.orelse]
        here = [
            each for each in blocks if each and each[0].lineno <= place.line <= (each[-1].end_lineno or 0)
        ]
        if not here:
            return False
        block = here[0]


def set_between(place: Place, name: str) -> bool:
    """Whether a name is assigned in the same `with` block as the loop, before it."""
    assert place.node is not None
    loop = place.loops[0]
    blocks = [
        node
        for node in below(place.node)
        if isinstance(node, ast.With) and node.lineno < loop.lineno <= (node.end_lineno or 0)
    ]
    before = [node for block in blocks for node in block.body if node.lineno < loop.lineno]
    return any(name in flow.assigned(ast.Module([node], [])) for node in before)
