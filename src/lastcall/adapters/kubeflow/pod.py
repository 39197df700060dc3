"""What runs in the pod, once in each rank: the training function, as if it were defined in the script itself.

Nothing is imported here that the function does not import itself: it may still set the environment for torch
and transformers. The SDK is not installed, and is not needed.
"""

from __future__ import annotations

import ast
import base64
import json
import logging
import os
import zlib
from pathlib import Path
from typing import Any

from lastcall.adapters.transformers import listeners
from lastcall.storage import files as storage

log = logging.getLogger("lastcall")


def run(script: dict[str, Any], text: str) -> None:
    """Unpack the function into the script, where it would be had the SDK written it there, and call it.

    A child that multiprocessing spawns reads the script again, under another name: it gets the function, and
    does not train.
    """
    name, source, arguments = unpacked(text)
    path = _written(os.path.abspath(script.get("__file__", "script.py")), name, source)
    exec(compile(source, path, "exec"), script)
    if script["__name__"] != "__main__":
        return
    if announce not in listeners.begun:
        listeners.begun.append(announce)
    script[name](**arguments)


def unpacked(text: str) -> tuple[str, str, dict[str, Any]]:
    whole = json.loads(zlib.decompress(base64.b64decode(text)))
    return whole["name"], whole["source"], ast.literal_eval(whole["args"])


def announce(run: Any) -> None:
    """The lines that OpenShift AI's documentation tells people to look for, when they are true."""
    if run.listening:
        log.info("[Kubeflow] JIT checkpoint signal handler registered for %s", ", ".join(run.jit.signals))
        log.info("[Kubeflow] JIT checkpointing enabled")
    else:
        log.info("[Kubeflow] JIT checkpointing disabled: signals are not handled")
    log.info("[Kubeflow] output_dir: %s", run.root)
    if run.resumed is not None:
        log.info("[Kubeflow] Auto-resuming from checkpoint-%d", run.resumed)


def _written(script: str, name: str, source: str) -> str:
    """The source as a file beside the script, for tracebacks and `inspect`. Ranks write the same, each with
    one rename."""
    path = os.path.join(os.path.dirname(script), f"kubeflow_{name}.py")
    try:
        storage.replace_small(Path(path), source.encode())
    except OSError as error:
        log.debug(
            "Could not write the training function to a file (%s): tracebacks will not show its lines", error
        )
    return path
