"""The state handed to protect(): checked at once, copied at boundaries, captured for a save, and brought back.

A capture must be quick, since it lies between the notice and the disk. So what modules and optimizers put into the
document is kept (an Index) and used again as long as they still hold the same tensors at the same addresses.
"""

from __future__ import annotations

import contextlib
import gc
import logging
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import torch

from lastcall import errors, types
from lastcall.adapters.torch import cuda, placement
from lastcall.adapters.torch.state import copies, gradients, modules, optimizers, parts, tensors
from lastcall.adapters.torch.state.encoding import Encoder, Stale
from lastcall.adapters.torch.state.restore import Build, Restorer
from lastcall.adapters.torch.state.shelf import Shelf
from lastcall.formats import tree
from lastcall.formats.safetensors import Stored

log = logging.getLogger("lastcall")
RESERVED = frozenset({gradients.GROUP, "lastcall", "state"})

Seen = dict[int, tuple[parts.Part, str]]


class Index:
    """What modules and optimizers contribute to a capture, as long as it holds."""

    def __init__(self, known: parts.Parts, seen: Seen, replicas: placement.Replicas) -> None:
        self.owned = frozenset(
            id(p) for part, _ in seen.values() if isinstance(part, optimizers.OptimizerPart) for p in part.parameters()
        )
        self.shelf = Shelf()
        self.fragments: dict[int, Any] = {}
        self._parts: list[modules.ModulePart | optimizers.OptimizerPart] = []
        encoder = Encoder(known, self.shelf, self.owned, {}, replicas)
        for part, path in sorted(seen.values(), key=lambda entry: entry[0].rank):  # weights get their own names first
            if isinstance(part, modules.ModulePart | optimizers.OptimizerPart):
                mark = self.shelf.child()
                fragment = part.fragment(encoder, path)
                if fragment is None:
                    self.shelf.places, self.shelf.entries = mark.places, mark.entries
                else:
                    self.fragments[id(part.value)] = fragment
                    self._parts.append(part)

    def holds(self) -> bool:
        return all(part.structure.holds() if isinstance(part, modules.ModulePart) else part.holds() for part in self._parts)


class StateSet:
    """The named values of protect(). `values` is the live state: a number put into it is saved by the next capture."""

    def __init__(self, state: Mapping[str, object], trackers: Mapping[int, parts.Tracker] | None = None, *, check: bool = True) -> None:
        """With `check` False nothing is looked at: for a run that is switched off."""
        self.values: dict[str, object] = dict(state)
        self._known = parts.Parts(trackers if trackers is not None else {})
        self._leaf = copies.copier(self._known)
        self._seen: Seen = {}
        self._index: Index | None = None
        self._replicas = placement.Replicas()
        if check:
            _check_names(state)
            self._validate()

    def _validate(self) -> None:
        """Refuse what cannot be saved now, all of it at once, and not when the machine dies."""
        problems = []
        encoder = Encoder(self._known, Shelf(), frozenset(), {})
        for name, value in self.values.items():
            try:
                encoder.value(value, name)
            except errors.StateError as error:
                problems.append(str(error))
        if problems:
            raise errors.StateError("\n".join(problems))
        self._seen = encoder.seen

    # ---- saving ------------------------------------------------------------------------------------------------------

    def small(self) -> object:
        """The boundary copy: everything small that changes outside optimizer steps. Runs on the training thread."""
        copied = {name: tree.copy(value, self._leaf) for name, value in self.values.items()}
        cuda.fence()  # copies of buffers on a device belong to it
        return copied

    def capture(self, small: object = None) -> tuple[dict[str, object], tuple[types.Group, ...]]:
        """The document and the groups of tensors. With `small`, only what is large is read live."""
        with _without_gc():
            return self._capture(self.values if small is None else small)

    def _capture(self, values: Any) -> tuple[dict[str, object], tuple[types.Group, ...]]:
        index = self._index
        if index is None or not index.holds():
            index = self._index = Index(self._known, self._seen, self._replicas)
        encoder = Encoder(self._known, index.shelf.child(), index.owned, index.fragments, self._replicas)
        try:
            document = {name: encoder.value(value, name) for name, value in values.items()}
        except Stale:
            return self._afresh(values, index.owned)
        if _heavy(encoder.seen) != _heavy(self._seen):  # a module came or went: what is kept is of others
            self._index, self._seen = None, encoder.seen
            return self._afresh(values, index.owned)
        return {"state": document}, _groups(encoder, values)

    def _afresh(self, values: Any, owned: frozenset[int]) -> tuple[dict[str, object], tuple[types.Group, ...]]:
        encoder = Encoder(self._known, Shelf(), owned, {}, self._replicas)
        document = {name: encoder.value(value, name) for name, value in values.items()}
        return {"state": document}, _groups(encoder, values)

    def replicated(self, replicas: placement.Replicas) -> None:
        """Take note of the parameters that other ranks hold, too: until then each is this rank's own."""
        if replicas.holders != self._replicas.holders:
            self._index = None
        self._replicas = replicas

    def holdings(self) -> tuple[placement.Holders, ...]:
        """Who holds the pieces that this rank shares with others: each group of ranks once, in the order of the entries. A piece that
        is empty is nobody's."""
        _, groups = self.capture()
        shares = (entry.share for group in groups for entry in group.entries if entry.source.nbytes)
        return tuple(dict.fromkeys(share.holders for share in shares if share is not None))

    def hidden_gradients(self) -> bool:
        """Whether gradients wait where gradients() does not find them: a save while they do is not exact."""
        return gradients.missing(self._seen.values())

    def gradients(self) -> types.Group | None:
        """The gradients that parameters have now, for those who know that they belong to the state."""
        return gradients.group(self._seen.values())

    def optimizers(self) -> list[torch.optim.Optimizer]:
        return [part.value for part, _ in self._seen.values() if isinstance(part, optimizers.OptimizerPart)]

    def tensors(self) -> Iterator[torch.Tensor]:
        """The tensors that a rescue reads live: parameters, optimizer state, and large ones in containers. Among them are DTensors,
        whose bytes and addresses are those of placement.local()."""
        found: dict[int, torch.Tensor] = {}
        for part, _ in self._seen.values():
            if isinstance(part, modules.ModulePart):
                found.update((id(p), p) for p in part.refresh().parameters().values())
                found.update((id(b), b) for b in part.live_buffers())
            elif isinstance(part, optimizers.OptimizerPart):
                found.update((id(p), p) for p in part.parameters())
                found.update((id(t), t) for kept in part.value.state.values() for t in _tensors_in(kept))
        found.update((id(t), t) for t in _tensors_in(self.values) if t.nbytes >= copies.LARGE)
        yield from found.values()

    def arrays(self) -> list[np.ndarray[Any, Any]]:
        """The numpy arrays that a rescue reads live."""
        return [array for array in _leaves(self.values, np.ndarray) if array.nbytes >= copies.LARGE]

    # ---- restoring ---------------------------------------------------------------------------------------------------

    def prepare(self, document: Mapping[str, object], stored: Mapping[str, Mapping[str, Stored]]) -> Loading:
        """Compare a checkpoint with the live state. Nothing live changes; MismatchError names what does not fit."""
        saved = document.get("state")
        if not isinstance(saved, dict):
            raise errors.CheckpointError("the document has no state: it is damaged")
        with _without_gc():
            loading = self._match(saved, stored)
        cuda.settle()
        return loading

    def _match(self, saved: dict[str, object], stored: Mapping[str, Mapping[str, Stored]]) -> Loading:
        restorer = Restorer(self._known, stored)
        builds: dict[str, Build] = {}
        for name, value in self.values.items():
            if name in saved:
                builds[name] = restorer.fill(value, restorer.decode(saved[name]), name)
            else:
                log.warning("the checkpoint holds nothing called %r: it stays as it is", name)
        for name in saved.keys() - self.values.keys():
            log.warning("the checkpoint holds %r, which protect() was not given: it is ignored", name)
        if gradients.GROUP in stored:
            gradients.match(self._seen.values(), stored[gradients.GROUP], restorer)
        return Loading(self, restorer, builds)

    def restored(self, values: dict[str, object]) -> None:
        self.values.update(values)
        self._index = None


