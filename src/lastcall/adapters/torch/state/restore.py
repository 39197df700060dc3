"""From the document and the files back to live state, in two steps.

First everything is compared, and each stored tensor gets a target: the live tensor where there is one that
fits, new memory otherwise. No live byte changes before all of it is known to fit. After the bytes have been
read, `finish()` applies what is not tensors: load_state_dict() of optimizers and schedulers, containers,
numbers.
"""

from __future__ import annotations

import collections
import logging
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from lastcall import errors, types
from lastcall.adapters.torch.distributed import placement
from lastcall.adapters.torch.state import parts
from lastcall.adapters.torch.state.parts import Build
from lastcall.adapters.torch.tensors import arrays, dtypes, nodes, tensors
from lastcall.adapters.torch.tensors.table import Place, stored_share
from lastcall.formats import tree
from lastcall.formats.safetensors import Stored

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

log = logging.getLogger("lastcall")
_MAPPINGS = (dict, collections.OrderedDict, collections.Counter, collections.defaultdict)


class Restorer:
    """Collects the targets and the things to be done afterwards, for one checkpoint."""

    def __init__(
        self,
        known: parts.PartLookup,
        stored: Mapping[str, Mapping[str, Stored]],
        *,
        lenient: bool = False,
        again: bool = False,
    ) -> None:
        """`lenient`: a model or an optimizer that only one side knows is no reason to stop. `again`: it was
        all restored before, and positions in data stay as they are."""
        self.again = again
        self.patient = False  # groups of parameters that an optimizer does not have yet may come later
        self.owed: set[str] = set()  # ... and the optimizers that wait for them
        self.parameters: Callable[[], dict[str, torch.Tensor]] = dict  # all of the live state, by name
        self.known = known
        self.stored = stored
        self.unmatched: list[tuple[str, str]] = []  # what only one side knows, and what to do about it
        self.left_over: list[str] = []  # names of the checkpoint that protect() was not given
        self._lenient = lenient
        self.targets: dict[str, dict[str, tensors.Aim]] = {}
        self._actions: list[tuple[int, str, Callable[[], object]]] = []
        self._aimed: dict[tuple[object, ...], Place] = {}  # which place each memory is filled from
        self._filled: set[tuple[object, ...]] = set()
        self._made: dict[Place, torch.Tensor] = {}  # the first tensor that each place is read into

    def decode(self, document: object) -> object:
        return tree.decode(document, nodes.of)

    def later(self, order: int, path: str, action: Callable[[], object]) -> None:
        """Have something done by finish(): 0 modules and optimizers, 1 what may depend on them."""
        self._actions.append((order, path, action))

    def finish(self) -> None:
        for _, path, action in sorted(self._actions, key=lambda entry: entry[0]):
            try:
                action()
            except errors.LastcallError:
                raise
            except Exception as error:  # load_state_dict() is anybody's code
                raise errors.MismatchError(
                    f"{path} does not take the saved state: {type(error).__name__}: {error}. The checkpoint "
                    "is whole; "
                    "the object must be built as it was when it was saved, or be given another name."
                ) from error

    def same_class(self, value: object, document: dict[str, object], path: str) -> None:
        now, then = type(value).__qualname__, document.get("class")
        if now != then:
            raise errors.MismatchError(
                f"{path}: the checkpoint holds the state of a {then!s:.80}, and it is a {now} now. Build the "
                "same one, "
                "give it another name, or start in another directory."
            )

    # ---- names that do not match ---------------------------------------------------------------------------

    def new(self, value: object, path: str) -> None:
        """protect() was given what the checkpoint does not hold."""
        part = self.known.of(value)
        if part is None:
            log.warning("the checkpoint holds nothing called %r: it stays as it is", path)
            return
        kind = "model" if part.tag == "module" else "optimizer"
        holds = f" (it holds {', '.join(f'`{name}`' for name in self.left_over)})" if self.left_over else ""
        if (part.tag == "module" or isinstance(value, torch.optim.Optimizer)) and not self._lenient:
            raise errors.MismatchError(
                f"{path}: the checkpoint holds nothing of this name{holds}, and the {kind} would continue "
                "with fresh values. "
                "Give it the name that it was saved under. For fresh values: LASTCALL_UNMATCHED=allow. To "
                "start over: use another "
                "directory."
            )
        self.unmatched.append(
            (
                f"the checkpoint held nothing called `{path}`, which starts from scratch",
                "It cannot be restored any more.",
            )
        )

    def dropped(self, saved: object, path: str) -> None:
        """The checkpoint holds what protect() was not given."""
        if not isinstance(saved, nodes.Node):
            log.warning("the checkpoint holds %r, which protect() was not given: it is ignored", path)
            return
        if saved.tag in ("module", "optimizer") and not self._lenient:
            raise errors.MismatchError(
                f"{path}: the checkpoint holds {_article(saved.tag)} of this name, and protect() was not "
                "given one. Pass it: "
                f"protect(..., {path}={path}). To continue without it: LASTCALL_UNMATCHED=allow. To start "
                "over: use another directory."
            )
        self.unmatched.append(
            (
                f"the checkpoint holds `{path}`, which protect() was not given",
                f"Pass it: protect(..., {path}={path}).",
            )
        )

    # ---- values --------------------------------------------------------------------------------------------

    def fill(
        self, live: Any, saved: Any, path: str, fresh: bool = False, like: torch.Tensor | None = None
    ) -> Build:
        """What makes the saved value, using the live one where that can be changed in place. `fresh`
        containers are new ones, for those that are handed to load_state_dict(), but tensors in them are still
        read in place. `like`: the parameter that the value belongs to."""
        if saved is nodes.UNSAVED:
            log.warning("%s was not saved with this checkpoint: it stays as it is", path)
            return lambda: live
        if isinstance(saved, nodes.Ref):
            tensor = self.tensor(saved, live, like)
            return lambda: tensor
        if isinstance(saved, nodes.ArrayRef):
            array = self._array(saved, live)
            return lambda: array
        part = self.known.of(live)
        if isinstance(saved, nodes.Node):
            if part is None or part.tag != saved.tag:
                raise errors.MismatchError(
                    f"{path}: the checkpoint holds the state of {_article(saved.tag)}, and there is a "
                    f"{type(live).__qualname__} now. Pass the object that was there, or use another name."
                )
            part.match(self, saved.document, path)
            return lambda: live
        if part is not None:
            raise errors.MismatchError(
                f"{path}: there is {_article(part.tag)} now, and the checkpoint holds a "
                f"{type(saved).__qualname__} "
                "there. Use another name for it."
            )
        return self._container(live, saved, path, fresh)

    def _container(self, live: Any, saved: Any, path: str, fresh: bool) -> Build:
        kind = type(saved)
        same = type(live) is kind
        if kind in _MAPPINGS:
            return self._mapping(live if same else None, saved, path, fresh)
        if kind in (list, tuple, collections.deque):
            old = list(live) if same else []
            padded = old + [None] * (len(saved) - len(old))
            builds = [
                self.fill(before, item, f"{path}[{at}]", fresh)
                for at, (before, item) in enumerate(zip(padded, saved, strict=False))
            ]
            return lambda: _sequence(
                live if same and not fresh else None, saved, [build() for build in builds]
            )
        if kind in (set, frozenset):
            members = [self.fill(None, item, path, fresh) for item in saved]
            return lambda: _members(
                live if same and not fresh else None, kind, [build() for build in members]
            )
        if kind is bytearray and same and not fresh:
            return lambda: _overwrite(live, saved)
        return lambda: saved

    def _mapping(self, live: Any, saved: Any, path: str, fresh: bool) -> Build:
        old = live if live is not None else {}
        there = {key: item for key, item in saved.items() if item is not nodes.UNSAVED or key in old}
        builds = {
            key: self.fill(old.get(key), item, f"{path}[{key!r}]", fresh) for key, item in there.items()
        }
        kept = {
            key: item for key, item in old.items() if key not in builds and self.known.of(item) is not None
        }
        if not fresh:
            for key, item in kept.items():
                self.new(item, f"{path}[{key!r}]")
        # `saved` is our own, with the right type and attributes
        into = saved if live is None or fresh else live

        def build() -> Any:
            items = {key: make() for key, make in builds.items()}
            into.clear()
            for key, item in (items | kept if into is live else items).items():
                into[key] = item  # and not update(): a Counter's would add
            if into is live and hasattr(saved, "__dict__"):
                vars(into).update(vars(saved))
            return into

        return build

    # ---- tensors -------------------------------------------------------------------------------------------

    def tensor(self, ref: nodes.Ref, live: object, like: torch.Tensor | None = None) -> torch.Tensor:
        """The tensor that a reference will be read into. A new one is spread over the ranks as `like` is,
        where it has its shape."""
        self._check(ref.place, dtypes.stored_as(ref.dtype, ref.dense))
        if isinstance(live, torch.Tensor) and fits(live, ref):
            self.aim(ref.place, live)
            self._made.setdefault(ref.place, live)
            return live
        made = self._made.get(ref.place)
        if made is not None and fits(made, ref):  # it was shared when it was saved, and shall be again
            return (
                made if isinstance(made, torch.nn.Parameter) is ref.parameter else _typed(made.detach(), ref)
            )
        memory = _spread(ref, like) if placement.is_dtensor(like) else None
        if memory is None:
            memory = torch.empty(ref.dense, dtype=ref.dtype, device=_available(ref.device))
        self.aim(ref.place, memory)
        tensor = _typed(memory.expand(ref.shape) if ref.dense != ref.shape else memory, ref)
        self._made.setdefault(ref.place, tensor)
        return tensor

    def aim(self, place: Place, tensor: torch.Tensor) -> Place:
        """Have a live tensor read from a place. Returns the place it is read from: another one, if it is so
        already."""
        mine = tensors.dense(placement.local(tensor).detach())
        if placement.is_dtensor(tensor) and not mine.numel():
            return place  # this rank has nothing of it
        key = (str(mine.device), mine.data_ptr(), mine.dtype, tuple(mine.shape), mine.stride())
        known = self._aimed.setdefault(key, place) if mine.numel() else place
        if key not in self._filled:
            self._filled.add(key)
            self._target(
                place, _region(tensor, mine) if placement.is_dtensor(tensor) else tensors.target(mine)
            )
        return known

    def gradient(self, place: Place, parameter: torch.Tensor) -> torch.Tensor:
        """New memory for a saved gradient: not the live one's, which may be a view of a bucket of many."""
        expected = dtypes.stored_as(parameter.dtype, tuple(parameter.shape))
        found = self.stored[place[0]][place[1]]
        if (found.dtype, tuple(found.shape)) != expected:
            raise errors.MismatchError(
                f"{place[1]}: its gradient is {found.dtype} {tuple(found.shape)} in the checkpoint, and it "
                "needs one "
                f"of {expected[0]} {expected[1]} now. Build the model as it was when it was saved."
            )
        grad = torch.empty_like(parameter, requires_grad=False)
        self.aim(place, grad)
        return grad

    def _array(self, ref: nodes.ArrayRef, live: object) -> arrays.Array:
        self._check(ref.place, dtypes.numpy_stored_as(ref.dtype, ref.shape))
        array = np.empty(ref.shape, ref.dtype)
        if isinstance(live, np.ndarray) and type(live) in (np.ndarray, np.memmap) and live.flags.writeable:
            array = live if live.dtype == ref.dtype and live.shape == ref.shape else array
        key = ("numpy", array.__array_interface__["data"][0], array.dtype, array.shape, array.strides)
        if self._aimed.setdefault(key, ref.place) == ref.place:
            self._target(ref.place, arrays.of(array))
        return array

    def _target(self, place: Place, target: tensors.Aim) -> None:
        targets = self.targets.setdefault(place[0], {})
        known = targets.get(place[1])
        targets[place[1]] = target if known is None else tensors.Several((known, target))

    def _check(self, place: Place, expected: tuple[str, tuple[int, ...]]) -> None:
        """The document must say of a tensor what the file says: only the file's sizes have been checked."""
        found = self.stored.get(place[0], {}).get(place[1])
        if found is None or (found.dtype, tuple(found.shape)) != expected:
            what = (
                "is not in the file"
                if found is None
                else f"is {found.dtype} {tuple(found.shape)} in the file"
            )
            raise errors.CheckpointError(
                f"the document refers to a tensor {place[1]!r:.100} in {place[0]!r:.60} of {expected[0]} "
                f"{expected[1]}, which {what}"
            )


