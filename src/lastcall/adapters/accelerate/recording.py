"""Accelerate's own save, made into files that the core writes: `save_state` runs into a scratch folder, hooks
of the user's included, and the Recorder takes note of where the tensors are.

It runs on a copy of the Accelerator, which has its own counters, its own way of naming folders, and, for a
rescue, objects with the state of the boundary. So nothing that the script sees of it changes, on whatever
thread it runs.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
from pathlib import Path
from typing import Any

from accelerate.state import PartialState  # type: ignore[import-untyped]
from accelerate.utils.constants import RNG_STATE_NAME  # type: ignore[import-untyped]

from lastcall.adapters.accelerate import prepared
from lastcall.adapters.torch import framework
from lastcall.adapters.torch.randomness import rng
from lastcall.adapters.torch.recorded_save.boundary_buffers import BoundaryBuffers
from lastcall.adapters.torch.recorded_save.per_thread import answering, recording_alone
from lastcall.adapters.torch.recorded_save.recording import Recorder
from lastcall.types import File


def record(accelerator: Any, private: Path, small: object, buffers: BoundaryBuffers) -> tuple[File, ...]:
    """The files of save_state(), but that of the randomness. `small`: the boundary copy, where the live
    objects may not be read; `buffers`: those in it; `private`: where the scratch folder may lie."""
    together = prepared.spread(accelerator)
    with framework.scratch(private) as scratch:
        with recording_alone(), Recorder(scratch, buffers) as recorder, contextlib.ExitStack() as stack:
            if not together:
                owner = stack.enter_context(framework.leading())
                stack.enter_context(answering(PartialState, "is_main_process", True, owner))
                stack.enter_context(answering(PartialState, "is_local_main_process", True, owner))
            _double(accelerator, small).save_state(str(scratch))
        layouts = recorder.files()
    return tuple(
        File(layout, shared=not together) for layout in layouts if not layout.name.startswith(RNG_STATE_NAME)
    )


def randomness_file(rank: int, steps: int, randomness: rng.Captured) -> File:
    """random_states_<rank>.pkl as Accelerate writes it. `steps`: the Accelerator's counter."""
    found = rng.official(randomness)
    states = {"step": steps, "random_state": found["python"]}
    if "numpy" in found:
        states["numpy_random_seed"] = found["numpy"]
    states["torch_manual_seed"] = found["cpu"]
    if "cuda" in found:
        states["torch_cuda_manual_seed"] = found["cuda"]
    return framework.pickled(f"{RNG_STATE_NAME}_{rank}.pkl", states)


def _double(accelerator: Any, small: object) -> Any:
    double = copy.copy(accelerator)
    double.project_configuration = dataclasses.replace(
        accelerator.project_configuration, automatic_checkpoint_naming=False
    )
    if small is not None:
        double._schedulers = prepared.frozen(small, "schedulers", accelerator._schedulers)
        double._custom_objects = prepared.frozen(small, "objects", accelerator._custom_objects)
        double.scaler = prepared.frozen(small, "scalers", [accelerator.scaler])[0]
    return double
