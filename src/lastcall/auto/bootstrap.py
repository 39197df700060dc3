"""Enables lastcall in a Python process that does not use it explicitly. Runs in every such process, before
its first line.

Two ways lead here, and both may be open at once: `lastcall-auto.pth` in site-packages, and
`site/sitecustomize.py` on the PYTHONPATH that `lastcall run` sets. The only effect is a finder that waits for
the modules in PATCHES to be imported.

This may run in a compiler, a server or a test suite. So nothing is imported that the interpreter has not
already loaded (typing alone takes longer than all of this), and a failure here is a warning on stderr, never
an exception.
"""

import atexit
import os
import sys

from lastcall.auto import imports

# Module to wait for -> "module:function" of ours, called with that module right after its import.
PATCHES = {
    "torch.distributed.elastic.multiprocessing.api": "lastcall.auto.torchrun:apply",
    "torch.distributed.rendezvous": "lastcall.auto.attempts:apply",
    "torch.distributed.elastic.rendezvous.dynamic_rendezvous": "lastcall.auto.attempts:tell",
    "transformers.trainer": "lastcall.adapters.transformers.patch:protect_all",
    "accelerate.accelerator": "lastcall.adapters.accelerate.auto:protect_all",
}
# If only Ray's own variable enables lastcall, only Ray Train is patched: a Trainer outside of Ray stays
# unchanged.
RAY = {
    "ray.train.v2.api.data_parallel_trainer": "lastcall.adapters.ray.driver.patch:protect_all",
    "ray.tune.execution.class_cache": "lastcall.adapters.ray.driver.tune:hand_on",
}

_ON = ("1", "true", "yes", "on")
_OFF = ("", "0", "false", "no", "off")

_started = False


def start() -> None:
    """Start, once in a process, if LASTCALL_ENABLED is set, or for Ray Train alone
    RAY_TRAIN_JIT_CHECKPOINT_ENABLED."""
    global _started
    try:
        if not _started:
            _started = True
            table = _table()
            if table:
                imports.Finder(table).install()
                if os.environ.get("LASTCALL_REGISTRY"):
                    atexit.register(_look_back, os.getpid())
    except Exception as error:
        imports.warn(f"not enabled in this process: {type(error).__name__}: {error}")


def _look_back(process: int) -> None:
    """The interpreter keeps an uncaught exception: a program that could not start reports it to `lastcall
    run`."""
    error = getattr(sys, "last_value", None)
    if isinstance(error, (ImportError, SyntaxError)) and os.getpid() == process:
        from lastcall.auto import refusals

        refusals.tell(f"{type(error).__name__}: {error}")


def _table() -> dict[str, str]:
    """Unset means off here, unlike in protect(), whose caller has asked for protection."""
    own = _says("LASTCALL_ENABLED")
    if own is not None:
        return {**PATCHES, **RAY} if own else {}
    return RAY if _says("RAY_TRAIN_JIT_CHECKPOINT_ENABLED") else {}


def _says(name: str) -> "bool | None":
    text = os.environ.get(name, "")
    word = text.strip().lower()
    if word not in _ON + _OFF:
        imports.warn(
            f"{name}={text!r} is neither yes nor no, so it counts as no. Set it to 1 or 0: export {name}=1"
        )
    return word in _ON if word else None
