"""A framework's own save runs on a side thread while the training thread goes on: what must be otherwise for the one must stay as it is
for the other. So what is put in a name's place answers for one thread, and hands every other on to what was there."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any


@contextlib.contextmanager
def shadowed(target: Any, name: str, instead: Callable[..., Any], owner: int) -> Iterator[None]:
    """`target.name` is `instead` for the thread `owner`, and what it was for all others."""
    original = getattr(target, name)
    had = name in vars(target)

    def choose(*args: Any, **kwargs: Any) -> Any:
        return (instead if threading.get_ident() == owner else original)(*args, **kwargs)

    setattr(target, name, choose)
    try:
        yield
    finally:
        if had:
            setattr(target, name, original)
        else:
            delattr(target, name)


@contextlib.contextmanager
def answering(kind: type, name: str, answer: object, owner: int) -> Iterator[None]:
    """The property `name` of the class `kind` has the value `answer` for the thread `owner`."""
    home = next(base for base in kind.__mro__ if name in vars(base))
    original: property = vars(home)[name]
    assert original.fget is not None
    get = original.fget
    setattr(home, name, property(lambda self: answer if threading.get_ident() == owner else get(self)))
    try:
        yield
    finally:
        setattr(home, name, original)
