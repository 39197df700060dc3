"""The environment of the command: the user's own, plus variables that tell its processes about the
launcher."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path

from lastcall.launch import store
from lastcall.launch.options import LaunchOptions

_AGENT = "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"
_AGENT_MARGIN = 60.0  # seconds: torchrun must not kill a save that takes slightly too long
_SWITCHES = ("LASTCALL_ENABLED", "RAY_TRAIN_JIT_CHECKPOINT_ENABLED")  # the bootstrap reads only the first


def build(
    options: LaunchOptions, exit_code: int, folder: Path, environ: Mapping[str, str], told: str | None = None
) -> dict[str, str]:
    """`told`: how the store of this launcher is reached, if it has one."""
    built = {**environ, "LASTCALL_REGISTRY": str(folder)}
    # from a launcher above this one: it clears its store without regard to our incarnations
    built.pop(store.VARIABLE, None)
    if told is not None:
        built[store.VARIABLE] = told
    built["LASTCALL_ENABLED"] = _enabled(environ)
    if options.grace_given:
        built["LASTCALL_GRACE_SECONDS"] = f"{options.grace:g}"
    built["LASTCALL_EXIT_CODE"] = str(exit_code)
    built.setdefault(_AGENT, str(math.ceil((options.kill_after or options.grace) + _AGENT_MARGIN)))
    if options.guard:
        built["LASTCALL_GUARD"] = "1"
    if options.guard_steps is not None:
        built["LASTCALL_GUARD_STEPS"] = str(options.guard_steps)
    if options.guard_seconds is not None:
        built["LASTCALL_GUARD_SECONDS"] = f"{options.guard_seconds:g}"
    if options.log_level_given:
        built["LASTCALL_LOG_LEVEL"] = options.log_level
    built.pop("LASTCALL_HANDS_OVER", None)
    if options.resume_args is not None:
        built["LASTCALL_HANDS_OVER"] = "1"
    if options.auto:
        built.update(_bootstrap(built))
    return built


def switched_on(environ: Mapping[str, str]) -> dict[str, str]:
    """The same, with lastcall enabled in the Python programs below, unless it was disabled explicitly."""
    built = {**environ, "LASTCALL_ENABLED": _enabled(environ)}
    return {**built, **_bootstrap(built)}


def _enabled(environ: Mapping[str, str]) -> str:
    return next((value for name in _SWITCHES if (value := environ.get(name, "").strip())), "1")


def _bootstrap(environ: Mapping[str, str]) -> dict[str, str]:
    """The variables that enable lastcall in Python programs without a change to their code."""
    from lastcall.auto import environment as auto

    return auto.additions(environ)
