"""The things in a state that are more than values: modules, optimizers, schedulers, generators, loaders.

Each is looked after by a Part, which knows how to copy what is small in it at a boundary, how to write it
into the document, and how to bring it back. `registry` keeps one for each live object.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import torch

from lastcall import types
from lastcall.adapters.torch.distributed import placement
from lastcall.adapters.torch.tensors import nodes
from lastcall.adapters.torch.tensors.table import Place

Build = Callable[[], Any]  # makes a value, after the bytes have arrived


class Tracker(Protocol):
    """Keeps the position of a loader (data.py)."""

    def state(self) -> dict[str, object]: ...

    def load(self, state: dict[str, object]) -> None: ...


class Encoding(Protocol):
    """What a part needs of the encoder."""

    owned: frozenset[int]
    cached: dict[int, Any]
    replicas: placement.Replicas
    parameters: Callable[[], dict[str, torch.Tensor]]
    checking: bool

    def value(self, value: object, path: str) -> object: ...

    def put(
        self,
        tensor: torch.Tensor,
        place: Place,
        keep: object = None,
        holders: placement.Holders | None = None,
    ) -> dict[str, object]: ...

    def replace(self, place: Place, source: types.Source) -> None: ...


class Restoration(Protocol):
    """What a part needs of the restorer."""

    again: bool
    patient: bool
    owed: set[str]
    parameters: Callable[[], dict[str, torch.Tensor]]

    def decode(self, document: object) -> object: ...

    def later(self, order: int, path: str, action: Callable[[], object]) -> None: ...

    def same_class(self, value: object, document: dict[str, object], path: str) -> None: ...

    def fill(
        self, live: Any, saved: Any, path: str, fresh: bool = False, like: torch.Tensor | None = None
    ) -> Build: ...

    def tensor(self, ref: nodes.Ref, live: object, like: torch.Tensor | None = None) -> torch.Tensor: ...


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

    def encode(self, encoder: Encoding, path: str, copied: object) -> dict[str, object]:
        """Its place in the document. `copied` is None when everything is to be read from the live object."""

    def match(self, restorer: Restoration, document: dict[str, object], path: str) -> None:
        """Check that the saved one fits, name the targets of its tensors, and say what is left for the
        end."""


class Held(NamedTuple):
    """Stands in a copied state for a live object and what was copied of it."""

    part: Part
    copied: object


class PartLookup(Protocol):
    def of(self, value: object) -> Part | None:
        """The part of a live object, or None when it is a plain value (or something that cannot be saved)."""
