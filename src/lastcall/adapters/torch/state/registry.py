"""One Part for each live object that needs one, since some cache what they found."""

from __future__ import annotations

import random
from collections.abc import Mapping

import numpy as np
import torch

from lastcall.adapters.torch.state import generators, modules, objects, optimizers
from lastcall.adapters.torch.state.parts import Part, Tracker

_MANY = 4096


class Parts:
    def __init__(self, trackers: Mapping[int, Tracker]) -> None:
        self._trackers = trackers
        self._known: dict[int, Part] = {}

    def of(self, value: object) -> Part | None:
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
