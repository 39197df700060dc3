"""The state handed to protect(): checked at once, copied at boundaries, captured for a save, and brought
back.

A capture must be quick, since it lies between the notice and the disk. So what modules and optimizers put
into the document is kept (an Index) and used again as long as they still hold the same tensors at the same
addresses.
"""

from __future__ import annotations

import contextlib
import gc
import logging
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Protocol

import numpy as np
import torch

from lastcall import errors, types
from lastcall.adapters.torch.distributed import placement
from lastcall.adapters.torch.state import (
    copies,
    gradients,
    modules,
    objects,
    optimizers,
    parts,
    registry,
    structure,
)
from lastcall.adapters.torch.state.encoding import Encoder, Stale
from lastcall.adapters.torch.state.parts import Build
from lastcall.adapters.torch.state.restore import Restorer
from lastcall.adapters.torch.tensors import cuda, tensors
from lastcall.adapters.torch.tensors.table import Shelf, place_of
from lastcall.formats import tree
from lastcall.formats.safetensors import Stored

log = logging.getLogger("lastcall")
CARRIED = "carried"
UNOWNED = "unowned"  # parameters that an optimizer steps and no model has
RESERVED = frozenset({gradients.GROUP, CARRIED, UNOWNED, "lastcall", "state"})

Seen = dict[int, tuple[parts.Part, str]]


class Carried(Protocol):
    """Values that were not handed over and that belong to the run all the same: see `carry`."""

    def read(self, *, thorough: bool) -> dict[str, Any]:
        """As they are now; empty where there are none. `thorough`: whatever it costs."""

    def load(self, saved: object) -> None:
        """Those of a checkpoint."""


class Index:
    """What modules and optimizers contribute to a capture, as long as it holds."""

    def __init__(self, known: parts.PartLookup, seen: Seen, replicas: placement.Replicas) -> None:
        self.owned = frozenset(
            id(p)
            for part, _ in seen.values()
            if isinstance(part, optimizers.OptimizerPart)
            for p in part.parameters()
        )
        self.shelf = Shelf()
        self.fragments: dict[int, Any] = {}
        self._structures: list[tuple[modules.ModulePart, structure.Structure]] = []
        self._optimizers: list[optimizers.OptimizerPart] = []
        encoder = Encoder(known, self.shelf, self.owned, {}, replicas)
        # weights get their own names first
        for part, path in sorted(seen.values(), key=lambda entry: entry[0].rank):
            if isinstance(part, modules.ModulePart | optimizers.OptimizerPart):
                mark = self.shelf.child()
                fragment = part.fragment(encoder, path)
                if fragment is None:
                    self.shelf.places, self.shelf.entries = mark.places, mark.entries
                else:
                    self.fragments[id(part.value)] = fragment
                    if isinstance(part, modules.ModulePart):
                        self._structures.append((part, part.structure))
                    else:
                        self._optimizers.append(part)

    def holds(self) -> bool:
        # A part may have found out before us that its tensors moved (`p.data = ...`), and look at the new
        # ones: the addresses here are of those that it looked at then, and their memory may be somebody
        # else's by now.
        return all(part.structure is mine and mine.holds() for part, mine in self._structures) and all(
            part.holds() for part in self._optimizers
        )


