"""What collects something from the batches while it runs, where nothing can reach it: `[step(batch) for batch
in run.batches(loader)]`, `sum(step(batch) for ...)`, `functools.reduce(...)`. The results of the batches
before an interruption are on no variable, and an epoch that is resumed has only those of the batches after
it. A `for` statement has all it needs in variables, which are saved.
"""

from __future__ import annotations

import ast
import dis
import types

from lastcall.adapters.torch.carry import frames
from lastcall.core.checkpoint.doubts import Doubts
from lastcall.script.source import scopes, sources

_COLLECTED = ("<listcomp>", "<setcomp>", "<dictcomp>")
_COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp)
_HANDS_ON = frozenset({"next", "anext", "send"})  # calls that return with each batch
_GENERATOR = 0x20
Position = tuple[int, int, int, int]  # line, last line, column, last column


def check(frame: types.FrameType | None, doubts: Doubts) -> None:
    """`frame`: what waits for the first batch."""
    if frame is None or (frame.f_code, frame.f_lasti) in _fine:
        return
    collector, where = _found(frame)
    if collector is not None:
        what = f"`{_function(collector)}(...)`" if isinstance(collector, ast.Call) else "a comprehension"
        reason = f"{what} around run.batches() ({where}) collects its results where they cannot be saved"
        doubts.add(reason, "Write a `for` loop, and append to a list or add up in it.")
    elif len(_fine) < 1000:
        _fine.add((frame.f_code, frame.f_lasti))


_fine: set[tuple[types.CodeType, int]] = set()  # loops that were looked at: an epoch begins often


def _found(frame: types.FrameType) -> tuple[ast.expr | None, str]:
    for each in frames.of_script(frame):
        if each.f_code.co_name in _COLLECTED:
            continue  # the frame that it was called from tells what becomes of it
        collector = _collector(each)
        if collector is not None or not each.f_code.co_flags & _GENERATOR:
            return collector, frames.place(each.f_code, each.f_lineno)
    return None, ""


def _collector(frame: types.FrameType) -> ast.expr | None:
    """The call that the frame waits for, or the comprehension that it is in, if its result is used."""
    source = sources.of(frame.f_code, frame.f_globals)
    place = _position(frame)
    body = source.body_of(frame.f_code) if source is not None else None
    if body is None or place is None:
        return None
    opname, position = place
    inside = [node for node in scopes.below(body) if _spans(node, position)]
    calls = opname.startswith(("CALL", "PRECALL"))
    if not calls and not opname.startswith("FOR_ITER"):
        return None
    wanted = (ast.Call, *_COMPREHENSIONS) if calls else _COMPREHENSIONS
    found = min((node for node in inside if isinstance(node, wanted)), key=_size, default=None)
    if found is None or (isinstance(found, ast.Call) and _function(found) in _HANDS_ON):
        return None
    dropped = any(isinstance(node, ast.Expr) and node.value is found for node in inside)
    return None if dropped else found


def _position(frame: types.FrameType) -> tuple[str, Position] | None:
    """The instruction that the frame is at, and where it stands in the source."""
    positions = list(frame.f_code.co_positions())
    at = frame.f_lasti // 2
    if not 0 <= at < len(positions) or None in positions[at]:
        return None
    # it may be inside a cache
    before = [one.opname for one in dis.get_instructions(frame.f_code) if one.offset <= frame.f_lasti]
    opname = before[-1] if before else ""
    return opname, positions[at]  # type: ignore[return-value]


def _spans(node: ast.AST, position: Position) -> bool:
    if not isinstance(node, ast.expr | ast.stmt) or node.end_lineno is None or node.end_col_offset is None:
        return False
    line, end_line, column, end_column = position
    return (node.lineno, node.col_offset) <= (line, column) and (end_line, end_column) <= (
        node.end_lineno,
        node.end_col_offset,
    )


def _size(node: ast.expr) -> tuple[int, int]:
    return (node.end_lineno or 0) - node.lineno, (node.end_col_offset or 0) - node.col_offset


def _function(call: ast.Call) -> str:
    return (
        call.func.attr
        if isinstance(call.func, ast.Attribute)
        else getattr(call.func, "id", ast.unparse(call.func))
    )
