"""A framework's own save runs on a side thread while the training thread continues: what must be otherwise
for the one must stay as it is for the other. So what is put in a name's place answers for one thread, and
hands every other on to what was there."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

from lastcall import errors

_NOTHING: Any = object()
_one_at_a_time = threading.Lock()
_PATIENCE = 5.0  # seconds


@contextlib.contextmanager
def recording_alone() -> Iterator[None]:
    """One thread at a time records: each puts back what it found. The training thread's save at a boundary
    and a rescue may meet."""
    if not _one_at_a_time.acquire(timeout=_PATIENCE):
        raise errors.SaveError("the framework's own save, which was started earlier, does not end")
    try:
        yield
    finally:
        _one_at_a_time.release()


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
    """The property or plain attribute `name` of the objects of a class has the value `answer` for the thread
    `owner`."""
    home = next((base for base in kind.__mro__ if name in vars(base)), kind)
    original = vars(home).get(name, _NOTHING)

    def get(self: Any) -> Any:
        if threading.get_ident() == owner:
            return answer
        return (
            original.fget(self)
            if isinstance(original, property) and original.fget
            else vars(self).get(name, original)
        )

    def put(self: Any, value: Any) -> None:
        vars(self)[name] = value

    setattr(home, name, property(get, put))
    try:
        yield
    finally:
        if original is _NOTHING:
            delattr(home, name)
        else:
            setattr(home, name, original)
