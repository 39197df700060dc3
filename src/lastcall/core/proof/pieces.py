"""The pieces of a captured state by their names, each with something to compare: whether two states are the
same, and where not."""

from __future__ import annotations

import ctypes
import json
from collections.abc import Callable, Iterator

from lastcall.core.engine import digest
from lastcall.types import Capture, Source

_SHORT = 40  # characters: a value that is kept as it is, so that a report can show it
_LONG = 64  # items of a list whose items have names of their own
_DEEP = 8
_PIECE = 8 * 1024 * 1024
_GLANCE = 256  # bytes
# Positions, in other words after a resume, and what lastcall has noted for itself.
_UNTOLD = ("doubts", "loaders", "buckets", "world", "step", "epoch", "inside", "loops", "prelude")


def named(capture: Capture, digested: Callable[[Source], str]) -> dict[str, str]:
    """Every piece of the state by its name."""
    names = {f"report.{name}": repr(value) for name, value in capture.metrics.items()}
    for name, value in capture.document.items():
        if name == "run" and isinstance(value, dict):
            value = {key: item for key, item in value.items() if key not in _UNTOLD}
        names.update(_leaves("" if name == "state" else name, value, 0))
    for group in capture.groups:
        for entry in group.entries:
            names[tensor(group.name, entry.name)] = digested(entry.source)
    return names


def tensor(group: str, name: str) -> str:
    return f"{group.removesuffix('.frozen')}.{name}"


def _leaves(path: str, value: object, depth: int) -> Iterator[tuple[str, str]]:
    if isinstance(value, dict) and value.get("$") in ("tensor", "loader"):
        # the bytes are among the groups; a position is written in other words after a resume, and shows in
        # what is trained
        return
    if isinstance(value, dict) and value and depth < _DEEP:
        for key, item in value.items():
            # The tree's own words ("v", "items") are no part of a name that a user knows.
            yield from _leaves(
                path if key in ("v", "items") else f"{path}.{key}".lstrip("."), item, depth + 1
            )
    elif isinstance(value, list) and 0 < len(value) <= _LONG and depth < _DEEP:
        for index, item in enumerate(value):
            yield from _leaves(f"{path}.{index}", item, depth + 1)
    else:
        text = json.dumps(value)
        yield path, text if len(text) <= _SHORT else digest.of(text.encode())


def whole(source: Source) -> str:
    """A digest of every byte."""
    return _over(
        source, [(offset, min(_PIECE, source.nbytes - offset)) for offset in range(0, source.nbytes, _PIECE)]
    )


def glance(source: Source) -> str:
    """A digest of a few bytes at the beginning, in the middle and at the end: cheap, and changed by nearly
    every change."""
    size = source.nbytes
    if size <= 3 * _GLANCE:
        return whole(source)
    return _over(source, [(offset, _GLANCE) for offset in (0, (size - _GLANCE) // 2, size - _GLANCE)])


def _over(source: Source, pieces: list[tuple[int, int]]) -> str:
    buffer = (ctypes.c_char * max((nbytes for _, nbytes in pieces), default=1))()
    view, address = memoryview(buffer).cast("B"), ctypes.addressof(buffer)
    found = []
    for offset, nbytes in pieces:
        source.read_into(address, offset, nbytes)
        found.append(digest.of(view[:nbytes]))
    return found[0] if len(found) == 1 else digest.over(found)
