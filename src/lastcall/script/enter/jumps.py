"""Conditions as a trace function sees them: lines, expressions that are still evaluated, and where the frame
continues."""

from __future__ import annotations

import ast
import logging
import sys
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import CodeType, FrameType
from typing import Any

from lastcall.script.find.points import Point
from lastcall.script.source import rewrite
from lastcall.script.source.conditions import Need
from lastcall.script.source.scopes import Scope, below

log = logging.getLogger("lastcall")

_WITH = (ast.With, ast.AsyncWith)
# The end of a `with` block has the line of its beginning. Where the block holds another one, Python 3.14 can
# take the end for the beginning: after a jump to that line it calls what is no function (seen with 3.14.10).
_MISTAKES_WITH = sys.version_info >= (3, 14)


@dataclass(frozen=True)
class Force:
    """At one of `lines`: if `test` comes out as `want`, the frame goes to the line `target`. Where no line
    begins there, `program` is run instead, and the frame goes to `behind`."""

    code: CodeType
    lines: range
    test: CodeType = field(repr=False)
    want: bool = True
    target: int | None = None
    program: CodeType | None = field(default=None, repr=False)
    behind: int | None = None

    def holds(self, frame: FrameType, written: Mapping[str, Any]) -> bool:
        try:
            # the script's own expression
            return bool(eval(self.test, frame.f_globals, {**frame.f_locals, **written})) is self.want
        except Exception:
            log.debug("%s:%d cannot be evaluated", self.code.co_filename, self.lines.start, exc_info=True)
            return False

    def lead(self, frame: FrameType, written: dict[str, Any]) -> int | None:
        """The line where the frame is now; None if it has done all there is to do. `written`: variables that
        a program has changed."""
        if self.program is None:
            return jump(frame, self.target)
        own = {**frame.f_locals, **written}
        space = rewrite.run(self.program, frame, written)
        known = {*frame.f_code.co_varnames, *frame.f_code.co_cellvars, *frame.f_code.co_freevars}
        if frame.f_locals is frame.f_globals:
            known = set(self.program.co_names)
        written.update(
            {
                name: space[name]
                for name in known
                if name in space and (name not in own or own[name] is not space[name])
            }
        )
        return jump(frame, self.behind)


class _Refused(Exception):
    """Python does not let the frame jump there."""


def jump(frame: FrameType, line: int | None) -> int | None:
    if line is not None:
        try:
            with warnings.catch_warnings():
                # variables that have no value yet get None, Python 3.12 says
                warnings.simplefilter("ignore", RuntimeWarning)
                frame.f_lineno = line  # type: ignore[misc]  # a trace function may
        except ValueError as error:
            raise _Refused(
                f"{frame.f_code.co_filename}:{frame.f_lineno} cannot be treated as true: {error}"
            ) from None
        # Python 3.12 warns again, in the script, of variables that are not in the copy it made before the
        # jump
        _ = frame.f_locals
    return line


def follow(frame: FrameType, forces: Sequence[Force]) -> tuple[bool, int | None]:
    """Handles conditions that follow each other: there is no event for a line that was jumped to. Returns
    whether any was met, and the line where the frame is now (None: it has done all there is to do)."""
    line: int | None = frame.f_lineno
    met, written = False, dict[str, Any]()
    while line is not None:
        force = next((each for each in forces if line in each.lines), None)
        if force is None or not force.holds(frame, written):
            break
        try:
            met, line = True, force.lead(frame, written)
        except _Refused as error:
            log.warning("%s", error)
            break
    if written:
        # last: on Python 3.12 and before, to look at f_locals undoes what was written there
        frame.f_locals.update(written)
    return met, line


def of(points: Iterable[Point]) -> Iterator[Force]:
    """The first point with a condition decides."""
    seen: set[tuple[CodeType, int]] = set()
    for point in points:
        for force in of_needs(point.needs):
            key = (force.code, force.lines.start)
            if key not in seen:
                seen.add(key)
                yield force


def of_needs(needs: Sequence[Need]) -> Iterator[Force]:
    for need in needs:
        assumed = need.assumed
        if assumed is None:
            continue
        target = _target(need)
        # a jump would make the script report that this was the best
        if target is not None and not need.metric and not (_MISTAKES_WITH and _leads_to_nested_with(need)):
            yield Force(
                need.scope.code, _lines(need), rewrite.expression(assumed, need.scope), need.want, target
            )
        else:
            yield _run(need, needs)


def _leads_to_nested_with(need: Need) -> bool:
    first = need.holder.body[0] if need.want and isinstance(need.holder, ast.If | ast.match_case) else None
    return isinstance(first, _WITH) and any(isinstance(node, _WITH) for node in below(first))


def _run(need: Need, needs: Iterable[Need]) -> Force:
    statement, scope = need.statement, need.scope
    program = rewrite.program([statement], needs, scope)
    always = rewrite.expression(ast.Constant(True), scope)
    return Force(
        scope.code,
        range(statement.lineno, _header_end(statement) + 1),
        always,
        True,
        None,
        program,
        _behind(statement, scope),
    )


def _lines(need: Need) -> range:
    return range(need.statement.lineno, (need.test.end_lineno or need.test.lineno) + 1)


def _header_end(statement: ast.stmt) -> int:
    body = getattr(statement, "body", None)
    end = statement.end_lineno or statement.lineno
    return max(statement.lineno, min(end, body[0].lineno - 1)) if isinstance(body, list) and body else end


def _target(need: Need) -> int | None:
    """The first line of what the condition should lead to, if it is a line of its own."""
    holder = need.holder
    if isinstance(holder, ast.match_case):
        line: int | None = holder.body[0].lineno
    elif not isinstance(holder, ast.If):
        return None
    elif need.want:
        line = holder.body[0].lineno
    else:
        line = holder.orelse[0].lineno if holder.orelse else _behind(holder, need.scope)
    return line if line is not None and line > (need.test.end_lineno or need.test.lineno) else None


def _behind(node: ast.stmt, scope: Scope) -> int | None:
    """The line of what follows a statement in the same pass; None if that is not for a jump to reach."""
    parent = scope.source.parents[node]
    for _, siblings in ast.iter_fields(parent):
        if isinstance(siblings, list) and node in siblings and siblings[-1] is not node:
            return int(siblings[siblings.index(node) + 1].lineno)
    return _behind(parent, scope) if isinstance(parent, ast.If) else None