class Loading:
    """A checkpoint that fits. Its bytes go to `targets` (group, tensor name); then finish() applies the rest."""

    def __init__(self, state: StateSet, restorer: Restorer, builds: dict[str, Build]) -> None:
        self.targets: dict[str, dict[str, tensors.Aim]] = restorer.targets
        self.values: dict[str, object] = {}
        self._state = state
        self._restorer = restorer
        self._builds = builds

    def finish(self) -> None:
        self._restorer.finish()
        self.values = {name: build() for name, build in self._builds.items()}
        self._state.restored(self.values)


@contextlib.contextmanager
def _without_gc() -> Iterator[None]:
    """Thousands of new dicts start full collections over all that torch has loaded: two thirds of the time."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _check_names(state: Mapping[str, object]) -> None:
    for name in state:
        if not name.isidentifier() or not name.isascii() or len(name) > 100:
            raise errors.StateError(f"{name!r:.120} names a file, so it must be a short ASCII identifier, like `ema`")
        if name in RESERVED:
            raise errors.StateError(f"the name {name!r} is used by lastcall itself. Give the value another one.")


def _heavy(seen: Seen) -> set[int]:
    return {key for key, (part, _) in seen.items() if isinstance(part, modules.ModulePart | optimizers.OptimizerPart)}


def _groups(encoder: Encoder, names: Iterable[str]) -> tuple[types.Group, ...]:
    groups = []
    for name in names:
        rank = encoder.ranks.get(name, 1)
        for group, frozen in ((name, False), (f"{name}.frozen", True)):
            entries = encoder.shelf.entries.get(group)
            if entries:
                groups.append(types.Group(group, tuple(entries.values()), frozen, rank))
    return tuple(groups)


def _tensors_in(value: Any) -> Iterator[torch.Tensor]:
    return _leaves(value, torch.Tensor)


def _leaves(value: Any, kind: type, depth: int = 0) -> Iterator[Any]:
    if isinstance(value, kind):
        yield value
    elif isinstance(value, dict) and depth < 20:
        for item in value.values():
            yield from _leaves(item, kind, depth + 1)
    elif isinstance(value, list | tuple) and depth < 20:
        for item in value:
            yield from _leaves(item, kind, depth + 1)
