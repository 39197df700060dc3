"""HF's own save, made into files that the core writes: `_save_checkpoint` runs as the trainer's class has it,
aimed at a scratch folder, so that a subclass's extra files, tokenizers, adapters and model cards are all
there. Tensors are not written by it: the Recorder takes note of where they are.

It may run on a side thread, for a rescue. So whatever would reach for another rank, count, rotate or upload
is switched off while it runs, on the thread that runs it and no other; what must be as it was at the boundary
comes from the boundary copy.

A model that is sharded (FSDP, DeepSpeed, tensor parallelism) is saved by all ranks together, each in its
training thread at the agreed boundary, each into a scratch folder of its own: HF's save then does reach for
the other ranks, and what a rank has written is its part.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from transformers import Trainer

from lastcall import errors, memory
from lastcall.adapters.torch import framework
from lastcall.adapters.torch.randomness import rng
from lastcall.adapters.torch.recorded_save.boundary_buffers import BoundaryBuffers
from lastcall.adapters.torch.recorded_save.per_thread import answering, recording_alone, shadowed
from lastcall.adapters.torch.recorded_save.recording import Recorder
from lastcall.types import File, FileLayout

log = logging.getLogger("lastcall")
_WEIGHTS = ("model", "adapter", "pytorch_model", "global_step")  # the last one is DeepSpeed's folder


def record(
    trainer: Any,
    private: Path,
    state: bytes,
    save: Callable[..., Any] | None = None,
    *,
    full: bool = True,
    buffers: BoundaryBuffers | None = None,
) -> tuple[File, ...]:
    """The files of a checkpoint of this trainer, but that of the randomness. `state`: its trainer_state.json;
    `private`: where the scratch folder may lie; `save`: what to call instead of its class's method; `full`:
    with the optimizer and all, also where the script asks for weights only; `buffers`: written as they were
    at a boundary."""
    together = collective(trainer)
    with framework.scratch(private) as scratch:
        with recording_alone():
            found = _recorded(
                trainer,
                save or trainer_save(type(trainer), trainer),
                scratch,
                state,
                lead=not together,
                full=full,
                buffers=buffers,
            )
        _keep_beside([layout for layout in found if "/" not in layout.name], scratch, trainer)
    layouts = [_inside(layout) for layout in found if "/" in layout.name]
    # of FULL_STATE_DICT, and of all that is not sharded, one rank has all
    expected = not together or trainer.args.process_index == 0
    if expected and not any(layout.name.startswith(_WEIGHTS) for layout in layouts):
        raise errors.SaveError(
            "Trainer._save_checkpoint has written no weights, so its checkpoint could not be resumed from"
        )
    return tuple(
        File(layout, shared=not together) for layout in layouts if not layout.name.startswith("rng_state")
    )


def trainer_save(kind: Any, trainer: Any) -> Callable[..., Any]:
    return functools.partial(kind._save_checkpoint, trainer)


def _recorded(
    trainer: Any,
    save: Callable[..., Any],
    scratch: Path,
    state: bytes,
    *,
    lead: bool,
    full: bool,
    buffers: BoundaryBuffers | None,
    last: bool = False,
) -> tuple[FileLayout, ...]:
    """What this trainer's own save writes. One that fails where it is run now (a rescue, another folder)
    gives way to HF's own; not where all ranks save together, since the others would wait for ever for the one
    that starts again."""
    try:
        with Recorder(scratch, buffers) as recorder, _aimed_at(trainer, scratch, state, lead=lead, full=full):
            save(trainer.model_wrapped, None)
        return recorder.files()
    except Exception as error:
        if last or not lead or type(trainer)._save_checkpoint is Trainer._save_checkpoint:
            raise errors.SaveError(
                f"Trainer._save_checkpoint failed: {type(error).__name__}: {error}"
            ) from error
        log.warning("%s._save_checkpoint failed (%r): saving as Trainer does", type(trainer).__name__, error)
        again = scratch / "again"
        again.mkdir()
        return _recorded(
            trainer,
            trainer_save(Trainer, trainer),
            again,
            state,
            lead=lead,
            full=full,
            buffers=buffers,
            last=True,
        )


def _keep_beside(layouts: list[FileLayout], scratch: Path, trainer: Any) -> None:
    """What a class writes beside its checkpoints (a model card) belongs there. It is not part of any of
    them."""
    for layout in layouts if trainer.is_world_process_zero() else ():
        if all(isinstance(extent.source, memory.BytesSource) for extent in layout.extents):
            with contextlib.suppress(OSError):
                shutil.copyfile(scratch / layout.name, Path(trainer.args.output_dir) / layout.name)


def collective(trainer: Any) -> bool:
    """Whether HF's save is one that all ranks do together: then each keeps what it has written, and no side
    thread can do it."""
    return bool(
        trainer.is_deepspeed_enabled
        or trainer.is_fsdp_enabled
        or getattr(trainer, "is_distributed_loading_by_transformers", False)
    )


def randomness_file(rank: int, world: int, randomness: rng.Captured) -> File:
    """rng_state.pth as HF writes it: of this rank, in the forms that the official setters take."""
    found = rng.official(randomness)
    if "cuda" in found and world <= 1:
        found["cuda"] = found["cuda"][torch.cuda.current_device() if torch.cuda.is_available() else 0]
    return framework.pickled("rng_state.pth" if world <= 1 else f"rng_state_{rank}.pth", found)


def _inside(layout: FileLayout) -> FileLayout:
    """Without the folder `checkpoint-N` that HF has put it in."""
    _, _, name = layout.name.partition("/")
    return FileLayout(name, layout.size, layout.extents)


@contextlib.contextmanager
def _aimed_at(trainer: Any, scratch: Path, state: bytes, *, lead: bool, full: bool) -> Iterator[None]:
    owner = threading.get_ident()

    def write_state(path: str) -> None:
        Path(path).write_bytes(state)

    with contextlib.ExitStack() as stack:
        for name, instead in (
            ("_get_output_dir", lambda *args, **kwargs: str(scratch)),
            ("_save_rng_state", lambda *args, **kwargs: None),
            ("_push_from_checkpoint", lambda *args, **kwargs: None),
            ("store_flos", lambda *args, **kwargs: None),
        ):
            stack.enter_context(shadowed(trainer, name, instead, owner))
        stack.enter_context(shadowed(trainer.state, "save_to_json", write_state, owner))
        stack.enter_context(answering(type(trainer.args), "output_dir", str(scratch), owner))
        if full:
            stack.enter_context(answering(type(trainer.args), "save_only_model", False, owner))
        if lead:
            stack.enter_context(framework.leading())
        # Together, one rank writes what is not sharded, also with save_on_each_node: it becomes one
        # checkpoint.
        one = lead or trainer.args.process_index == 0
        stack.enter_context(answering(type(trainer.args), "should_save", one, owner))
        best = trainer.state.best_model_checkpoint
        try:
            yield
        finally:
            trainer.state.best_model_checkpoint = best  # HF has looked for it in the scratch folder
