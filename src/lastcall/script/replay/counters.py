"""The counts of a script as they were when it last passed its save point: from what it has done since, or
from the last report."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from types import CodeType, FrameType
from typing import Any

from lastcall.script.find.points import Point
from lastcall.script.replay import since_save
from lastcall.script.replay.earlier_values import Past, Slot
from lastcall.script.source.scopes import Scope, is_library

PLAIN = (int, float, str, bool, type(None))


class Memory:
    """Plain variables of the script's frames, and the counts that the object of a method keeps, by the
    frame's code."""

    def __init__(self) -> None:
        self.plain: dict[CodeType, dict[str, Any]] = {}

    def remember(self, frame: FrameType | None) -> None:
        while frame is not None:
            if not is_library(frame.f_globals) and frame.f_code.co_name != "<module>":
                self.plain[frame.f_code] = dict(_plain(frame.f_locals, _first(frame.f_code)))
            frame = frame.f_back


def _first(code: CodeType) -> str:
    return code.co_varnames[0] if code.co_argcount else ""


def _plain(own: Mapping[str, Any], first: str) -> Iterator[tuple[str, Any]]:
    """Other objects are not adjusted: the script's own scheduler must be saved as it is."""
    for name, value in own.items():
        if isinstance(value, PLAIN):
            yield name, value
        elif name == first:
            yield from (
                (f"{name}.{key}", each)
                for key, each in getattr(value, "__dict__", {}).items()
                if type(each) is int
            )


@dataclass
class Changes:
    """`names`: variables that are to have another value. `slots`: the same in objects, which must be put
    back."""

    names: dict[str, Any] = field(default_factory=dict)
    slots: list[Slot] = field(default_factory=list)
    _before: list[Slot] = field(default_factory=list)

    def __str__(self) -> str:
        changed = [*self.names.items(), *((slot.key, slot.value) for slot in self.slots)]
        return ", ".join(f"{name}={value!r}" for name, value in changed)

    def __bool__(self) -> bool:
        return bool(self.names or self.slots)

    def apply(self) -> None:
        self._before = [slot.fill() for slot in self.slots]

    def undo(self) -> None:
        for slot in reversed(self._before):
            slot.fill()


def back(point: Point, chain: list[Scope], memory: Memory) -> Changes:
    """For a point that is not passed at every step."""
    at = next(index for index, scope in enumerate(chain) if scope.code == point.scope.code)
    anchor, inner = chain[at], chain[:at][::-1]
    past = Past()
    since = since_save.since(point, anchor)
    if since.called_again:
        _outside(chain[at + 1 :], past)
    past.step(anchor, since.loop, since.statements, memory.plain.get(anchor.code, {}))
    for scope in inner:  # what they have done before their loops
        past.step(scope, None, since_save.before_loops(scope), {})
    changed = {node.attr for scope in [anchor, *inner] for node in since_save.stored_in_loops(scope)}
    changes = Changes(
        {name: value for name, value in past.of(anchor).items() if name.isidentifier()}, past.slots()
    )
    for text, value in memory.plain.get(anchor.code, {}).items():
        name, _, attribute = text.partition(".")
        owner = anchor.own.get(name)
        if (
            attribute
            and attribute not in changed
            and not past.knows(owner, attribute)
            and getattr(owner, attribute, value) != value
        ):
            changes.slots.append(Slot(owner, attribute, value))
    return changes


def _outside(chain: list[Scope], past: Past) -> None:
    """The save point is passed once in each call of the function: what counts is the loop that calls it."""
    if not chain:
        return
    scope = chain[0]
    since = since_save.around_call(scope)
    if since.called_again:
        _outside(chain[1:], past)
    past.step(scope, since.loop, since.statements, {})
