"""Random generators that the user hands over: torch.Generator, random.Random, numpy's Generator and
RandomState."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch

from lastcall import errors
from lastcall.adapters.torch.state.parts import Encoding, Restoration
from lastcall.formats import tree


class GeneratorPart:
    """Looks after one generator. Its state is small and always copied."""

    tag = "generator"
    rank = 1

    def __init__(self, value: Any) -> None:
        self.value = value

    def copy(self) -> object:
        value: Any = self.value
        if isinstance(value, torch.Generator):
            return value.get_state()
        if isinstance(value, random.Random):
            return value.getstate()
        if isinstance(value, np.random.RandomState):
            return value.get_state(legacy=False)
        return (value.bit_generator if isinstance(value, np.random.Generator) else value).state

    def encode(self, encoder: Encoding, path: str, copied: object) -> dict[str, object]:
        if isinstance(self.value, random.SystemRandom):
            raise errors.StateError(
                f"{path}: a random.SystemRandom has no state and cannot be saved. Use random.Random(seed)."
            )
        state = self.copy() if copied is None else copied
        return {tree.TAG: self.tag, "kind": self._kind(), "v": encoder.value(state, path)}

    def match(self, restorer: Restoration, document: dict[str, object], path: str) -> None:
        if document.get("kind") != self._kind():
            raise errors.MismatchError(
                f"{path}: the checkpoint holds the state of a {document.get('kind')!r:.60} generator, and it "
                "is a "
                f"{self._kind()!r} now. Use the same kind of generator, or another name."
            )
        build = restorer.fill(None, restorer.decode(document.get("v")), path)
        restorer.later(1, path, lambda: self.put(build()))

    def _kind(self) -> str:
        if isinstance(self.value, torch.Generator):
            return f"torch.{self.value.device.type}"
        return "python" if isinstance(self.value, random.Random) else f"numpy.{type(self.value).__name__}"

    def put(self, state: Any) -> None:
        value: Any = self.value
        if isinstance(value, torch.Generator):
            value.set_state(state)
        elif isinstance(value, random.Random):
            value.setstate(state)
        elif isinstance(value, np.random.RandomState):
            value.set_state(state)
        else:
            (value.bit_generator if isinstance(value, np.random.Generator) else value).state = state
