"""torchdata's StatefulDataLoader, followed through its own state_dict().

It is known by the name of its class, so that torchdata is imported only by those who use it. What is exact is what
torchdata saves: the order of the samples and the state of datasets that have one. It does not save the workers' random
generators. Three things are set right here: making an iterator from a loaded state draws from the training loop's
generators, which an uninterrupted run does not do at that point; the generator of its sampler loses the draw of the
workers' seed; and asking for the state before the first pass would start the workers.

A pass that was left with `break` counts as unfinished until the next one is begun: torchdata keeps the iterator alive.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from lastcall import errors
from lastcall.adapters.torch.data import classes as data_classes
from lastcall.adapters.torch.data import randomness as rng
from lastcall.adapters.torch.data import rescaling

VERSION = 1
KIND = rescaling.STATEFUL


def is_stateful(obj: object) -> bool:
    return any(kind.__name__ == "StatefulDataLoader" and kind.__module__.startswith("torchdata") for kind in type(obj).__mro__)


class StatefulTracker:
    """The interface of LoaderTracker for a StatefulDataLoader."""

    def __init__(self, loader: Any) -> None:
        self.loader = loader
        self.worlds: tuple[int, int] | None = None  # ranks of the run that saved the position, and of this one
        self._own_class: type[Any] | None = None

    def attach(self) -> None:
        if self._own_class is None:
            self._own_class = type(self.loader)
            object.__setattr__(self.loader, "__class__", _followed_class(self._own_class))

    def detach(self) -> None:
        if self._own_class is not None:
            object.__setattr__(self.loader, "__class__", self._own_class)
            self._own_class = None

    def state(self) -> dict[str, Any]:
        loader = self.loader
        if loader._iterator is not None:
            inner = _freeze(loader.state_dict())
        else:
            inner = _freeze(loader.next_iter_state)
        generators = rng.take_generators(rng.find_generators(loader))
        return {"kind": KIND, "version": VERSION, "inner": inner, "generators": generators}

    def note(self) -> dict[str, Any]:
        """torchdata's own state changes with the next batch: it must be taken now."""
        return self.state()

    def state_of(self, noted: dict[str, Any]) -> dict[str, Any]:
        return noted

    def load(self, state: dict[str, Any]) -> None:
        if state.get("kind") != KIND or state.get("version") != VERSION:
            raise errors.MismatchError(
                f"The saved data position is of kind {state.get('kind')!r}, version {state.get('version')!r}, "
                f"but a StatefulDataLoader needs kind {KIND!r}, version {VERSION}. Use the loader class that "
                f"it was saved with, or leave the loader out of protect() to start its data from the beginning."
            )
        state = rescaling.taken_up(state, self.loader, self.worlds)
        self.loader.load_state_dict({} if state["inner"] is None else _thaw(state["inner"]))
        rng.put_generators(state["generators"], rng.find_generators(self.loader))

    def iterate(self) -> Iterator[Any]:
        return iter(self.loader)

    @property
    def delivered(self) -> int:
        """Batches delivered in the latest pass; 0 between load() and iter(): only torchdata can read its state."""
        return int(getattr(self.loader._iterator, "_num_yielded", 0))

    @property
    def exhausted(self) -> bool:
        if self.loader._iterator is None:
            return bool((self.loader.next_iter_state or {}).get("_iterator_finished", False))
        return bool(self.loader._iterator._finished)


def _followed_class(own: type[Any]) -> type[Any]:
    def get_iterator(self: Any) -> Any:
        if self.next_iter_state is None:
            return super(followed, self)._get_iterator()
        generators = rng.find_generators(self)
        saved = rng.take(generators)
        try:
            return super(followed, self)._get_iterator()
        finally:
            rng.put(saved, generators)

    followed = data_classes.derive(own, (own,), {"_get_iterator": get_iterator})
    return followed


def _freeze(value: Any) -> Any:
    """A copy that shares nothing with torchdata's live state; tensors and arrays (sampler generators) become bytes."""
    if isinstance(value, dict):
        return {key: _freeze(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_freeze(item) for item in value) if type(value) in (list, tuple) else value
    if isinstance(value, torch.Tensor):
        array = value.detach().cpu().numpy()
        return {
            "__lastcall__": "tensor",
            "dtype": array.dtype.str,
            "shape": tuple(array.shape),
            "data": array.tobytes(),
        }
    if isinstance(value, np.ndarray):
        return {"__lastcall__": "array", "dtype": value.dtype.str, "shape": tuple(value.shape), "data": value.tobytes()}
    return value


def _thaw(value: Any) -> Any:
    if isinstance(value, dict):
        if "__lastcall__" in value:
            array = np.frombuffer(bytearray(value["data"]), dtype=value["dtype"]).reshape(value["shape"])
            return torch.from_numpy(array) if value["__lastcall__"] == "tensor" else array
        return {key: _thaw(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_thaw(item) for item in value)
    return value
