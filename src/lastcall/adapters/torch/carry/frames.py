"""The frames of the user's script above a call into lastcall, and their variables: read, and written.

Python 3.13 lets a frame's variables be written through `f_locals`; before, that is a copy, which one C
function writes back (what debuggers use). Whether it works here is tried out once, on a frame of our own.
"""

from __future__ import annotations

import ctypes
import functools
import inspect
import os
import site
import sys
import sysconfig
from collections.abc import Iterable, Iterator, Mapping
from types import CodeType, FrameType, FunctionType, ModuleType
from typing import Any

from lastcall.script.source import scopes

_HELD = 4  # references to a frame's own dict: the frame, its reader, _forget() and getrefcount()
_MODULES = 32  # of the user's that are looked at
_PROXIED = sys.version_info >= (3, 13)
_PACKAGE = os.path.dirname(os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))


def of_script(frame: FrameType | None) -> Iterator[FrameType]:
    """The script's own frames, from the innermost on. Those of libraries between them (tqdm around a loop)
    are passed over."""
    while frame is not None:
        if is_script(frame):
            yield frame
        frame = frame.f_back


def is_script(frame: FrameType) -> bool:
    if scopes.is_library(frame.f_globals):
        return False
    return _is_script(frame.f_code.co_filename) or _package(frame) in _installed


def belongs(frame: FrameType | None) -> None:
    """Who enters the block is the script, wherever it is installed: so is the rest of its package."""
    while frame is not None and scopes.is_library(frame.f_globals):
        frame = frame.f_back
    if frame is not None:
        _installed.add(_package(frame))


_installed: set[str] = set()


def _package(frame: FrameType) -> str:
    return str(frame.f_globals.get("__package__") or frame.f_globals.get("__name__", "")).partition(".")[0]


def is_own(module: str) -> bool:
    """Whether a module is the user's, and no library's."""
    package = module.partition(".")[0]
    if package in scopes.LIBRARIES:
        return False
    if package in _installed:
        return True
    filename = getattr(sys.modules.get(module), "__file__", None)
    return filename is None or _is_script(filename)


def is_own_code(code: CodeType) -> bool:
    return _is_script(code.co_filename)


@functools.lru_cache(maxsize=1024)
def _is_script(filename: str) -> bool:
    path = os.path.abspath(filename)
    return not any(path.startswith(folder + os.sep) for folder in _libraries())


@functools.cache
def _libraries() -> tuple[str, ...]:
    paths = sysconfig.get_paths()
    found = {
        paths["stdlib"],
        paths["platstdlib"],
        paths["purelib"],
        paths["platlib"],
        *site.getsitepackages(),
        _PACKAGE,
    }
    return tuple(sorted(os.path.abspath(path) for path in found))


Space = tuple[dict[str, Any], CodeType]  # the globals of a module, and some code of it


def space(frame: FrameType) -> Space:
    return frame.f_globals, frame.f_code


def spaces(begun: Iterable[Space]) -> list[Space]:
    """These, and those of the user's modules that they import."""
    found = {id(own): (own, code) for own, code in begun}
    waiting = [own for own, _ in found.values()]
    while waiting and len(found) < _MODULES:
        for value in list(waiting.pop().values()):
            named = value.__name__ if isinstance(value, ModuleType) else getattr(value, "__module__", None)
            module = sys.modules.get(named) if isinstance(named, str) and is_own(named) else None
            if module is None or id(own := vars(module)) in found:
                continue
            code = _some_code(own)
            if code is not None and is_own_code(code):
                found[id(own)] = (own, code)
                waiting.append(own)
    return list(found.values())


def _some_code(own: dict[str, Any]) -> CodeType | None:
    """Of a function or a method that was defined in this module."""
    for value in list(own.values()):
        for each in (value, *(vars(value).values() if isinstance(value, type) else ())):
            if isinstance(each, FunctionType) and each.__globals__ is own:
                return each.__code__
    return None


def is_module(frame: FrameType) -> bool:
    """Whether its variables live in a dict: a module, a notebook's cell."""
    return not frame.f_code.co_flags & inspect.CO_OPTIMIZED


def variables(frame: FrameType) -> Mapping[str, Any]:
    """A copy of its variables. Before 3.13 the interpreter keeps one of its own in the frame, which would
    keep the last batch and its graph in memory: emptied at once."""
    found = frame.f_locals
    if _PROXIED or is_module(frame):
        return dict(found)
    copy = dict(found)
    _forget(found)
    return copy


def _forget(found: dict[str, Any]) -> None:
    if sys.getrefcount(found) <= _HELD:  # otherwise it is what locals() has given the script
        found.clear()


def write(frame: FrameType, values: Mapping[str, Any]) -> None:
    if not values:
        return
    own = frame.f_locals
    for name, value in values.items():
        own[name] = value
    if not _PROXIED and not is_module(frame):
        ctypes.pythonapi.PyFrame_LocalsToFast(ctypes.py_object(frame), ctypes.c_int(0))
        _forget(own)


@functools.cache
def writable() -> bool:
    """Whether variables of functions can be written on this Python."""

    def outer() -> tuple[int, int]:
        plain, cell = 1, 1

        def inner() -> int:
            write(sys._getframe(1), {"plain": 2, "cell": 2})
            return cell

        return plain + inner() - 1, plain * cell

    try:
        return outer()[1] == 4
    except Exception:  # another Python than CPython
        return False


def place(code: CodeType, line: int) -> str:
    return f"{os.path.basename(code.co_filename)}:{line}"
