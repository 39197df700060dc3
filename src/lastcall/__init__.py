"""lastcall: just-in-time checkpointing for training runs that can be preempted at any time.

Importing this package costs milliseconds and changes nothing: no handler, no thread, no framework.
"""

from __future__ import annotations

TYPE_CHECKING = False  # importing typing costs 3 ms and more, in every Python process below `lastcall run`
if TYPE_CHECKING:
    from typing import Any

    from lastcall import dcp as dcp
    from lastcall.adapters.torch.run import Run, protect
    from lastcall.errors import (
        BusyError,
        CheckpointError,
        ConfigError,
        LastcallError,
        MismatchError,
        Preempted,
        SaveError,
        StateError,
    )
    from lastcall.settings import JITCheckpointConfig, PeriodicCheckpointConfig

__version__ = "0.1.0"

__all__ = [
    "BusyError",
    "CheckpointError",
    "ConfigError",
    "JITCheckpointConfig",
    "LastcallError",
    "MismatchError",
    "PeriodicCheckpointConfig",
    "Preempted",
    "Run",
    "SaveError",
    "StateError",
    "__version__",
    "protect",
]
_MODULES = ("dcp", "kubeflow", "ray", "transformers")  # each needs its framework: not part of `import *`

_HOMES = {
    "protect": "lastcall.adapters.torch.run",
    "Run": "lastcall.adapters.torch.run",
    "JITCheckpointConfig": "lastcall.settings",
    "PeriodicCheckpointConfig": "lastcall.settings",
}


def __getattr__(name: str) -> Any:
    if name not in __all__ and name not in _MODULES:
        raise AttributeError(f"module 'lastcall' has no attribute {name!r}")
    import importlib

    if name in _MODULES:
        return importlib.import_module(f"lastcall.{name}")
    home = _HOMES.get(name, "lastcall.errors")
    try:
        module = importlib.import_module(home)
    except ModuleNotFoundError as error:
        if error.name in ("torch", "numpy"):
            from lastcall import installing

            raise ImportError(installing.missing(f"lastcall.{name}", error.name, "torch")) from error
        raise
    return getattr(module, name)


def __dir__() -> list[str]:
    """The available names: help(), pydoc and inspect access every name listed here."""
    from importlib.util import find_spec

    without_torch = () if find_spec("torch") and find_spec("numpy") else ("protect", "Run")
    return sorted(name for name in __all__ if name not in without_torch)
