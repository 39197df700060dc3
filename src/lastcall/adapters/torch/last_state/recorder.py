"""The mail that a rank writes: its own small state at each boundary, and once more when the forward of the
next step is over.

When a rank is killed, the others may have completed a step that it had not: its gradients were there already.
What the checkpoint of that step needs of it is its state after the forward of that step. It is in the mail:
no rank completes the step before the first gradient of the killed one's backward was there, and that is when
the F record is written. `composing` makes its part from it.
"""

from __future__ import annotations

import collections
import logging
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol

import torch

from lastcall.adapters.torch.distributed import placement
from lastcall.adapters.torch.last_state import first_gradient, state_record
from lastcall.adapters.torch.randomness.rng import Captured, Randomness
from lastcall.adapters.torch.state import copies, modules, parts, registry
from lastcall.adapters.torch.state.entries import CARRIED
from lastcall.adapters.torch.tensors import dtypes
from lastcall.core.guard import mailbox
from lastcall.formats import tree

log = logging.getLogger("lastcall")
_BUFFERS = 1 << 20  # bytes of buffers of all modules that are mailed at most
_SCALARS = frozenset({type(None), bool, int, float, str, bytes, complex})


class Subject(Protocol):
    """What is asked of a TorchSubject after a forward."""

    step: int
    epoch: int
    inside: bool
    loops: int


class Copied(Protocol):
    """The boundary copy (subject.Copy)."""

    @property
    def boundary(self) -> tuple[int, int]: ...

    @property
    def place(self) -> tuple[bool, int]: ...

    @property
    def small(self) -> Any: ...

    @property
    def randomness(self) -> Captured: ...

    @property
    def loaders(self) -> list[Any]: ...


class Mail:
    """Writes the records of one rank. `values` and `trackers` are the live ones of the state and its loaders;
    `positions` says where those loaders stand that only run.batches() knows; `affordable` is asked before
    each F record."""

    def __init__(
        self,
        box: mailbox.Mailbox,
        subject: Subject,
        values: Mapping[str, object],
        trackers: Mapping[int, parts.Tracker],
        randomness: Randomness,
        positions: Callable[[], list[Any]],
        affordable: Callable[[], bool] = lambda: True,
    ) -> None:
        self.box = box
        self.cost = 0.0  # seconds that F records have taken since somebody set it back
        self._subject = subject
        self._values = values
        self._known = registry.Parts(trackers)
        self._leaf = copies.copier(self._known)
        self._randomness = randomness
        self._positions = positions
        self._affordable = affordable
        self._step = -1
        self._forms: dict[str, tuple[object, state_record.Row]] = {}
        self._looks: dict[str, tuple[object, _Look]] = {}
        self._first = first_gradient.FirstGradient(
            [part.module for look in self._look().values() for part in look.modules], self.after_forward
        )

    def install(self) -> None:
        self._first.install()

    def remove(self) -> None:
        self._first.remove()

    def boundary(self, copy: Copied) -> float:
        """Write the B record of a boundary copy that was taken just now; the seconds it took. Never
        raises."""
        began = time.perf_counter()
        step = copy.boundary[0]
        if step > self._step >= 0 and not self._first.fired and not self._first.resting:
            self._first.missed()
        self._first.fired = False
        if self._affordable():
            self._first.wake()
        else:
            self._first.rest()
        self._step = step
        try:
            letter = state_record.Letter(self._known, (copy.boundary[1], *copy.place), self._forms)
            letter.randomness(copy.randomness)
            letter.loaders(copy.loaders)
            looks = self._look()
            for name, look in looks.items():
                if not look.heavy:
                    letter.name(name, copy.small[name])
            if CARRIED in copy.small:
                letter.name(CARRIED, copy.small[CARRIED])
            self._send(letter, looks, step, "B")
        except Exception as error:  # state_dict() is any code, and training continues without records
            self._stop(error)
        return time.perf_counter() - began

    def after_forward(self) -> None:
        """Write the F record of the step that is under way. Called inside a backward. Never raises."""
        if not self._affordable():
            return
        began = time.perf_counter()
        subject = self._subject
        try:
            letter = state_record.Letter(
                self._known, (subject.epoch, subject.inside, subject.loops), self._forms
            )
            letter.randomness(self._randomness.capture())
            letter.loaders(self._positions())
            looks = self._look()
            for name, look in looks.items():
                if look.moving and not look.heavy:
                    letter.name(name, tree.copy(self._values[name], self._leaf))
            self._send(letter, looks, subject.step + 1, "F")
        except Exception as error:
            self._stop(error)
        self.cost += time.perf_counter() - began

    def _send(
        self, letter: state_record.Letter, looks: dict[str, _Look], step: int, phase: mailbox.Phase
    ) -> None:
        number, room = 0, _BUFFERS
        for name, look in looks.items():
            for part in look.modules:
                room -= _buffers(letter, number, name, part, room)
                number += 1
        self.box.write(step, phase, letter.pieces())

    def _stop(self, error: Exception) -> None:
        log.warning(
            "This rank can no longer record its last state: %s. If killed, its small state is taken "
            "from others.",
            error,
        )
        self._first.remove()
        self.box.close()

    def _look(self) -> dict[str, _Look]:
        """What is in each value. Read again only where the value is another one, or a container, which may
        hold others now."""
        found = {}
        for name, value in self._values.items():
            known = self._looks.get(name)
            if known is None or known[0] is not value or isinstance(value, _CONTAINERS):
                known = self._looks[name] = (value, _Look(value, self._known))
            found[name] = known[1]
        return found


_CONTAINERS = (dict, list, tuple, collections.deque)


class _Look:
    """What is in a value: modules, in the order of the document; whether there is an optimizer; whether
    something moves on with the forward (the position of a loader, a generator)."""

    def __init__(self, value: object, known: parts.PartLookup) -> None:
        self.modules: list[modules.ModulePart] = []
        self.heavy = False
        self.moving = False
        for part in _parts(value, known):
            if isinstance(part, modules.ModulePart):
                self.modules.append(part)
            self.heavy = self.heavy or isinstance(part.value, torch.nn.Module | torch.optim.Optimizer)
            self.moving = self.moving or part.tag in ("loader", "generator")


def _parts(value: Any, known: parts.PartLookup, depth: int = 0) -> Iterator[parts.Part]:
    if type(value) in _SCALARS or depth > 20:
        return
    if isinstance(value, _CONTAINERS):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _parts(item, known, depth + 1)
    elif (part := known.of(value)) is not None:
        yield part


def _buffers(letter: state_record.Letter, number: int, name: str, part: modules.ModulePart, room: int) -> int:
    """Put a module's buffers into a letter; the bytes they take. They are read live: copied they are by the
    write."""
    found = part.structure
    if not found.plain or found.extras:
        letter.leave_out(name, "a module in it makes up its own state")
        return 0
    taken = 0
    for key, owner, place in found.buffers:
        buffer = owner.get(place)
        if buffer is None or placement.is_dtensor(buffer):  # a shared piece is not the rank's own
            continue
        if buffer.device.type != "cpu" or not buffer.is_contiguous() or taken + buffer.nbytes > room:
            letter.leave_out(name, "its buffers are on a device, too large, or not in one piece")
            continue
        letter.buffer(number, key, buffer, dtypes.stored_as(buffer.dtype, tuple(buffer.shape)))
        taken += buffer.nbytes
    return taken
