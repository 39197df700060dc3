"""The things in a state that are more than values: modules, optimizers, schedulers, generators, loaders.

Each is looked after by a Part, which knows how to copy what is small in it at a boundary, how to write it
into the document, and how to bring it back. A registry keeps one Part for each live object, since some cache
what they found.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np
import torch

if TYPE_CHECKING:
    from lastcall.adapters.torch.state.encoding import Encoder
    from lastcall.adapters.torch.state.restore import Restorer

_MANY = 4096


class Tracker(Protocol):
    """Keeps the position of a loader (data.py)."""

    def state(self) -> dict[str, object]: ...

    def load(self, state: dict[str, object]) -> None: ...


class Part(Protocol):
    """One live object. `value` is held, so that its id stays its own."""

    @property
    def tag(self) -> str: ...  # what it is called in the document

    @property
    def rank(self) -> int: ...  # of the group its tensors go to

    @property
    def value(self) -> object: ...

    def copy(self) -> object:
        """What of it must be copied at a boundary; handed to encode() later, perhaps on another thread."""

    def encode(self, encoder: Encoder, path: str, copied: object) -> dict[str, object]:
        """Its place in the document. `copied` is None when everything is to be read from the live object."""

    def match(self, restorer: Restorer, document: dict[str, object], path: str) -> None:
        """Check that the saved one fits, name the targets of its tensors, and say what is left for the
        end."""


class Held(NamedTuple):
    """Stands in a copied state for a live object and what was copied of it."""

    part: Part
    copied: object


class Parts:
    """One Part for each live object that needs one."""

    def __init__(self, trackers: Mapping[int, Tracker]) -> None:
        self._trackers = trackers
        self._known: dict[int, Part] = {}

    def of(self, value: object) -> Part | None:
        """The part of a live object, or None when it is a plain value (or something that cannot be saved)."""
        known = self._known.get(id(value))
        if known is None or known.value is not value:
            made = self._make(value)
            if made is None:
                return None
            # a state_dict() that makes new objects at each call must not fill the memory
            if len(self._known) >= _MANY:
                self._known.clear()
            known = self._known[id(value)] = made
        return known

    def _make(self, value: object) -> Part | None:
        from lastcall.adapters.torch.state import generators, modules, objects, optimizers

        tracker = self._trackers.get(id(value))
        if tracker is not None:
            return objects.LoaderPart(value, tracker)
        if isinstance(value, type | torch.Tensor):
            return None
        if isinstance(value, torch.nn.Module):
            return modules.ModulePart(value)
        if isinstance(value, torch.optim.Optimizer):
            plain = optimizers.is_plain(value)
            return optimizers.OptimizerPart(value) if plain else objects.ObjectPart(value, self, rank=2)
        if isinstance(value, torch.amp.grad_scaler.GradScaler):
            return objects.ScalerPart(value, self)
        numpy_kinds = (np.random.Generator, np.random.RandomState, np.random.BitGenerator)
        if isinstance(value, (torch.Generator, random.Random, *numpy_kinds)):
            return generators.GeneratorPart(value)
        if callable(getattr(value, "state_dict", None)):
            return (objects.SourcePart if hasattr(type(value), "__iter__") else objects.ObjectPart)(
                value, self
            )
        return None
