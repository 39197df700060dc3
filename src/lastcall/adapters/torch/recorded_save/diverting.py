"""torch.save and safetensors' save_file, diverted on the threads that ask for it.

A function is replaced wherever a module has it under whatever name (`from safetensors.torch import save_file
as safe_save_file`). The replacement hands every call of any other thread on to the function itself, so a
module that takes hold of it while it is in place loses nothing when it is gone again.

Discarded: replacing `__code__` of the functions, which reaches partials and closures too: a traceback through
them, a debugger or another library that wraps the same function would meet code that is not theirs.
"""

from __future__ import annotations

import functools
import os
import sys
import threading
from collections.abc import Callable
from types import FunctionType
from typing import Any, Protocol


class Taker(Protocol):
    """Who is asked first. True: it took the call, and nothing is written. False: the function itself is
    called."""

    def take_pickle(self, path: str, obj: object) -> bool: ...

    def take_tensors(self, path: str, tensors: object, metadata: object) -> bool: ...


_lock = threading.Lock()
_mine = threading.local()
_users = 0
# a function: what stands for it. Kept: somebody may hold either
_doubles: dict[Callable[..., Any], Callable[..., Any]] = {}
_places: list[tuple[dict[str, Any], str]] = []  # where modules have them
# ids of the modules' dicts in which they were looked for: all modules take 20 ms, new ones none
_searched: set[int] = set()


def begin(taker: Taker) -> None:
    global _users
    with _lock:
        _search()
        _users += 1
        for namespace, name in _places:
            value = namespace.get(name)
            if isinstance(value, FunctionType) and value in _doubles:
                namespace[name] = _doubles[value]
    _takers().append(taker)


def end(taker: Taker) -> None:
    """By the same thread. What somebody else has put in the place of ours stays."""
    global _users
    _takers().remove(taker)
    with _lock:
        _users -= 1
        if _users:
            return
        originals = {double: original for original, double in _doubles.items()}
        for namespace, name in _places:
            value = namespace.get(name)
            if isinstance(value, FunctionType) and value in originals:
                namespace[name] = originals[value]


def _takers() -> list[Taker]:
    found: list[Taker] = _mine.__dict__.setdefault("takers", [])
    return found


def _search() -> None:
    """Look for the functions, and for their doubles, that modules have got since the last time."""
    for home, name, make in (
        ("torch.serialization", "save", _pickling),
        ("safetensors.torch", "save_file", _storing),
    ):
        function = getattr(sys.modules.get(home), name, None)
        if (
            isinstance(function, FunctionType)
            and function not in _doubles
            and function not in _doubles.values()
        ):
            _doubles[function] = make(function)
            _searched.clear()
            _places.clear()
    wanted = {id(function) for pair in _doubles.items() for function in pair}
    for module in list(sys.modules.values()):
        namespace = getattr(module, "__dict__", None)
        if type(namespace) is not dict or id(namespace) in _searched:
            continue
        _searched.add(id(namespace))
        if wanted.isdisjoint(map(id, list(namespace.values()))):
            continue
        _places.extend((namespace, name) for name, value in list(namespace.items()) if id(value) in wanted)


def _pickling(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def save(obj: object, f: Any, *args: Any, **kwargs: Any) -> Any:
        # Options ask for another pickler or the old format: theirs to write.
        if not args and not kwargs and (path := _path(f)) is not None:
            for taker in reversed(_takers()):
                if taker.take_pickle(path, obj):
                    return None
        return original(obj, f, *args, **kwargs)

    return save


def _storing(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def save_file(tensors: object, filename: Any, metadata: object = None, **kwargs: Any) -> Any:
        if not kwargs and (path := _path(filename)) is not None:
            for taker in reversed(_takers()):
                if taker.take_tensors(path, tensors, metadata):
                    return None
        return original(tensors, filename, metadata, **kwargs)

    return save_file


def _path(file: object) -> str | None:
    """The real path that is meant, where one is: not for open files."""
    return os.path.realpath(os.fsdecode(file)) if isinstance(file, (str, bytes, os.PathLike)) else None
