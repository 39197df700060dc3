"""Whether a function can run on its own: only its text reaches the pod, where a missing name would be noticed
an hour later."""

from __future__ import annotations

import builtins
import dis
import inspect
from collections.abc import Callable, Iterator, Mapping
from types import CodeType
from typing import Any

_READS = ("LOAD_GLOBAL", "LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS")
_WRITES = ("STORE_GLOBAL", "STORE_NAME")


def check_kind(func: Any) -> None:
    """ValueError if it is not a function, or if calling it would not run it."""
    name = getattr(func, "__name__", "")
    if not inspect.isfunction(func) or not name.isidentifier():
        raise ValueError(f"func={func!r} is not a named function. It is sent as text: write it with def")
    if inspect.unwrap(func) is not func:
        raise ValueError(
            f"{name}() is decorated, and the decorator is not sent with it. Apply it inside the function"
        )
    if (
        inspect.iscoroutinefunction(func)
        or inspect.isgeneratorfunction(func)
        or inspect.isasyncgenfunction(func)
    ):
        raise ValueError(
            f"{name}() does nothing when it is called: it is async, or a generator. Write one "
            "that trains and returns"
        )
    if func.__code__.co_freevars:
        names = ", ".join(func.__code__.co_freevars)
        raise ValueError(
            f"{name}() uses {names} of the enclosing function, which is not sent with it. Pass "
            "it in func_args"
        )


def check_names(func: Callable[..., Any], source: str) -> None:
    """ValueError if it uses names of its module: in its body, as the default of an argument, or as a
    decorator.

    Annotations may: they are not evaluated in the pod.
    """
    flags = annotations.compiler_flag  # what the import above has brought
    names = _Names(compile(source, "<func>", "exec", flags=flags, dont_inherit=True))
    known = getattr(func, "__globals__", {})
    missing = sorted(name for name in names.read - names.written if name in known and not _everywhere(name))
    if missing:
        raise ValueError(
            f"{func.__name__}() uses {', '.join(missing)} of its module or notebook, which is not sent. "
            "Import or "
            "define it inside the function, or pass it in func_args"
        )


def check_call(func: Callable[..., Any], args: Mapping[str, Any]) -> None:
    """ValueError if it cannot be called with these keyword arguments."""
    try:
        inspect.signature(func).bind(**args)
    except TypeError as error:
        raise ValueError(
            f"func_args={dict(args)!r}: {func.__name__}{inspect.signature(func)} cannot be called like that: "
            f"{error}"
        ) from None


class _Names:
    """Those that a text reads and writes outside of the functions in it."""

    def __init__(self, code: CodeType) -> None:
        steps = [step for part in _parts(code) for step in dis.get_instructions(part)]
        self.read = {str(step.argval) for step in steps if step.opname in _READS}
        self.written = {str(step.argval) for step in steps if step.opname in _WRITES}


def _parts(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _parts(constant)


def _everywhere(name: str) -> bool:
    return hasattr(builtins, name) or (name.startswith("__") and name.endswith("__"))