def fits(live: torch.Tensor, ref: nodes.Ref) -> bool:
    """Whether the saved bytes can be read straight into a live tensor."""
    if live.dtype != ref.dtype or tuple(live.shape) != ref.shape or tensors.problem(live) is not None:
        return False
    return tuple(tensors.dense(live).shape) == ref.dense


def _region(tensor: torch.Tensor, mine: torch.Tensor) -> types.Region:
    _, stored = dtypes.stored_as(mine.dtype, tuple(mine.shape))
    return types.Region(stored_share(tensor, stored).offset, stored, tensors.target(mine))


def _spread(ref: nodes.Ref, like: DTensor) -> torch.Tensor | None:
    """New memory for what belongs to a sharded parameter: moments are sharded as it is; what has another
    shape and was a DTensor, like the factors of Adafactor, is a whole one on every rank, since optimizers do
    not take DTensors and plain tensors together."""
    if ref.shape and ref.shape == tuple(like.shape):
        return torch.empty_like(like, dtype=ref.dtype, requires_grad=False)
    if not ref.dtensor:
        return None
    from torch.distributed.tensor import Replicate

    memory = torch.empty(ref.shape, dtype=ref.dtype, device=placement.local(like).device)
    return type(like).from_local(
        memory, like.device_mesh, [Replicate()] * like.device_mesh.ndim, run_check=False
    )


