"""Loops of the script's own around its steps, which a resumed run starts from the beginning: `for epoch in
range(3)` around tick() or run.batches().

Found in the source of the frames between the step and the `with` block, when the first step is over. A loop
that asks the run where to continue (`range(run.step, n)`, `while run.step < n`), one over data, and a `while`
loop (its variables are carried) are right. Around run.batches() the epochs that are over are passed over by
empty loops, but what else is done in an epoch is done again. Not so in a `while` loop: its variables are put
back at the first run.batches(), so that its first pass is the one that was interrupted (goes_on()).
"""

from __future__ import annotations

import ast
import types
from collections.abc import Iterator
from typing import Any

from lastcall.core.checkpoint.doubts import Doubts
from lastcall.script.source import scopes

_COUNTS = frozenset({"range", "trange", "count", "arange"})
_WRAPS = frozenset({"tqdm", "enumerate", "track", "auto", "list", "reversed"})
_DEEP = 12  # frames
Entered = tuple[types.CodeType, int]


def check(
    frame: types.FrameType | None, entered: Entered | None, run: object, doubts: Doubts, *, batches: bool
) -> None:
    """`frame`: the one that asks for the first batch, or ticks. `entered`: where the block began. `run`: what
    its loops may ask."""
    for where, scope, loop in _around_step(frame, entered):
        if isinstance(loop, ast.For) and (
            _starts_over(loop, scope) and (batches or not _asks(loop, scope, run))
        ):
            _doubt(loop, where, doubts, batches)
            return


def check_in_epoch(
    frame: types.FrameType | None, entered: Entered | None, run: object, doubts: Doubts
) -> None:
    """`frame`: the one that ticks, inside run.epochs(): an interrupted epoch begins such a loop again."""
    for where, scope, loop in _around_step(frame, entered):
        if isinstance(loop, ast.For) and _starts_over(loop, scope) and not _asks(loop, scope, run):
            target, over = ast.unparse(loop.target), ast.unparse(loop.iter)
            doubts.add(
                f"{_told(loop, where)} starts from the beginning in an epoch that is resumed",
                f"Write `for {target} in run.batches({over:.60}):`, without run.tick().",
            )
            return


def goes_on(frame: types.FrameType | None, entered: Entered | None, run: object) -> bool:
    """Whether the first pass of the script's own loops around run.batches() is, in a resumed run, the one
    that was interrupted."""
    found = list(_around_step(frame, entered))
    return bool(found) and all(
        isinstance(loop, ast.While) or _asks(loop, scope, run) for _, scope, loop in found
    )


def site(frame: types.FrameType | None, entered: Entered | None) -> tuple[object, ...]:
    """Where a loop begins: the same again only in another pass of a loop around it."""
    found: list[object] = []
    for _ in range(_DEEP):
        if frame is None:
            break
        found += [frame.f_code, scopes.instruction(frame)]
        if entered is not None and frame.f_code is entered[0]:
            break
        frame = frame.f_back
    return tuple(found)


def check_tick(frame: types.FrameType, lines: set[int], doubts: Doubts) -> None:
    """`lines`: those of this script that have called tick() before. A run that stops at the first of two in
    one pass of a loop begins that pass again when it is resumed, and not in its middle."""
    line = frame.f_lineno
    if line in lines:
        return
    scope = scopes.of_frame(frame) if not scopes.is_library(frame.f_globals) else None
    if isinstance(frame.f_locals, dict) and frame.f_code.co_flags & 1:
        frame.f_locals.clear()
    for other in lines if scope is not None else ():
        assert scope is not None
        first, second = sorted((line, other))
        if _both(scope.node, first, second):
            where = frame.f_code.co_filename.rpartition("/")[2]
            reason = (
                f"run.tick() is called twice in a pass of a loop ({where}:{first} and {second}): a run "
                "cannot be resumed in its middle"
            )
            doubts.add(reason, "Call it once, at the end of the pass.")
    lines.add(line)


def _both(body: ast.AST, first: int, second: int) -> bool:
    """Whether one pass of a loop may come to both lines, one after the other."""
    for node in scopes.below(body):
        for name in ("body", "orelse", "handlers", "finalbody", "cases"):
            block = getattr(node, name, None)
            if not isinstance(block, list):
                continue
            at = [
                next((n for n, each in enumerate(block) if _spans(each, line)), None)
                for line in (first, second)
            ]
            if None not in at and at[0] != at[1] and name not in ("handlers", "cases"):
                between = block[at[0] : at[1]]
                return any(
                    isinstance(each, ast.For | ast.While) for each in _around(body, first)
                ) and not any(
                    isinstance(each, ast.Continue | ast.Break | ast.Return)
                    for each in between[1:] + _behind(between[0], first)
                )
    return False


