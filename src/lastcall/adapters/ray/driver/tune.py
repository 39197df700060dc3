"""Ray Tune: each trial is a process of its own, which starts its own train run and so is a driver itself. It
has the environment of its node, which lacks our variables where only the driver above it has them. Tune
passes on the variables of a list of its own."""

from __future__ import annotations

from typing import Any

from lastcall.settings import JIT

# These belong to one run or one container, and must not be the same for all trials.
_OWN = ("run_id", "directory", "stop_file", "progress_port", "mirror")


def hand_on(module: Any) -> None:
    """For ray.tune.execution.class_cache, from the bootstrap."""
    names = {
        name
        for setting in JIT
        if setting.field not in _OWN
        for name in (setting.variable, setting.alias)
        if name is not None
    }
    module.ENV_VARS_TO_PROPAGATE = set(module.ENV_VARS_TO_PROPAGATE) | names
