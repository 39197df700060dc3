"""What trains and was not handed to protect(): optimizers, schedulers, scalers, averages of the weights,
second models.

All of it lives in this process, and shows in the first steps: an optimizer steps, a scheduler refers to one
that does, a scaler has a scale, the parameters of a module are written to. So the first passes look for what
is alive, does one of these things, and is not part of the state. One doubt for each, with the name that it
has in the script.

Silent: what does not change (frozen models), modules that are only ever copied from the state and not used
before they are copied again (evaluation), metrics, optimizers without any state.
"""

from __future__ import annotations

import gc
import sys
import time
import types
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau
from torch.optim.optimizer import Optimizer
from torch.optim.swa_utils import AveragedModel

from lastcall.adapters.torch.distributed import placement
from lastcall.core.checkpoint.doubts import Doubts

_LOOKS = frozenset({1, 2, 4, 16})  # passes after which what is alive is looked at
_SEARCHES = frozenset({2, 16})  # ... and looked for: a tenth of a second in a process with torch
_LAST = max(_LOOKS)  # later: when an optimizer begins, and at each power of two, for what begins then
# parameters whose first values tell a copy of the state from an average, and how many values
_SAMPLES, _VALUES = 8, 4
_DEPTH = 4
# optimizer steps in a row that are not counted: one makes an optimizer's state, or trains what a prefetcher
# held back
_MISSED = 3
_COUNT = "Loop over run.steps(n) or run.batches(loader), or call run.tick() after each step."
_SCALER = torch.amp.grad_scaler.GradScaler
_SCHEDULERS = (LRScheduler, ReduceLROnPlateau)
_KINDS = (torch.nn.Module, *_SCHEDULERS, _SCALER)

Module = torch.nn.Module
Sample = tuple[torch.Size, tuple[float, ...]]
Versions = list[tuple[int, Sample | None]]


