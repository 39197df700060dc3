"""A function of ours around one of somebody else's class or module, once in a process."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any

_MARK = "_lastcall_original"
_lock = threading.Lock()


def wrap(owner: Any, name: str, make: Callable[[Any], Any]) -> None:
    """Replace `owner.name` by `make(original)`, unless that was done before."""
    with _lock:
        original = getattr(owner, name)
        if not hasattr(original, _MARK):
            wrapper = functools.wraps(original)(make(original))
            setattr(wrapper, _MARK, original)
            setattr(owner, name, wrapper)
