"""Runs the statements of the script that save at a completed step, away from their place in the source.

What is saved of tensors is live. Counts are those of the last time that the save point was passed
(counters.py): after resuming, batches may be repeated, never skipped.
"""

from __future__ import annotations

import ast
import logging
import sys
from collections.abc import Iterator
from types import CodeType, FrameType
from typing import Any

from lastcall.script.enter import jumps
from lastcall.script.enter.jumps import Force
from lastcall.script.find.points import Point, Saves
from lastcall.script.find.search import FoundSaves
from lastcall.script.replay import counters, metrics
from lastcall.script.source import rewrite
from lastcall.script.source.scopes import assignments, below

log = logging.getLogger("lastcall")


class Replay:
    def __init__(self) -> None:
        self.inside = False
        self._memory = counters.Memory()

    def remember(self, frame: FrameType) -> None:
        self._memory.remember(frame)

    def run(self, frame: FrameType | None, found: FoundSaves, saves: Saves) -> str:
        """Returns why nothing was saved. An exception of the script's own statements is a reason, too."""
        point = found.points[0]
        while frame is not None and frame.f_code != point.scope.code:
            frame = frame.f_back
        assert frame is not None  # the point was found in these frames
        try:
            statements = _statements(point)
            changes = counters.Changes() if point.near else counters.back(point, found.chain, self._memory)
            instead = metrics.left_out(point, statements, saves)
            program = rewrite.program(statements, point.needs, point.scope, instead)
        except (SyntaxError, ValueError) as error:
            return f"{point.place} cannot be run separately: {error}"
        log.info("Running the script's own save of %s%s", point.place, f", with {changes}" if changes else "")
        return self._execute(program, frame, point, changes)

    def _execute(self, program: CodeType, frame: FrameType, point: Point, changes: counters.Changes) -> str:
        others = [force for force in jumps.of([point]) if force.code != point.scope.code]
        with_others = _Tracing(others)
        self.inside = True
        changes.apply()
        try:
            with_others.begin()
            rewrite.run(program, frame, changes.names)
        except Exception as error:
            log.debug("the script's own save failed", exc_info=True)
            return f"{point.place} cannot be run here: {error!r}"
        finally:
            with_others.end()
            changes.undo()
            self.inside = False
        return f"{point.place} was run, and saved nothing"


class _Tracing:
    """Conditions in functions that the statements call."""

    def __init__(self, forces: list[Force]) -> None:
        self._forces = forces
        self._before: Any = None

    def begin(self) -> None:
        if self._forces:
            self._before = sys.gettrace()
            sys.settrace(self._trace)

    def end(self) -> None:
        if self._forces:
            sys.settrace(self._before)

    def _trace(self, frame: FrameType, event: str, arg: Any) -> Any:
        forces = [force for force in self._forces if force.code == frame.f_code]
        if not forces:
            return None
        if event == "line":
            jumps.follow(frame, forces)
        return self._trace


def _statements(point: Point) -> list[ast.stmt]:
    """Those that save, and those between the step and them that make what they need. A near point gets all of
    them: the scheduler, the count. A far one must not count what has not been done."""
    holder = point.run[-1]
    end = point.around.index(holder)
    begin = point.around.index(point.current) + 1 if point.current is not None and point.ahead else 0
    between = point.around[begin:end]
    if point.near and point.ahead:
        return [*between, holder]
    chosen = [holder]
    for statement in reversed(between):
        made = {
            ast.unparse(target) for node in (statement, *below(statement)) for target, _ in assignments(node)
        }
        if any(_missing(name, point) for name in made & set(_used(chosen))):
            chosen.insert(0, statement)
    return chosen


def _missing(name: str, point: Point) -> bool:
    """Whether it must be computed again: a value that is not plain may hold tensors, or a folder that is
    gone."""
    value = point.scope.value(ast.parse(name, mode="eval").body)
    return value is None or not isinstance(value, counters.PLAIN)


def _used(statements: list[ast.stmt]) -> Iterator[str]:
    for statement in statements:
        for node in ast.walk(statement):
            if isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Load):
                yield ast.unparse(node)
