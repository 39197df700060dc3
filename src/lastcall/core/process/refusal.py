"""A start that fails: one sentence instead of a traceback, and an exit code that says whether running it
again can help.

What protect() raises on purpose says what happened and what to do; twenty lines of our own frames above it
hide that. The traceback stays with LASTCALL_LOG_LEVEL=DEBUG, and for every other exception. Code that catches
the error sees no difference.
"""

from __future__ import annotations

import contextlib
import logging
import sys
from collections.abc import Iterator
from types import TracebackType

from lastcall import errors, settings
from lastcall.core.process import exits, registry

log = logging.getLogger("lastcall")
_MARK = "_lastcall_refusal"
_former = sys.excepthook


@contextlib.contextmanager
def explained() -> Iterator[None]:
    """An error that is raised in here ends a start."""
    try:
        yield
    except errors.LastcallError as error:
        explain(error)
        raise


def explain(error: BaseException) -> None:
    """This error ends a start, if it is not caught."""
    global _former
    if not isinstance(error, errors.LastcallError) or isinstance(error, SystemExit):
        return
    if not hasattr(error, _MARK):
        # now: at the end the log is no longer ours to show
        setattr(error, _MARK, log.isEnabledFor(logging.DEBUG))
    if sys.excepthook is not _hook:
        _former, sys.excepthook = sys.excepthook, _hook


def _hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    traced = getattr(error, _MARK, None)
    if traced is None or not isinstance(error, errors.LastcallError):
        _former(kind, error, trace)
        return
    if traced:
        _former(kind, error, trace)
    elif sys.stderr is not None:
        sys.stderr.write(f"lastcall: {kind.__name__}: {error}\n")
    if error.exit_code == errors.EXIT_CONFIG:
        if (folder := settings.registry_folder()) is not None:
            registry.refuse(folder, f"{kind.__name__}: {error}")
        exits.insist(error.exit_code)
