"""A subject that needs no framework: a dict of numbers, and what a loop counts."""

from __future__ import annotations

import random
from array import array
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from helpers.core.staged import Staged, quiet, reach
from lastcall import errors, memory
from lastcall.core import session as sessions
from lastcall.core.context import RunContext
from lastcall.core.notice.inbox import Inbox
from lastcall.core.subject import Stored
from lastcall.core.sync.gate import Gate
from lastcall.formats import tree
from lastcall.settings import PeriodicCheckpointConfig
from lastcall.types import Capture, Group, TensorEntry

GROUP = "numbers"
EPOCH = 4  # steps


@dataclass(frozen=True)
class Small:
    """What changes outside of a mutation, as it was at a boundary."""

    step: int
    epoch: int
    drawn: tuple[object, ...]


class Numbers:
    """`weights` change in a mutation, and nowhere else; the generator in between."""

    loads_by_itself = False
    step_seconds: float | None = None

    def __init__(self, weights: Mapping[str, array[float]], generator: random.Random) -> None:
        self.weights, self.generator = weights, generator
        self.gate = Gate()
        self.step = self.epoch = 0
        self.rank = 0
        self.asked = True
        self._mark = 0  # the gate's steps at the last boundary
        self._copy: Small | None = None
        self._folder: Path | None = None

    def arrive(self) -> None:
        """A boundary: every one is copied, which costs nothing."""
        self._mark, self._copy = self.gate.steps, self._now()
        if self._folder is not None:
            text = f"{self.step} {self.generator.random()}"
            (self._folder / f"rank-{self.rank}").write_text(text)

    @property
    def boundary(self) -> tuple[int, int]:
        return self.step, self.epoch

    @property
    def ordinal(self) -> int:
        return self.step + self.epoch

    @property
    def settled(self) -> bool:
        return self.gate.steps == self._mark

    def numbers(self) -> dict[str, float]:
        return {"sum": sum(sum(values) for values in self.weights.values())}

    # ---- what it holds -----------------------------------------------------------------------------------

    def _now(self) -> Small:
        return Small(self.step, self.epoch, self.generator.getstate())

    def _assemble(self, small: Small) -> Capture:
        entries = tuple(
            TensorEntry(name, "F64", (len(values),), _memory(values)) for name, values in self.weights.items()
        )
        document = {
            "step": small.step,
            "epoch": small.epoch,
            "drawn": tree.encode(small.drawn, "drawn", tree.refuse),
        }
        return Capture(
            small.step, document, (Group(GROUP, entries, rank=0),) if entries else (), metrics=self.numbers()
        )

    def capture(self) -> Capture:
        return self._assemble(self._now())

    outline = capture

    def rescue(self) -> Capture:
        assert self._copy is not None
        if not self.settled:
            live = self._assemble(replace(self._now(), step=self.step + 1))
            return replace(live, exact=False, because="a step is not complete")
        mark = self.gate.steps
        return replace(self._assemble(self._copy), still=lambda: self.gate.steps == mark)

    def behind_gate(self) -> Capture:
        self._copy = self._now()
        return self.rescue()

    def untouched(self) -> bool:
        return self._copy is not None and self.settled and self.gate.depth == 0

    def unrescuable(self) -> str:
        return "" if self._copy is not None else "there was no boundary yet"

    # ---- what it is asked --------------------------------------------------------------------------------

    def copy_every_boundary(self) -> None: ...
    def retry_copy(self) -> None: ...

    def stop_at_next_boundary(self) -> None:
        self.asked = True

    # ---- many ranks: nothing is shared -------------------------------------------------------------------

    def join(self, run: str, incarnation: int, folder: Path) -> None:
        self._folder = folder

    def holdings(self) -> tuple[tuple[int, ...], ...]:
        return ()

    def unreplicated_digest(self) -> str:
        return repr({name: list(values) for name, values in self.weights.items()})

    def part_of(self, rank: int, step: int, mine: Capture) -> Capture | None:
        return None

    # ---- restore -----------------------------------------------------------------------------------------

    def prepare(self, document: dict[str, object], stored: Stored) -> Restore:
        wanted = {name: ("F64", (len(values),)) for name, values in self.weights.items()}
        found = {name: (one.dtype, one.shape) for name, one in stored.get(GROUP, {}).items()}
        if wanted != found:
            raise errors.MismatchError(f"the checkpoint has {found}, and this run {wanted}")
        return Restore(self, document)


class Restore:
    whole = False

    def __init__(self, subject: Numbers, document: dict[str, Any]) -> None:
        self._subject, self._document = subject, document
        self.saved_step: int | None = document["step"]
        self.targets = {GROUP: {name: _memory(values) for name, values in subject.weights.items()}}

    def finish(self) -> None:
        subject, document = self._subject, self._document
        subject.step, subject.epoch = document["step"], document["epoch"]
        drawn: Any = tree.decode(document["drawn"], tree.refuse_tag)
        subject.generator.setstate(drawn)


def _memory(values: array[float]) -> memory.HostMemory:
    address, count = values.buffer_info()
    return memory.HostMemory(address, count * values.itemsize, values)


class NumbersLoop(Staged):
    """The loop around them, and a session."""

    reports = frozenset({"sum"})

    def __init__(self, root: Path, **how: Any) -> None:
        super().__init__(root, **how)
        drawn = random.Random(self.seed)
        sizes = {"a": 5 if self.wide else 3, "b": 700}
        self.weights = {
            name: array("d", [drawn.random() for _ in range(size)]) for name, size in sizes.items()
        }
        self.generator = random.Random(self.seed + 1)

    def live(self) -> Mapping[str, object]:
        return {**self.weights, "generator": self.generator.getstate()}

    def be(self, rank: int, size: int) -> None:
        assert isinstance(self.subject, Numbers)
        self.subject.rank = rank

    def train(self) -> None:
        subject = Numbers(self.weights, self.generator)
        context = RunContext.create(self.root, subject, quiet(), PeriodicCheckpointConfig(environ={}))
        subject.gate = context.gate
        session = sessions.begin(context, Inbox.of_run(context))
        try:
            self._loop(subject)
        except Exception as error:
            raise session.failed(error) or error from None
        finally:
            session.stop()

    def _loop(self, subject: Numbers) -> None:
        self._boundary(subject)
        while True:
            self._pass(subject.gate)
            subject.step += 1
            self._boundary(subject)
            if subject.step % EPOCH == 0:
                subject.epoch += 1
                self._boundary(subject)

    def _pass(self, gate: Gate) -> None:
        moved = self.generator.random()
        reach("forward")
        gate.enter()
        self.weights["a"][0] += moved
        reach("mutation")
        self.weights["b"][-1] -= moved
        gate.leave()
        reach("stepped")

    def _boundary(self, subject: Numbers) -> None:
        subject.arrive()
        if subject.asked:
            subject.asked = False
            self.session.at_boundary()
