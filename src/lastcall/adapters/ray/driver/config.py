"""Protection that is switched on in code: RunConfig(jit_checkpoint_config=JITCheckpointConfig(enabled=True)).
The environment wins, and is the better way: it needs no change of the code."""

from __future__ import annotations

import functools
import importlib
import warnings
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import ray.train

from lastcall import script as scripts
from lastcall import settings
from lastcall.adapters.ray.callback import JITCallback, reduced
from lastcall.adapters.ray.driver import patch

_ARGUMENT = "jit_checkpoint_config"
_MARK = "_lastcall_original"
_TRAINER = "ray.train.v2.api.data_parallel_trainer"


@dataclass(frozen=True, init=False)
class JITCheckpointConfig(settings.JITCheckpointConfig):
    """lastcall's own, with the default that it has in Ray: off, unless `enabled=True` is given."""

    def __init__(self, enabled: bool | None = None, kill_wait: float | None = None, **more: Any) -> None:
        super().__init__(enabled, kill_wait, **more)
        if self.origins()["enabled"] == "default":
            object.__setattr__(self, "enabled", False)

    def __reduce__(self) -> tuple[Any, ...]:
        """It travels in the RunConfig, also to machines without lastcall."""
        return reduced(
            type(self),
            {"environ": {}, **{setting.field: getattr(self, setting.field) for setting in settings.JIT}},
        )


class RunConfig(ray.train.RunConfig):  # type: ignore[misc]
    """Ray's own, with one argument more. Deprecated in favour of RAY_TRAIN_JIT_CHECKPOINT_ENABLED=1, which
    needs no change of code."""

    def __init__(
        self, *args: Any, jit_checkpoint_config: settings.JITCheckpointConfig | None = None, **kwargs: Any
    ) -> None:
        super().__init__(*args, **kwargs)
        _attach(self, jit_checkpoint_config)


def publish(module: ModuleType) -> None:
    """Fill ray.train._internal.jit_checkpoint_config (auto/alias.py). A script that imports it passes its
    class to Ray's RunConfig, which it may have imported before: so that class itself gets the argument."""
    module.JITCheckpointConfig = JITCheckpointConfig  # type: ignore[attr-defined]
    accept(ray.train.RunConfig)


def accept(run_config: type) -> None:
    original = run_config.__init__  # type: ignore[misc]
    if hasattr(original, _MARK):
        return

    @functools.wraps(original)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        given = kwargs.pop(_ARGUMENT, None)
        original(self, *args, **kwargs)
        _attach(self, given)

    setattr(init, _MARK, original)
    run_config.__init__ = init  # type: ignore[misc]


def _attach(run_config: Any, given: settings.JITCheckpointConfig | None) -> None:
    run_config.jit_checkpoint_config = given
    if given is None:
        return
    if not isinstance(given, settings.JITCheckpointConfig):
        raise TypeError(
            f"{_ARGUMENT}={given!r} is not a JITCheckpointConfig. Pass JITCheckpointConfig(enabled=True)"
        )
    warnings.warn(
        f"RunConfig({_ARGUMENT}=...) is deprecated: set RAY_TRAIN_JIT_CHECKPOINT_ENABLED=1 and "
        "RAY_TRAIN_JIT_CHECKPOINT_KILL_WAIT instead, without a change to the code",
        DeprecationWarning,
        stacklevel=3,
    )
    jit = over(given)
    if jit.enabled:
        run_config.callbacks = [*run_config.callbacks, JITCallback.of(jit, scripts.gather(None))]
        patch.protect_all(importlib.import_module(_TRAINER))
    elif given.origins()["enabled"] == "default":
        warnings.warn(
            f"RunConfig({_ARGUMENT}=JITCheckpointConfig(...)) without enabled=True does not protect this "
            "run: it is off by default. Pass enabled=True, or: export RAY_TRAIN_JIT_CHECKPOINT_ENABLED=1",
            UserWarning,
            stacklevel=3,
        )


def over(given: settings.JITCheckpointConfig) -> settings.JITCheckpointConfig:
    """The given configuration, with the values that the environment sets."""
    found = settings.JITCheckpointConfig()
    from_environment = {
        name: getattr(found, name) for name, origin in found.origins().items() if origin != "default"
    }
    return settings.changed(given, **from_environment)
