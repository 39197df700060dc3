"""The observed call path to a save. If the source does not show what a call runs (a registry of handlers),
the stack does."""

from __future__ import annotations

import ast
import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import CodeType, FrameType
from typing import Any

from lastcall.script.find.points import Saves, Way
from lastcall.script.source import scopes, sources
from lastcall.script.source.scopes import Scope, below


@dataclass(frozen=True)
class SeenCall:
    """A function and the call that it was at. No variables: they would keep tensors alive."""

    source: sources.SourceFile
    node: sources.Body
    code: CodeType
    space: Mapping[str, Any]
    call: ast.Call


class Learned:
    def __init__(self) -> None:
        self._seen: list[SeenCall] = []  # from the save outward

    def learn(self, frame: FrameType | None, saves: Saves) -> bool:
        """From the caller of what saves. False if that was not a save."""
        seen: list[SeenCall] = []
        while frame is not None:
            scope = None if scopes.is_library(frame.f_globals) else scopes.of_frame(frame)
            call = _call(scope, frame) if scope is not None else None
            if scope is not None and call is not None:
                if not seen and not saves.is_save(call, scope.value(call.func)):
                    return False
                seen.append(SeenCall(scope.source, scope.node, scope.code, scope.space, call))
            frame = frame.f_back
        self._seen = seen
        return bool(seen)

    def ways(self, scope: Scope) -> Iterator[Way]:
        """From a running function, if it was on the path."""
        index = next((index for index, seen in enumerate(self._seen) if seen.code == scope.code), None)
        if index is not None and self._seen[index].source is scope.source:
            yield self._way(scope, index)

    def _way(self, scope: Scope, index: int) -> Way:
        call = self._seen[index].call
        if index == 0:
            return Way(scope, call)
        inner = self._seen[index - 1]
        callee = Scope(inner.source, inner.node, inner.code, inner.space, {})
        callee.bind(scope, call, [])
        return Way(scope, call, self._way(callee, index - 1))


def _call(scope: Scope, frame: FrameType) -> ast.Call | None:
    """The call that a frame is at."""
    at = next(itertools.islice(frame.f_code.co_positions(), frame.f_lasti // 2, None), None)
    for node in below(scope.node):
        if isinstance(node, ast.Call) and at == (
            node.lineno,
            node.end_lineno,
            node.col_offset,
            node.end_col_offset,
        ):
            return node
    return None
