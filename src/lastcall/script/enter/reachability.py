"""Whether a save is out of reach whatever the step: `if args.checkpointing_steps == "epoch":`, and the option
was not given."""

from __future__ import annotations

import ast
from types import FrameType

from lastcall.script.find.points import Point
from lastcall.script.source import condition_kinds, conditions, rewrite
from lastcall.script.source.conditions import Need

_PLAIN = (
    ast.Name,
    ast.Attribute,
    ast.Constant,
    ast.Compare,
    ast.BoolOp,
    ast.UnaryOp,
    ast.boolop,
    ast.unaryop,
    ast.cmpop,
    ast.Load,
)


def kept_from(point: Point, frame: FrameType | None) -> str:
    """The condition that is the same at every pass and does not hold; empty if there is none, or if that is
    unknown."""
    for need in point.needs:
        for part in _parts(need):
            fixed = (
                conditions.force(part, need.want, need.scope) is None
                and condition_kinds.of(part, need.scope) is condition_kinds.ConditionKind.FIXED
            )
            if fixed and _is_plain(part) and _fails(part, need, frame):
                return ast.unparse(part)
    return ""


def _parts(need: Need) -> list[ast.expr]:
    """What must all come out as needed."""
    both = isinstance(need.test, ast.BoolOp) and isinstance(need.test.op, ast.And) and need.want
    return need.test.values if both and isinstance(need.test, ast.BoolOp) else [need.test]


def _is_plain(test: ast.expr) -> bool:
    """Whether evaluating it runs none of the script's code."""
    calls = [node for node in ast.walk(test) if isinstance(node, ast.Call)]
    asked = all(
        isinstance(call.func, ast.Name) and call.func.id == "isinstance" and not call.keywords
        for call in calls
    )
    return asked and all(isinstance(node, (*_PLAIN, ast.Call)) for node in ast.walk(test))


def _fails(part: ast.expr, need: Need, frame: FrameType | None) -> bool:
    while frame is not None and frame.f_code is not need.scope.code:
        frame = frame.f_back
    if frame is None or isinstance(need.holder, ast.match_case):
        return False
    try:
        return (
            bool(eval(rewrite.expression(part, need.scope), frame.f_globals, dict(frame.f_locals)))
            is not need.want
        )
    except Exception:
        return False
