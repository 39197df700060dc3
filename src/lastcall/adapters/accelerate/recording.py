"""Accelerate's own save, made into files that the core writes: `save_state` runs into a scratch folder, hooks of the user's included,
and the Recorder takes note of where the tensors are.

It runs on a copy of the Accelerator, which has its own counters, its own way of naming folders, and, for a rescue, objects with the
state of the boundary. So nothing that the script sees of it changes, on whatever thread it runs.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import io
import itertools
import os
import threading
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerate.state import PartialState  # type: ignore[import-untyped]
from accelerate.utils.constants import RNG_STATE_NAME  # type: ignore[import-untyped]

from lastcall import memory
from lastcall.adapters.accelerate import prepared
from lastcall.adapters.torch import rng
from lastcall.adapters.torch.recording import Recorder
from lastcall.adapters.torch.shadowing import answering, recording_alone, shadowed
from lastcall.storage import files as storage
from lastcall.types import Extent, File, FileLayout

_numbers = itertools.count()


def record(accelerator: Any, private: Path, rank: int, steps: int, randomness: rng.Captured, small: object) -> tuple[File, ...]:
    """The files of save_state(). `steps`: the Accelerator's counter; `small`: the boundary copy, where the live objects may not be
    read; `private`: where the scratch folder may lie."""
    scratch = private / f"scratch-{os.getpid()}-{next(_numbers)}"
    scratch.mkdir(parents=True)
    together = prepared.spread(accelerator)
    try:
        with recording_alone(), Recorder(scratch) as recorder, contextlib.ExitStack() as stack:
            if not together:  # any rank may have to write what they all hold, and none may wait for another here
                owner = threading.get_ident()
                stack.enter_context(answering(PartialState, "is_main_process", True, owner))
                stack.enter_context(answering(PartialState, "is_local_main_process", True, owner))
                stack.enter_context(shadowed(dist, "barrier", lambda *args, **kwargs: None, owner))
            _double(accelerator, small).save_state(str(scratch))
        layouts = recorder.files()
    finally:
        storage.remove_tree(storage.Files(), scratch)
    files = [File(layout, shared=not together) for layout in layouts if not layout.name.startswith(RNG_STATE_NAME)]
    return (*files, randomness_file(rank, steps, randomness))


def randomness_file(rank: int, steps: int, randomness: rng.Captured) -> File:
    """random_states_<rank>.pkl as Accelerate writes it."""
    found = rng.official(randomness)
    states = {"step": steps, "random_state": found["python"]}
    if "numpy" in found:
        states["numpy_random_seed"] = found["numpy"]
    states["torch_manual_seed"] = found["cpu"]
    if "cuda" in found:
        states["torch_cuda_manual_seed"] = found["cuda"]
    stream = io.BytesIO()
    torch.save(states, stream)
    data = stream.getvalue()
    return File(FileLayout(f"{RNG_STATE_NAME}_{rank}.pkl", len(data), (Extent(0, memory.BytesSource(data)),)))


def _double(accelerator: Any, small: object) -> Any:
    double = copy.copy(accelerator)
    double.project_configuration = dataclasses.replace(accelerator.project_configuration, automatic_checkpoint_naming=False)
    if small is not None:
        double._schedulers = prepared.frozen(small, "schedulers", accelerator._schedulers)
        double._custom_objects = prepared.frozen(small, "objects", accelerator._custom_objects)
        double.scaler = prepared.frozen(small, "scalers", [accelerator.scaler])[0]
    return double
