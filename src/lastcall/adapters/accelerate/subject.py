"""A training loop around an Accelerator as the core sees it: its checkpoints are the files of save_state().

What save_state() does not know, or not as it was at the boundary, is kept as in any run: the position, the
data, the randomness, and the other values that protect() was given.
"""

from __future__ import annotations

import contextlib
import dataclasses
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from lastcall import errors
from lastcall.adapters.accelerate import prepared, recording
from lastcall.adapters.torch.distributed import placement
from lastcall.adapters.torch.framework import FrameworkSubject
from lastcall.adapters.torch.recorded_save.boundary_buffers import BoundaryBuffers
from lastcall.adapters.torch.state.entries import StateSet
from lastcall.core.subject import Loading, Stored
from lastcall.formats import tree
from lastcall.types import Capture, File

# names of files, or of ours
_TAKEN = re.compile(rf"model(_\d+)?|{prepared.HELD}|{prepared.LEDGER}|{prepared.DATA}")


class AcceleratorSubject(FrameworkSubject):
    def __init__(self, accelerator: Any, private: Path, others: dict[str, object]) -> None:
        _check(accelerator, others)
        super().__init__({**prepared.values(accelerator), **others})
        _check_apart(accelerator, self.state, others)
        self._accelerator = accelerator
        self._private = private

    # ---- captures ------------------------------------------------------------------------------------------

    def spread(self) -> bool:
        return prepared.spread(self._accelerator)

    def record(self, native: Capture, small: object, buffers: BoundaryBuffers) -> Capture:
        files = recording.record(self._accelerator, self._private, small, buffers)
        return self.dressed(native, (*files, self.randomness_file(self.together.rank, native)))

    def randomness_file(self, rank: int, capture: Capture) -> File:
        return recording.randomness_file(rank, _steps(capture), self.randomness_of(capture))

    def dressed(self, native: Capture, files: tuple[File, ...]) -> Capture:
        state: dict[str, Any] = native.document["state"]  # type: ignore[assignment]
        kept = {name: value for name, value in state.items() if name != prepared.HELD}
        groups = tuple(
            group for group in native.groups if group.name.removesuffix(".frozen") != prepared.HELD
        )
        return dataclasses.replace(
            native, document={**native.document, "state": kept}, groups=groups, files=files
        )

    # ---- restore -------------------------------------------------------------------------------------------

    def prepare(self, document: dict[str, object], stored: Stored) -> Loading:
        """What load_state() will not bring back."""
        run, state = document.get("run"), document.get("state")
        if not isinstance(run, dict) or not isinstance(state, dict) or prepared.LEDGER not in state:
            raise errors.MismatchError(
                "the checkpoint was not saved with protect(accelerator=...): load_state() could not read it. "
                "Use another directory."
            )
        saved, size = run.get("world", 1), self.together.size
        if saved != size and 1 in (saved, size):
            raise errors.MismatchError(
                f"the checkpoint is of {saved} rank(s) and this run has {size}: Accelerate names the weights "
                "of one process and many "
                f"differently, so load_state() could not read it. Start it with {saved} rank(s)."
            )
        with self._without_held():
            return super().prepare(document, stored)

    @contextlib.contextmanager
    def _without_held(self) -> Iterator[None]:
        values = self.state.values
        everything = dict(values)
        del values[prepared.HELD]
        try:
            yield
        finally:
            values.clear()
            values.update(everything)

    def load(self, path: Path) -> None:
        """Accelerate's own load_state(), and then the data's position once more: it loads that of a stateful
        loader, too."""
        positions = [(tracker, tracker.state()) for tracker in self._trackers.values()]
        steps = self._accelerator.step
        self._accelerator.load_state(str(path))
        self._accelerator.step = steps  # where this rank is new there is no file to load it from
        for tracker, state in positions:
            tracker.load(state)


def _steps(capture: Capture) -> int:
    state: dict[str, Any] = capture.document["state"]  # type: ignore[assignment]
    found: Any = tree.decode(state[prepared.LEDGER]["v"], tree.refuse_tag)
    return int(found["step"])


def _check(accelerator: Any, others: dict[str, object]) -> None:
    if not accelerator._models or not accelerator._optimizers:
        raise errors.StateError(
            "the accelerator has prepared no model or optimizer yet: call accelerator.prepare(model, "
            "optimizer, ...) before protect()"
        )
    for name in others:
        if _TAKEN.fullmatch(name):
            raise errors.StateError(
                f"the name {name!r} is that of a file of the accelerator's, or ours. What "
                "accelerator.prepare() was given is saved "
                "with it and left out here; give anything else another name."
            )


def _check_apart(accelerator: Any, state: StateSet, others: dict[str, object]) -> None:
    """A value that shares memory with what is in Accelerate's files would be stored as a reference into a
    file that is not there."""
    held = StateSet(
        {name: value for name, value in state.values.items() if name not in others and name != prepared.DATA}
    )
    theirs = {
        placement.local(tensor).untyped_storage().data_ptr() for tensor in held.tensors() if tensor.numel()
    }
    for name, value in others.items():
        tensors = [
            placement.local(tensor) for tensor in StateSet({name: value}, state._known._trackers).tensors()
        ]
        shared = any(tensor.untyped_storage().data_ptr() in theirs for tensor in tensors if tensor.numel())
        if shared or prepared.knows(accelerator, value):
            raise errors.StateError(
                f"{name}: it is, or shares tensors with, what the accelerator has prepared and saves. Leave "
                "it out of protect(), "
                "or hand it to accelerator.register_for_checkpointing()."
            )