class StateSet:
    """The named values of protect(). `values` is the live state: a number put into it is saved by the next
    capture."""

    def __init__(
        self,
        state: Mapping[str, object],
        trackers: Mapping[int, parts.Tracker] | None = None,
        *,
        check: bool = True,
    ) -> None:
        """With `check` False nothing is looked at: for a run that is switched off."""
        self.values: dict[str, object] = dict(state)
        self.carried: Carried | None = None
        self._known = registry.Parts(trackers if trackers is not None else {})
        self.unsaved: dict[str, str] = {}  # what could not be saved since protect(), by path, and why
        # somebody will ask once more, where the loop begins, for what the script adds on its way there
        self.patient = False
        self._strange = False
        self._leaf = copies.copier(self._known, self._found_strange)
        self._seen: Seen = {}
        self._shapes: dict[str, dict[str, tuple[int, ...]]] = {}  # of the models, as they were handed over
        self._index: Index | None = None
        self._replicas = placement.Replicas()
        if check:
            _check_names(state)
            self._validate()

    def _validate(self) -> None:
        """Refuse what cannot be saved now, all of it at once, and not when the machine dies."""
        problems = []
        encoder = Encoder(self._known, Shelf(), frozenset(), {})
        encoder.checking = True
        for name, value in self.values.items():
            try:
                encoder.value(value, name)
            except errors.StateError as error:
                problems.append(str(error))
        if problems:
            raise errors.StateError("\n".join(problems))
        self._seen = encoder.seen
        self._shapes = {
            path: part.shapes() for part, path in self._seen.values() if isinstance(part, modules.ModulePart)
        }

    # ---- saving --------------------------------------------------------------------------------------------

    def small(self) -> object:
        """The boundary copy: everything small that changes outside optimizer steps. Runs on the training
        thread."""
        self._strange = False
        copied = {name: self._copied(value) for name, value in self._all(thorough=False).items()}
        if self._strange and not self.unsaved:  # the first time: worth the time to name it
            self._afresh(copied, frozenset())
        cuda.fence()  # copies of buffers on a device belong to it
        return copied

    def _copied(self, value: object) -> object:
        try:
            return tree.copy(value, self._leaf)
        except errors.StateError as error:
            self._strange = True
            return copies.Failed(str(error))

    def _found_strange(self, _: object) -> None:
        self._strange = True

    def capture(self, small: object = None) -> tuple[dict[str, object], tuple[types.Group, ...]]:
        """The document and the groups of tensors. With `small`, only what is large is read live."""
        with _without_gc():
            return self._capture(self._all(thorough=True) if small is None else small)

    def _all(self, *, thorough: bool) -> dict[str, object]:
        carried = self.carried.read(thorough=thorough) if self.carried is not None else None
        return {**self.values, CARRIED: carried} if carried else self.values

    def _parameters(self) -> dict[str, torch.Tensor]:
        return gradients.named(self._seen.values())

    def _unowned(self) -> dict[str, torch.Tensor]:
        """Parameters that were handed over with an optimizer only: learned weights of losses, a latent
        code."""
        found = [
            (part, path) for part, path in self._seen.values() if isinstance(part, optimizers.OptimizerPart)
        ]
        if not found:
            return {}
        known = {
            id(p)
            for part, _ in self._seen.values()
            if isinstance(part, modules.ModulePart)
            for p in part.parameters()
        }
        known.update(id(tensor) for tensor in _tensors_in(self.values))
        return {
            f"{path}.{index}": parameter
            for part, path in found
            for index, parameter in enumerate(part.parameters())
            if id(parameter) not in known and tensors.problem(parameter) is None
        }

    def _capture(self, values: Any) -> tuple[dict[str, object], tuple[types.Group, ...]]:
        if unowned := self._unowned():
            values = {**values, UNOWNED: unowned}
        index = self._index
        if index is None or not index.holds():
            index = self._index = Index(self._known, self._seen, self._replicas)
        encoder = Encoder(
            self._known, index.shelf.child(), index.owned, index.fragments, self._replicas, self.unsaved
        )
        encoder.parameters = self._parameters
        try:
            document = {name: encoder.whole(value, name) for name, value in values.items()}
        except Stale:
            return self._afresh(values, index.owned)
        if _heavy(encoder.seen) != _heavy(self._seen):  # a module came or went: what is kept is of others
            self._index, self._seen = None, encoder.seen
            return self._afresh(values, index.owned)
        return {"state": document}, _groups(encoder, values)

    def _afresh(
        self, values: Any, owned: frozenset[int]
    ) -> tuple[dict[str, object], tuple[types.Group, ...]]:
        encoder = Encoder(self._known, Shelf(), owned, {}, self._replicas, self.unsaved)
        encoder.parameters = self._parameters
        document = {name: encoder.whole(value, name) for name, value in values.items()}
        return {"state": document}, _groups(encoder, values)

    def replicated(self, replicas: placement.Replicas) -> None:
        """Take note of the parameters that other ranks hold, too: until then each is this rank's own."""
        if replicas.holders != self._replicas.holders:
            self._index = None
        self._replicas = replicas

    def holdings(self) -> tuple[placement.Holders, ...]:
        """Who holds the pieces that this rank shares with others: each group of ranks once, in the order of
        the entries. An empty piece belongs to no rank."""
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
        """The tensors that a rescue reads live: parameters, optimizer state, and large ones in containers.
        Among them are DTensors, whose bytes and addresses are those of placement.local()."""
        found = {id(tensor): tensor for _, tensor in self.live()}
        for part, _ in self._seen.values():
            if isinstance(part, optimizers.OptimizerPart):
                found.update((id(p), p) for p in part.parameters())
        yield from found.values()

    def versions(self) -> dict[str, list[int]]:
        """By name: how often each of its tensors was written to, as torch counts it."""
        found: dict[str, list[int]] = {}
        for name, tensor in self.live():
            found.setdefault(name, []).append(tensor._version)
        return found

    def live(self) -> Iterator[tuple[str, torch.Tensor]]:
        """What a rescue reads live, with the name of protect() that it belongs to."""
        for part, path in self._seen.values():
            name = place_of(path)[0]
            if isinstance(part, modules.ModulePart):
                yield from ((name, parameter) for parameter in part.refresh().parameters().values())
                yield from ((name, buffer) for buffer in part.live_buffers())
            elif isinstance(part, optimizers.OptimizerPart):
                yield from (
                    (name, tensor) for kept in part.value.state.values() for tensor in _tensors_in(kept)
                )
        for name, value in self.values.items():
            yield from ((name, tensor) for tensor in _tensors_in(value) if tensor.nbytes >= copies.LARGE)

    def arrays(self) -> list[np.ndarray[Any, Any]]:
        """The numpy arrays that a rescue reads live."""
        return [array for array in _leaves(self.values, np.ndarray) if array.nbytes >= copies.LARGE]

    # ---- restoring -----------------------------------------------------------------------------------------

    def prepare(
        self,
        document: Mapping[str, object],
        stored: Mapping[str, Mapping[str, Stored]],
        *,
        lenient: bool = False,
    ) -> Loading:
        """Compare a checkpoint with the live state. Nothing live changes; MismatchError names what does not
        fit. `lenient`: models and optimizers that only one side knows are not refused."""
        saved = document.get("state")
        if not isinstance(saved, dict):
            raise errors.CheckpointError("the document has no state: it is damaged")
        with _without_gc():
            loading = self._match(saved, stored, lenient)
        cuda.settle()
        return loading

    def prepare_again(
        self,
        document: Mapping[str, Any],
        stored: Mapping[str, Mapping[str, Stored]],
        names: Iterable[str],
        *,
        last: bool,
    ) -> Loading:
        """As prepare(), for a state that was restored before, and of which some names are wanted once more.
        Positions in data are left alone: since then somebody may have begun to iterate. `last`: nothing is
        waited for any more."""
        restorer = Restorer(self._known, stored, again=True)
        restorer.patient, restorer.parameters = not last, self._parameters
        saved = document["state"]
        live = {**self.values, UNOWNED: self._unowned()}
        builds = {
            name: restorer.fill(live[name], restorer.decode(saved[name]), name)
            for name in names
            if name in saved and name in live
        }
        if gradients.GROUP in stored:
            gradients.match(self._seen.values(), stored[gradients.GROUP], restorer)
        cuda.settle()
        return Loading(self, restorer, builds)

    def reshaped(self) -> dict[str, list[str]]:
        """The models, by path, whose parameters are others than when they were handed over (a layer was
        added), and which."""
        now = {
            path: part.shapes() for part, path in self._seen.values() if isinstance(part, modules.ModulePart)
        }
        return {
            path: sorted({name for name, _ in shapes.items() ^ self._shapes[path].items()})
            for path, shapes in now.items()
            if path in self._shapes and shapes != self._shapes[path]
        }

    def sources(self) -> list[str]:
        """The paths of what keeps its own position in data."""
        return [path for part, path in self._seen.values() if isinstance(part, objects.SourcePart)]

    def _match(
        self, saved: dict[str, object], stored: Mapping[str, Mapping[str, Stored]], lenient: bool
    ) -> Loading:
        restorer = Restorer(self._known, stored, lenient=lenient)
        restorer.patient, restorer.parameters = self.patient, self._parameters
        builds: dict[str, Build] = {}
        restorer.left_over = sorted(saved.keys() - self.values.keys() - {CARRIED, UNOWNED})
        for name, value in self.values.items():
            if name in saved:
                builds[name] = restorer.fill(value, restorer.decode(saved[name]), name)
            else:
                restorer.new(value, name)
        if self.carried is not None and CARRIED in saved:
            builds[CARRIED] = restorer.fill(None, restorer.decode(saved[CARRIED]), CARRIED, fresh=True)
        if UNOWNED in saved:
            builds[UNOWNED] = restorer.fill(self._unowned(), restorer.decode(saved[UNOWNED]), UNOWNED)
        for name in restorer.left_over:
            restorer.dropped(restorer.decode(saved[name]), name)
        if gradients.GROUP in stored:
            gradients.match(self._seen.values(), stored[gradients.GROUP], restorer)
        return Loading(self, restorer, builds)

    def restored(self, values: dict[str, object]) -> None:
        if self.carried is not None and CARRIED in values:
            self.carried.load(values[CARRIED])
        self.values.update((name, value) for name, value in values.items() if name not in (CARRIED, UNOWNED))
        self._index = None