def _typed(tensor: torch.Tensor, ref: nodes.Ref) -> torch.Tensor:
    if ref.parameter:
        return torch.nn.Parameter(tensor, requires_grad=ref.grad)
    return tensor.requires_grad_() if ref.grad else tensor


def _available(device: torch.device) -> torch.device:
    """The device a tensor was saved from, or the host where there is none such."""
    found = device.type == "cuda" and (device.index or 0) < torch.cuda.device_count()
    return device if found else torch.device("cpu")


def _article(tag: str) -> str:
    return {
        "module": "an nn.Module",
        "optimizer": "an optimizer",
        "object": "an object with state_dict()",
    }.get(tag, f"a {tag}")


def _sequence(live: Any, saved: Any, items: list[Any]) -> Any:
    if type(saved) is tuple:
        return tuple(items)
    if live is None or (type(saved) is collections.deque and live.maxlen != saved.maxlen):
        return items if type(saved) is list else collections.deque(items, saved.maxlen)
    live.clear()
    live.extend(items)
    return live


def _members(live: Any, kind: type, items: list[Any]) -> Any:
    if kind is frozenset or live is None:
        return kind(items)
    live.clear()
    live.update(items)
    return live


def _overwrite(live: bytearray, saved: bytearray) -> bytearray:
    live[:] = saved
    return live