def _spans(node: ast.AST, line: int) -> bool:
    return getattr(node, "lineno", 0) <= line <= (getattr(node, "end_lineno", None) or 0)


def _around(body: ast.AST, line: int) -> list[ast.AST]:
    return [node for node in scopes.below(body) if _spans(node, line)]


def _behind(statement: ast.AST, line: int) -> list[ast.AST]:
    """The statements that follow a line inside a statement, whichever way it was come to."""
    return [
        node
        for node in (statement, *scopes.below(statement))
        if isinstance(node, ast.stmt) and node.lineno > line
    ]


def entered(frame: types.FrameType | None) -> Entered | None:
    """Where a block is entered: the frame itself would keep all of its variables alive."""
    while frame is not None and scopes.is_library(frame.f_globals):
        frame = frame.f_back
    return None if frame is None else (frame.f_code, frame.f_lineno)


def _doubt(loop: ast.For, frame: types.FrameType, doubts: Doubts, batches: bool) -> None:
    target = ast.unparse(loop.target)
    inner = batches or any(isinstance(node, ast.For) for node in scopes.below(loop))
    remedy = (
        f"Write `for {target} in run.epochs(n):` with `run.batches(loader)` inside."
        if inner
        else "Write `run.steps(n)`."
    )
    doubts.add(f"{_told(loop, frame)} starts from the beginning in a resumed run", remedy)


def _told(loop: ast.For, frame: types.FrameType) -> str:
    where = f"{frame.f_code.co_filename.rpartition('/')[2]}:{loop.lineno}"
    return f"`for {ast.unparse(loop.target)} in {ast.unparse(loop.iter):.60}` ({where})"


def _around_step(
    frame: types.FrameType | None, entered: Entered | None
) -> Iterator[tuple[types.FrameType, scopes.Scope, ast.For | ast.While]]:
    """The loops of the script's own between here and the line where the block was entered."""
    for _ in range(_DEEP):
        if frame is None:
            return
        inside = entered is not None and frame.f_code is entered[0]
        scope = scopes.of_frame(frame) if not scopes.is_library(frame.f_globals) else None
        if isinstance(frame.f_locals, dict) and frame.f_code.co_flags & 1:
            frame.f_locals.clear()  # a copy that the frame would keep, and the last batch with it
        if scope is not None:
            for loop in _loops(scope, entered[1] if inside and entered is not None else 0):
                yield frame, scope, loop
        if inside:
            return
        frame = frame.f_back


def _loops(scope: scopes.Scope, after: int) -> Iterator[ast.For | ast.While]:
    """The loops that are running here, and begin behind the line where the block was entered."""
    assert scope.line is not None
    for node in scopes.below(scope.node):
        if (
            isinstance(node, ast.For | ast.While)
            and node.lineno > after
            and node.body[0].lineno <= scope.line <= (node.end_lineno or 0)
        ):
            yield node


def _asks(loop: ast.For, scope: scopes.Scope, run: object) -> bool:
    return any(
        isinstance(node, ast.Name | ast.Attribute) and scope.value(node) is run
        for node in ast.walk(loop.iter)
    )


def _starts_over(loop: ast.For, scope: scopes.Scope) -> bool:
    """Whether it counts on its own, to more than one."""
    over: ast.expr = loop.iter
    while isinstance(over, ast.Call) and _name(over.func) in _WRAPS and over.args:
        over = over.args[0]
    if isinstance(over, ast.Call):
        return _name(over.func) in _COUNTS and _count(over, scope) != 1
    value = scope.value(over) if isinstance(over, ast.Name | ast.Attribute) else _literal(over)
    return (
        isinstance(value, range | list | tuple)
        and len(value) > 1
        and all(isinstance(item, int) for item in value)
    )


def _count(call: ast.Call, scope: scopes.Scope) -> int | None:
    """How many there are; None if that cannot be told."""
    numbers: list[Any] = [
        _literal(each) if isinstance(each, ast.Constant) else scope.value(each) for each in call.args
    ]
    if (
        _name(call.func) not in ("range", "trange")
        or not numbers
        or not all(type(number) is int for number in numbers)
    ):
        return None
    return len(range(*numbers))


def _name(function: ast.expr) -> str:
    return function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")


def _literal(node: ast.expr) -> Any:
    try:
        return ast.literal_eval(node)
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return None