class Loading:
    """A checkpoint that fits. Its bytes go to `targets` (group, tensor name); then finish() applies the
    rest."""

    whole = False
    saved_step: int | None = None

    def __init__(self, state: StateSet, restorer: Restorer, builds: dict[str, Build]) -> None:
        self.targets: dict[str, dict[str, tensors.Aim]] = restorer.targets
        self.values: dict[str, object] = {}
        self.unmatched = restorer.unmatched
        self.owed = restorer.owed
        self._state = state
        self._restorer = restorer
        self._builds = builds

    def finish(self) -> None:
        self._restorer.finish()
        self.values = {name: build() for name, build in self._builds.items()}
        self._state.restored(self.values)


@contextlib.contextmanager
def _without_gc() -> Iterator[None]:
    """Thousands of new dicts start full collections over all that torch has loaded: two thirds of the
    time."""
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
            raise errors.StateError(
                f"{name!r:.120} names a file, so it must be a short ASCII identifier, like `ema`"
            )
        if name in RESERVED:
            raise errors.StateError(
                f"the name {name!r} is used by lastcall itself. Give the value another one."
            )


def _heavy(seen: Seen) -> set[int]:
    return {
        key
        for key, (part, _) in seen.items()
        if isinstance(part, modules.ModulePart | optimizers.OptimizerPart)
    }


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
