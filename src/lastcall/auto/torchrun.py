"""Gives the workers of torchrun the whole grace.

torchrun sends SIGTERM and kills after a timeout. `--shutdown-timeout` and TORCH_ELASTIC_SHUTDOWN_TIMEOUT
reach only one of the ways there, the signal to the agent itself. When one worker ends first (it got the
signal first, it saved faster, it died) or when the group is restarted, the others get the default argument of
`PContext.close`, 30 seconds, whatever was asked for (torch 2.4 to 2.13). All of them go through that one
method of the base class, so only that is wrapped here.
"""

from __future__ import annotations

import inspect
import math
import os
import signal
from collections.abc import Mapping
from types import ModuleType
from typing import Any

from lastcall import settings
from lastcall.auto import imports
from lastcall.core.process import patching

MARGIN_SECONDS = 5.0  # a worker that got the signal within the grace is exiting when it ends


def apply(module: ModuleType) -> None:
    """For torch.distributed.elastic.multiprocessing.api. A torch whose method looks different is left
    unpatched."""
    context: Any = getattr(module, "PContext", None)
    signature = _signature(getattr(context, "close", None))
    if signature is None:
        imports.warn(
            f"{module.__name__}.PContext.close of this torch version has no timeout that lastcall can set: "
            "torchrun may kill workers before their grace ends. Keep saves under 30 s, or report the torch "
            "version"
        )
        return

    def patient(close: Any) -> Any:
        def closed(*args: Any, **kwargs: Any) -> Any:
            call = signature.bind(*args, **kwargs)
            call.apply_defaults()
            timeout = call.arguments["timeout"]
            if isinstance(timeout, int | float) and call.arguments.get("death_sig") != signal.SIGKILL:
                call.arguments["timeout"] = max(timeout, least_seconds(os.environ))
            return close(*call.args, **call.kwargs)

        return closed

    patching.wrap(context, "close", patient)


def least_seconds(environ: Mapping[str, str]) -> float:
    """How long a worker may take to end after the signal.

    The grace and a margin; TORCH_ELASTIC_SHUTDOWN_TIMEOUT where that is longer. If only the latter is set,
    exactly that, because it was set on purpose. An invalid value counts as not set: the workers report what
    is wrong with it.
    """
    grace = _seconds(environ.get("LASTCALL_GRACE_SECONDS"))
    elastic = _seconds(environ.get("TORCH_ELASTIC_SHUTDOWN_TIMEOUT"))
    if grace is None and elastic is not None:
        return elastic
    return max((_default_grace() if grace is None else grace) + MARGIN_SECONDS, elastic or 0.0)


def _default_grace() -> float:
    (default,) = (setting.default for setting in settings.JIT if setting.field == "grace")
    assert isinstance(default, float)
    return default


def _seconds(text: str | None) -> float | None:
    try:
        number = float(text or "")
    except ValueError:
        return None
    return number if math.isfinite(number) and number > 0 else None


def _signature(close: Any) -> inspect.Signature | None:
    """Of a method with a timeout in seconds, else None."""
    try:
        signature = inspect.signature(close)
        default = signature.parameters["timeout"].default
    except (TypeError, ValueError, KeyError):
        return None
    return signature if isinstance(default, int | float) and not isinstance(default, bool) else None
