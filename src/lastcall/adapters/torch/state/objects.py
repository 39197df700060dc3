"""Whatever has state_dict() and load_state_dict(): schedulers, scalers, EMA classes of the user; and
loaders."""

from __future__ import annotations

from typing import Any

import torch

from lastcall import errors
from lastcall.adapters.torch.state import copies, parts
from lastcall.adapters.torch.state.parts import Encoding, Restoration
from lastcall.adapters.torch.tensors import tensors
from lastcall.formats import tree


class ObjectPart:
    """Looks after one object through its own state_dict() and load_state_dict()."""

    tag = "object"

    def __init__(self, value: Any, known: parts.PartLookup, rank: int = 1) -> None:
        self.value = value
        self.rank = rank
        self._leaf = copies.copier(known)

    def copy(self) -> object:
        return tree.copy(self.value.state_dict(), self._leaf)

    def encode(self, encoder: Encoding, path: str, copied: object) -> dict[str, object]:
        if not callable(getattr(self.value, "load_state_dict", None)):
            raise errors.StateError(
                f"{path}: a {type(self.value).__qualname__} has state_dict() but no load_state_dict(), so it "
                "could not "
                "be restored. Give it load_state_dict(state)."
            )
        state = self.value.state_dict() if copied is None else self.thawed(copied)
        return {
            tree.TAG: self.tag,
            "class": type(self.value).__qualname__,
            "v": encoder.value(state, f"{path}.state_dict()"),
        }

    def thawed(self, copied: object) -> object:
        """The state_dict of what copy() returned."""
        return copied

    def match(self, restorer: Restoration, document: dict[str, object], path: str) -> None:
        strict = isinstance(self.value, torch.optim.lr_scheduler.LRScheduler | torch.optim.Optimizer)
        if strict:
            restorer.same_class(self.value, document, path)
        saved = restorer.decode(document.get("v"))
        build = restorer.fill(self.value.state_dict(), saved, f"{path}.state_dict()", fresh=True)
        restorer.later(1, path, lambda: self.value.load_state_dict(build()))


class SourcePart(ObjectPart):
    """Something to iterate over that keeps its own position: torchdata's nodes, streaming data sets. To be
    asked for its state it may begin a pass, and use up its sampler's generator: so it is not asked before it
    was loaded."""

    def encode(self, encoder: Encoding, path: str, copied: object) -> dict[str, object]:
        return super().encode(encoder, path, {} if encoder.checking else copied)

    def match(self, restorer: Restoration, document: dict[str, object], path: str) -> None:
        if restorer.again:
            return
        build = restorer.fill(None, restorer.decode(document.get("v")), f"{path}.state_dict()", fresh=True)
        restorer.later(1, path, lambda: self.value.load_state_dict(build()))


class ScalerPart(ObjectPart):
    """GradScaler. Its state_dict() waits for the device; the copy at a boundary must not."""

    def copy(self) -> object:
        scaler: Any = self.value
        scale, tracker = getattr(scaler, "_scale", None), getattr(scaler, "_growth_tracker", None)
        if (
            not scaler.is_enabled()
            or not isinstance(scale, torch.Tensor)
            or not isinstance(tracker, torch.Tensor)
        ):
            return scaler.state_dict()
        numbers = (scaler.get_growth_factor(), scaler.get_backoff_factor(), scaler.get_growth_interval())
        return (scale.clone(), tracker.clone(), *numbers)

    def thawed(self, copied: Any) -> object:
        if isinstance(copied, dict):
            return copied
        scale, tracker, growth, backoff, interval = copied
        return {
            "scale": tensors.to_host(scale).item(),
            "growth_factor": growth,
            "backoff_factor": backoff,
            "growth_interval": interval,
            "_growth_tracker": tensors.to_host(tracker).item(),
        }


class LoaderPart:
    """A loader whose position somebody else keeps."""

    tag = "loader"
    rank = 1

    def __init__(self, value: object, tracker: parts.Tracker) -> None:
        self.value = value
        self._tracker = tracker

    def copy(self) -> object:
        return self._tracker.state()

    def encode(self, encoder: Encoding, path: str, copied: object) -> dict[str, object]:
        state = self._tracker.state() if copied is None else copied
        return {tree.TAG: self.tag, "v": encoder.value(state, f"{path}.state")}

    def match(self, restorer: Restoration, document: dict[str, object], path: str) -> None:
        if restorer.again:
            return
        saved = restorer.decode(document.get("v"))
        if not isinstance(saved, dict):
            raise errors.CheckpointError(
                f"{path}: the saved position of the loader is no dict: it is damaged"
            )
        build: Any = restorer.fill(None, saved, path)
        restorer.later(1, path, lambda: self._tracker.load(build()))