class Overlooked:
    """Of one incarnation. `state`: the values of protect(), as they are now."""

    def __init__(self, state: Callable[[], dict[str, object]], doubts: Doubts) -> None:
        self._state = state
        self._doubts = doubts
        # no loop of ours is running: this step is not counted
        self.uncounted: Callable[[], bool] = lambda: False
        self.told_of_missing = False
        self._missed = 0
        self._passes = 0
        self._new = False  # an optimizer has begun
        self._again_at = 0.0  # when the next look is affordable
        self._optimizers: dict[int, weakref.ref[Optimizer]] = {}  # that have stepped
        self._versions: dict[int, Versions] = {}  # of the parameters of modules that are not in the state
        self._samples: set[Sample] = set()  # what the first values of the state's parameters have been
        self._told: set[int] = set()
        # scalers and averages that were in use before the loop began
        self._before: dict[int, tuple[float, ...]] = {}
        self._found: list[weakref.ref[Any]] | None = None  # what the last search has found
        # copies of the state: do they serve before they are made again?
        self._watched: dict[int, tuple[Any, weakref.ref[Module]]] = {}

    @property
    def looking(self) -> bool:
        return self._passes < _LAST

    def stepped(self, optimizer: Optimizer) -> None:
        known = self._optimizers.get(id(optimizer))
        if known is None or known() is not optimizer:  # another may have its address
            self._optimizers[id(optimizer)] = weakref.ref(optimizer)
            self._new = True
        self._missed = self._missed + 1 if self.uncounted() else 0
        if self._missed == _MISSED and not _ticks(sys._getframe(1)):
            self.miss(sys._getframe(1))

    def miss(self, frame: types.FrameType | None = None) -> None:
        """Steps are made, but not counted."""
        where = f" ({_line(frame)})" if frame is not None else ""
        reason = (
            f"an optimizer steps{where} outside of run.steps() and run.batches(): no step is counted, and "
            "none can be saved"
        )
        self._doubts.add(reason, _COUNT)
        self.told_of_missing = True

    @property
    def missed(self) -> int:
        """The last steps, where they were not counted."""
        return self._missed if self._missed > 1 else 0

    def begin(self) -> None:
        """The loop begins: this is how things were before."""
        if self.looking and self._found is None:
            handed = Handed(self._state())
            self._sample(handed)
            alive = self._alive(search=True)
            self._before = {id(one): used for one in alive if (used := _used(one)) is not None}
            for module in _foreign(alive, handed):
                self._versions[id(module)] = _versions(module)

    def later(self) -> None:
        """A pass has ended, long after the first ones. An optimizer that has just begun is looked at now, all
        else now and then: at a power of two, and a model that has changed one pass after that."""
        self._passes += 1
        if self._new or not self._passes & (self._passes - 1):
            self.look_back()
            handed = Handed(self._state())
            self._sample(handed)
            self._versions = {
                id(module): _versions(module) for module in _foreign(self._alive(search=False), handed)
            }
        elif self._versions:
            handed = Handed(self._state())
            self._sample(handed)
            for module in _roots(_foreign(self._alive(search=False), handed)):
                if (
                    id(module) in self._versions
                    and self._versions[id(module)] != _versions(module)
                    and not self._is_copy(module)
                ):
                    self._tell(
                        module,
                        f"the parameters of {{name}} ({type(module).__name__}) change",
                        sys._getframe(1),
                    )
            self._versions, self._samples = {}, set()

    def before_save(self, *, last: bool) -> None:
        """Look for what has begun since the last look: a save must not call it exact. `last`: whatever that
        costs; otherwise it may cost one part in a thousand of the time."""
        if last or self._new or time.monotonic() >= self._again_at:
            self.look_back()

    def look_back(self) -> None:
        """A module is distinguished from a copy of the state by looks in a row: by this one look, only
        averages are known."""
        self._new = False
        frame, began = sys._getframe(1), time.monotonic()
        handed, alive = Handed(self._state()), self._alive(search=True)
        self._look_at(alive, handed, frame)
        for module in alive:
            if isinstance(module, AveragedModel) and not handed(module) and self._serves(module):
                self._tell(module, f"the parameters of {{name}} ({type(module).__name__}) change", frame)
        now = time.monotonic()
        self._again_at = now + 1000 * (now - began)

    def passed(self) -> None:
        """A pass has ended."""
        if not self.looking:
            return
        self._passes += 1
        handed = Handed(self._state())
        self._sample(handed)
        for key, (_, ref) in self._watched.items():
            if (module := ref()) is not None and self._passes not in _LOOKS:
                self._versions[key] = _versions(module)
        if self._passes in _LOOKS:
            self._look(handed, sys._getframe(1))
        if not self.looking:
            self.end()

    def end(self) -> None:
        self._passes = _LAST
        for handle, _ in self._watched.values():
            handle.remove()
        self._watched, self._versions, self._samples = {}, {}, set()

    # ---- what is found -------------------------------------------------------------------------------------

    def _look(self, handed: Handed, frame: types.FrameType | None) -> None:
        alive = self._alive(search=self._passes in _SEARCHES)
        self._look_at(alive, handed, frame)
        for module in _roots(_foreign(alive, handed)):
            self._module(module, frame)

    def _look_at(self, alive: list[Any], handed: Handed, frame: types.FrameType | None) -> None:
        for optimizer in self._living():
            if not handed(optimizer) and _has_state(optimizer):
                self._tell(optimizer, f"the optimizer {{name}} ({type(optimizer).__name__}) steps", frame)
        schedulers = [one for one in alive if isinstance(one, _SCHEDULERS) and not handed(one)]
        inner = {id(part) for one in schedulers for part in _parts(one) if part is not one}
        for scheduler in schedulers:
            if id(scheduler) not in inner and any(
                scheduler.optimizer is optimizer for optimizer in self._living()
            ):
                self._tell(
                    scheduler,
                    f"the learning rate scheduler {{name}} ({type(scheduler).__name__}) is in use",
                    frame,
                )
        for one in alive:
            if isinstance(one, _SCALER) and not handed(one) and self._serves(one):
                self._tell(one, "the gradient scaler {name} is in use", frame)

    def _serves(self, one: object) -> bool:
        """Whether it was used since the loop began, and not only by what came before in this process."""
        return (used := _used(one)) is not None and used != self._before.get(id(one))

    def _alive(self, *, search: bool) -> list[Any]:
        if search or self._found is None:
            found = _search()
            self._found = [weakref.ref(one) for one in found]
            return found
        return [one for ref in self._found if (one := ref()) is not None]

    def _living(self) -> list[Optimizer]:
        return [optimizer for ref in self._optimizers.values() if (optimizer := ref()) is not None]

    def _module(self, module: Module, frame: types.FrameType | None) -> None:
        now, before = _versions(module), self._versions.get(id(module))
        self._versions[id(module)] = now
        if before is None or before == now or id(module) in self._told:
            return
        if self._is_copy(module):
            self._watch(module)
        else:
            self._tell(module, f"the parameters of {{name}} ({type(module).__name__}) change", frame)

    def _tell(self, one: object, what: str, frame: types.FrameType | None) -> None:
        if id(one) in self._told:
            return
        self._told.add(id(one))
        name = named(one, frame)
        reason = (
            what.format(name=f"`{name}`" if name else "of this process")
            + ", and it was not handed to protect()"
        )
        word = name.rpartition(".")[2] if name and name.rpartition(".")[2].isidentifier() else _usual(one)
        self._doubts.add(reason, f"Pass it: protect(..., {word}={name or '...'}).")

    # ---- copies of the state -------------------------------------------------------------------------------

    def _sample(self, handed: Handed) -> None:
        self._samples.update(filter(None, map(_sampled, handed.parameters[:_SAMPLES])))

    def _is_copy(self, module: Module) -> bool:
        shapes = {shape for shape, _ in self._samples}
        known = [
            found
            for tensor in module.parameters()
            if (found := _sampled(tensor)) is not None and found[0] in shapes
        ]
        return bool(known) and all(found in self._samples for found in known)

    def _watch(self, module: Module) -> None:
        """A copy for an evaluation is made again before it is used. One that serves in a later pass (a target
        network) is carried."""
        if id(module) in self._watched:
            return

        def used(served: Module, _args: object) -> None:
            if self._versions.get(id(served)) == _versions(served):
                self._tell(
                    served,
                    f"{{name}} ({type(served).__name__}) is used in a later step than it is written",
                    sys._getframe(1),
                )

        self._watched[id(module)] = module.register_forward_pre_hook(used), weakref.ref(module)


