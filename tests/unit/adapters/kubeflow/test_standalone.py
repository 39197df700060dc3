"""What a function needs from around it is found out when the trainer is made, and not in the pod."""

from __future__ import annotations

import functools
import json as texts
from collections.abc import Callable
from typing import Any, Optional

import pytest

from lastcall.adapters.kubeflow import function_text, pod, standalone

RATE = 0.1


def helper() -> float:
    return RATE


def uses_a_constant() -> float:
    return RATE


def uses_a_module() -> str:
    return texts.dumps({})


def uses_a_helper() -> float:
    return helper()


def uses_one_deep_inside() -> list[float]:
    class Inner:
        def rates(self) -> list[float]:
            return [(lambda: RATE)() for _ in range(3)]

    return Inner().rates()


def uses_one_as_a_default(rate: float = RATE) -> float:
    return rate


def registered(func: Any) -> Any:
    return func


@registered
def uses_a_decorator() -> None:
    pass


def wrapped(func: Any) -> Any:
    @functools.wraps(func)
    def wrapper(*args: Any) -> Any:
        return func(*args)

    return wrapper


@wrapped
def is_wrapped() -> None:
    pass


async def is_async() -> None:
    pass


def yields() -> Any:
    yield 1


@pytest.mark.parametrize(
    ("func", "why"),
    [
        (uses_a_constant, "uses RATE of its module"),
        (uses_a_module, "uses texts of its module"),
        (uses_a_helper, "uses helper of its module"),
        (uses_one_deep_inside, "uses RATE of its module"),
        (uses_one_as_a_default, "uses RATE of its module"),
        (uses_a_decorator, "uses registered of its module"),
        (is_wrapped, r"is_wrapped\(\) is decorated"),
        (is_async, "does nothing when it is called"),
        (yields, "does nothing when it is called"),
    ],
)
def test_what_would_be_missing_in_the_pod_is_named(func: Callable[..., Any], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        function_text.source_of(func)


def stands_alone(rate: Optional[float] = None, *more: texts.JSONEncoder) -> Any:  # noqa: UP045
    """Annotations are nobody's business in the pod; the rest is its own, built in, or like a global name
    without being one."""
    import json
    from types import SimpleNamespace

    global made_here
    made_here = 3  # type: ignore[name-defined]
    texts = SimpleNamespace(RATE=len("four"))

    class Inner:
        size = 2
        double = size * 2

    def again(left: int) -> Any:
        return stands_alone if left < 0 else again(left - 1)

    total = sum(value for value in range(texts.RATE)) + made_here + Inner.double  # type: ignore[name-defined]
    return json.dumps([total, rate, __name__, again(1).__name__])


def test_one_that_stands_alone_arrives_and_runs() -> None:
    name, source, arguments = pod.unpacked(function_text.packed(stands_alone, {"rate": 0.5}))
    script: dict[str, Any] = {"__name__": "__main__"}
    exec(compile(source, "x", "exec", flags=annotations.compiler_flag), script)
    assert texts.loads(script[name](**arguments)) == [13, 0.5, "__main__", "stands_alone"]


@pytest.mark.parametrize(
    ("args", "why"),
    [
        ({}, "missing a required argument: 'a'"),
        ({"a": 1, "c": 2}, "unexpected keyword argument 'c'"),
        ({"a": 1, 5: 2}, "keywords must be strings"),
    ],
)
def test_arguments_that_do_not_fit_are_told_with_what_would(args: dict[str, Any], why: str) -> None:
    def train(a: int, b: int = 1) -> None: ...

    standalone.check_call(train, {"a": 1})
    with pytest.raises(ValueError, match=rf"train\(a.* cannot be called like that: .*{why}"):
        standalone.check_call(train, args)
