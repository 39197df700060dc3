"""What the script creates again on its way to a loop: `progress = ProgressMeter(..., [batch_time, losses])`
at the top of an epoch. Such an object is another one whenever the loop begins, and a resumed run makes it
again: nothing of that is carried."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator
from types import FrameType, ModuleType
from typing import Any

from lastcall.adapters.torch.carry import flow, frames, places
from lastcall.script.source.scopes import Loop, below

_DISPLAYS = (ast.List, ast.Dict, ast.Set, ast.ListComp, ast.DictComp, ast.SetComp)


class Remade:
    def __init__(self) -> None:
        self._last: dict[str, int] = {}  # by owner: the object that was there when a loop began

    def keys(self, chain: list[FrameType], entered: FrameType | None) -> list[str]:
        """A loop begins in the first frame. The owners of objects that were made since one began here
        before."""
        made: set[int] = set()
        for depth, frame in enumerate(chain):
            place, own = places.of(frame), frames.variables(frame)
            for name, makers in _assigned(
                place, begins=depth == 0, called=frame is not entered and not frames.is_module(frame)
            ):
                if name not in own or not all(
                    isinstance(each, _DISPLAYS) or isinstance(_called(each, frame), type) for each in makers
                ):
                    continue
                key = f"{place.key}: {name}"
                # a caller's may be the same in several calls
                if depth == 0 or self._last.get(key) != id(own[name]):
                    made.add(id(own[name]))
                self._last[key] = id(own[name])
        if not made:
            return []
        names = [
            (places.of(frame).key, name, each)
            for frame in chain
            for name, each in frames.variables(frame).items()
        ]
        return [f"{key}: {name}" for key, name, each in names if id(each) in made]


@functools.lru_cache(maxsize=64)
def _assigned(place: places.Place, *, begins: bool, called: bool) -> tuple[tuple[str, list[ast.expr]], ...]:
    """Names that are always bound on the way to this place (the head of a loop, `begins`, or a call), from
    where a pass of the loop around it begins, or the function (`called`); and what all assignments in the
    function bind them to. A loop in between may use and change them before this one does."""
    loops = list(place.loops)
    here = loops.pop() if begins and loops and flow.at_head(loops[-1], place.line) else None
    line = place.line if here is None else here.lineno
    around: ast.AST | None = loops[-1] if loops else place.node if called else None
    if place.node is None or not isinstance(around, Loop | ast.FunctionDef | ast.AsyncFunctionDef):
        return ()
    between = [
        each.lineno
        for each in below(around)
        if isinstance(each, Loop) and each is not here and each.lineno < line
    ]
    passed = [node for node in _straight(around.body) if max(between, default=0) < node.lineno < line]
    bound = {name for node in passed for name, _ in _bindings(node)} - set(
        place.code.co_varnames[: place.code.co_argcount]
    )
    makers: dict[str, list[ast.expr]] = {name: [] for name in bound}
    for node in below(place.node):
        for name, value in _bindings(node):
            if name in bound:
                makers[name].append(value)
    return tuple(makers.items())


def _straight(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """The statements that are always carried out, one after the other."""
    for node in body:
        yield node
        if isinstance(node, ast.With | ast.AsyncWith):
            yield from _straight(node.body)


def _bindings(node: ast.AST) -> Iterator[tuple[str, ast.expr]]:
    if isinstance(node, ast.Assign):
        for target in node.targets:
            yield from _pairs(target, node.value)


def _pairs(target: ast.expr, value: ast.expr) -> Iterator[tuple[str, ast.expr]]:
    if isinstance(target, ast.Name):
        yield target.id, value
    elif (
        isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple) and len(target.elts) == len(value.elts)
    ):
        for one, other in zip(target.elts, value.elts, strict=True):
            yield from _pairs(one, other)


def _called(value: ast.expr, frame: FrameType) -> Any:
    called = value.func if isinstance(value, ast.Call) else None
    if isinstance(called, ast.Name):
        return frames.variables(frame).get(
            called.id, frame.f_globals.get(called.id, frame.f_builtins.get(called.id))
        )
    if isinstance(called, ast.Attribute) and isinstance(called.value, ast.Name):
        module = frame.f_globals.get(called.value.id)
        return getattr(module, called.attr, None) if isinstance(module, ModuleType) else None
    return None
