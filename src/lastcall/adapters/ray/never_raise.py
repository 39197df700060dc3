"""Nothing of ours is raised into Ray or into the script: a run without protection is better than none."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any, TypeVar

log = logging.getLogger("lastcall")
_Method = TypeVar("_Method", bound=Callable[..., Any])


def never_raises(method: _Method) -> _Method:
    """An exception is logged, and None is returned. Only for methods that return nothing, or may."""

    @functools.wraps(method)
    def guarded(self: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return method(self, *args, **kwargs)
        except Exception:
            log.exception("lastcall failed in %s; the run continues", method.__name__.lstrip("_"))
            return None

    return guarded  # type: ignore[return-value]