class Handed:
    """All that is part of the state, or of an object in it."""

    def __init__(self, state: dict[str, object]) -> None:
        self._ids: set[int] = set()
        self.parameters: list[torch.Tensor] = []
        for value in state.values():
            self._add(value, 0)
        self._tensors = {id(tensor) for tensor in self.parameters}

    def __call__(self, one: object) -> bool:
        return id(one) in self._ids

    def holds(self, module: Module) -> bool:
        """Whether the parameters of a module are those of the state: a wrapper, a part of it."""
        return all(id(tensor) in self._tensors for tensor in module.parameters())

    def _add(self, value: Any, depth: int) -> None:
        if (
            isinstance(value, int | float | str | bytes | type(None))
            or depth > _DEPTH
            or id(value) in self._ids
        ):
            return
        self._ids.add(id(value))
        if isinstance(value, Module):
            self._ids.update(map(id, value.modules()))
            self.parameters += value.parameters()
        elif isinstance(value, torch.Tensor):
            self.parameters.append(value)
        else:
            for part in _parts(value):
                if isinstance(part, _saved_with(value)):
                    self._add(part, depth + 1)


def _saved_with(value: object) -> tuple[type, ...]:
    """What of the objects that it refers to is part of its own state_dict()."""
    if isinstance(value, Optimizer):
        return (Optimizer,) if type(value).state_dict is not Optimizer.state_dict else ()
    return _SCHEDULERS if isinstance(value, _SCHEDULERS) else (object,)


def named(one: object, frame: types.FrameType | None) -> str:
    """What the script calls an object: a variable of a frame, or an attribute of one; "" if nothing leads to
    it."""
    seen: set[int] = set()
    while frame is not None:
        for space in (frame.f_locals, frame.f_globals):
            if id(space) in seen or str(frame.f_globals.get("__name__", "")).partition(".")[0] in (
                "lastcall",
                "torch",
            ):
                continue
            seen.add(id(space))
            found = list(space.items())
            if space is not frame.f_globals and frame.f_code.co_flags & 1 and isinstance(space, dict):
                space.clear()  # a copy that the frame would keep, and the last batch with it
            for name, value in found:
                if value is one and not name.startswith("__") and name != "self":
                    return name
            for name, value in found:
                for attribute, part in _attributes(value):
                    if part is one:
                        return f"{name}.{attribute}"
        frame = frame.f_back
    return ""


def _ticks(frame: types.FrameType | None) -> bool:
    """Whether a function that is running calls tick() at some time."""
    while frame is not None:
        if "tick" in frame.f_code.co_names:
            return True
        frame = frame.f_back
    return False


