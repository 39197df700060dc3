from __future__ import annotations

import inspect
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from lastcall.core.process import patching


class Theirs:
    def double(self, value: int, *, plus: int = 0) -> int:
        """Theirs."""
        return 2 * value + plus


def negative(original: Any) -> Callable[..., int]:
    def negated(*args: Any, **kwargs: Any) -> int:
        return -int(original(*args, **kwargs))

    return negated


def test_a_method_is_wrapped_once_however_often_it_is_asked_for() -> None:
    kind = type("Kind", (Theirs,), {"double": Theirs.double})
    for _ in range(3):
        patching.wrap(kind, "double", negative)
    assert kind().double(4, plus=1) == -9  # type: ignore[attr-defined]
    assert Theirs().double(4) == 8


def test_it_looks_as_it_did_to_those_that_look() -> None:
    kind: Any = type("Kind", (Theirs,), {"double": Theirs.double})
    patching.wrap(kind, "double", negative)
    assert kind.double.__name__ == "double" and kind.double.__doc__ == "Theirs."
    assert inspect.signature(kind.double) == inspect.signature(Theirs.double)


def test_a_class_whose_base_was_patched_is_left_alone() -> None:
    base: Any = type("Base", (Theirs,), {"double": Theirs.double})
    patching.wrap(base, "double", negative)
    derived: Any = type("Derived", (base,), {})
    patching.wrap(derived, "double", negative)
    assert derived().double(4) == -8 and "double" not in vars(derived)


def test_a_function_of_a_module() -> None:
    module: Any = SimpleNamespace(double=lambda value: 2 * value)
    patching.wrap(module, "double", negative)
    assert module.double(4) == -8