def _line(frame: types.FrameType | None) -> str:
    """Where the script is."""
    while frame is not None and str(frame.f_globals.get("__name__", "")).partition(".")[0] in (
        "lastcall",
        "torch",
    ):
        frame = frame.f_back
    return "" if frame is None else f"{frame.f_code.co_filename.rpartition('/')[2]}:{frame.f_lineno}"


def _attributes(value: object) -> Iterator[tuple[str, object]]:
    if isinstance(value, types.ModuleType | type):
        return
    own = getattr(value, "__dict__", None)
    if isinstance(value, dict):
        yield from ((str(name), part) for name, part in list(value.items()) if isinstance(name, str))
    elif isinstance(own, dict):
        yield from list(own.items())
        if isinstance(value, Module):
            yield from list(value._modules.items())


def _search() -> list[Any]:
    known: dict[type, bool] = {}
    found = []
    for one in gc.get_objects():
        kind = type(one)
        wanted = known.get(kind)
        if wanted is None:
            wanted = known[kind] = issubclass(kind, _KINDS)
        if wanted:
            found.append(one)
    return found


def _foreign(alive: Iterable[Any], handed: Handed) -> list[Module]:
    return [
        one
        for one in alive
        if isinstance(one, Module)
        and "_parameters" in one.__dict__
        and not handed(one)
        and (not handed.holds(one) or _counts(one))
        and not isinstance(one, torch.jit.ScriptModule)
    ]


def _counts(module: Module) -> bool:
    """Whether it has nothing but buffers, and is no metric: a running mean that rewards are divided by."""
    return (
        next(module.parameters(), None) is None
        and next(module.buffers(), None) is not None
        and not hasattr(module, "reset")
    )


def _roots(modules: list[Module]) -> list[Module]:
    inner = {id(part) for module in modules for part in module.modules() if part is not module}
    return [module for module in modules if id(module) not in inner]


def _versions(module: Module) -> Versions:
    """Of its parameters; of its buffers only where there is nothing else: those of frozen layers change in
    every forward. With values of the first ones: `p.data.mul_(...)` does not count as a version."""
    tensors: list[torch.Tensor] = [*module.parameters()] or [*module.buffers()]
    few = [*map(_sampled, tensors[:_SAMPLES]), *[None] * (len(tensors) - _SAMPLES)]
    return [
        (0 if torch.is_inference(one) or one.is_meta else one._version, value)
        for one, value in zip(tensors, few, strict=True)
    ]


def _sampled(tensor: torch.Tensor) -> Sample | None:
    mine = placement.local(tensor).detach()
    if not mine.is_floating_point() or not mine.numel() or mine.is_meta or mine.layout is not torch.strided:
        return None
    return tensor.shape, tuple(mine.reshape(-1)[:_VALUES].tolist())


def _used(one: object) -> tuple[float, ...] | None:
    """Something that each use of a scaler or an average changes; None for what was never used, or is
    neither."""
    if isinstance(one, AveragedModel):
        return (float(one.n_averaged),) if int(one.n_averaged) > 0 else None
    if not isinstance(one, _SCALER) or not one.is_enabled() or one._scale is None:
        return None
    return float(one._scale), float(one._growth_tracker if one._growth_tracker is not None else 0)


def _has_state(optimizer: Optimizer) -> bool:
    """Plain SGD has none: without a scheduler nothing is lost with it."""
    return any(
        value is not None
        for kept in optimizer.state.values()
        for value in (kept.values() if isinstance(kept, dict) else [kept])
    )


def _parts(owner: Any) -> Iterator[object]:
    for value in _inside(owner):
        yield value
        if isinstance(value, list | tuple):
            yield from value


def _inside(value: Any) -> list[object]:
    if isinstance(value, dict):
        return list(value.values())
    if isinstance(value, list | tuple | set | frozenset):
        return list(value)
    own = getattr(value, "__dict__", None)
    return (
        list(own.values()) if isinstance(own, dict) and not isinstance(value, types.ModuleType | type) else []
    )


def _usual(one: object) -> str:
    if isinstance(one, Optimizer):
        return "optimizer2"
    if isinstance(one, Module):
        return "model2"
    return "scaler" if isinstance(one, _SCALER) else "scheduler"
