"""Where a loader stands: the passes over it, and what is needed to make the latest one again.

Kept apart from the loader itself: iterators hold the ledger, and a ledger that held the loader would close a cycle
around persistent workers, which then would live until the next garbage collection instead of ending with the loader.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from lastcall import errors
from lastcall.adapters.torch.data import inside as workers
from lastcall.adapters.torch.data import randomness as rng

VERSION = 1
KIND = "loader"

FRESH = "fresh"  # nothing was begun yet
INSIDE = "inside"  # in a pass whose end was not seen
BETWEEN = "between"  # the latest pass came to its end
LEFT = "left"  # the latest pass was left before its end (`break`), and its iterator is gone

Facts = tuple[int | None, int | None, int, bool]  # batches, batch size, workers, iterable
Sampler = tuple[int, int, int, bool, bool]  # of a DistributedSampler: replicas, samples, seed, shuffle, drop_last
# A moment of a loader: what may have changed a batch later. Resume, passes begun, pass; phase, delivered, failed, draw, workers of the
# pass; generators. A plain tuple: one is made at every batch, and a class would double what that costs.
Noted = tuple[Any, ...]


class Pool:
    """The workers of one iterator: the generators that seeded them, and their own as of the last delivered batches."""

    def __init__(self, created: rng.State, saved: Sequence[rng.Parts | None], persistent: bool) -> None:
        self.created = created
        self.workers = list(saved)
        self.persistent = persistent
        self._ended: set[int] = set()

    def absorb(self, message: object) -> None:
        if isinstance(message, workers.Envelope):
            # An ended worker's last word may overtake its batches, which wait for their turn.
            if message.worker not in self._ended:
                self._merge(message.worker, message.parts)
        elif isinstance(message, workers.WorkerStop):
            self._ended.add(message.worker_id)
            self._merge(message.worker_id, message.parts)

    def restart(self) -> None:
        """The next pass of persistent workers begins."""
        self._ended.clear()

    def _merge(self, worker: int, parts: rng.Parts) -> None:
        known = self.workers[worker] or (None, None, None)
        torch_part, python_part, numpy_part = (new if new is not None else old for new, old in zip(parts, known, strict=True))
        self.workers[worker] = (torch_part, python_part, numpy_part)


@dataclass(eq=False)
class Pass:
    """One iteration over the loader."""

    facts: Facts
    epochs: tuple[int, ...]  # what the samplers' set_epoch() was told
    begin: rng.State  # before the index sampler's iterator was made
    draw: rng.State | None = None  # before its first draw; None until then
    delivered: int = 0
    failed: int = 0  # batches that raised: their indices are used up all the same
    phase: str = INSIDE
    pool: Pool | None = None
    workers_at_begin: tuple[rng.Parts | None, ...] = ()
    sampler: Sampler | None = None

    @property
    def iterable(self) -> bool:
        return self.facts[3]


@dataclass(frozen=True)
class Resume:
    """A loaded position that no iterator has taken up yet."""

    state: dict[str, Any]

    @property
    def phase(self) -> str:
        return str(self.state["phase"])

    @property
    def persistent(self) -> bool:
        pool = self.state["pool"]
        return pool is not None and bool(pool[1])

    @property
    def created(self) -> rng.State:
        pool = self.state["pool"]
        found: rng.State = self.state["begin"] if pool is None else pool[0]
        return found

    def workers(self, count: int) -> list[rng.Parts | None]:
        """Each worker's generators; none if the number of workers changed, since no batch would go to the same one."""
        pool = self.state["pool"]
        saved = [] if pool is None else list(pool[2])
        return saved if len(saved) == count else [None] * count

    def to_pass(self, facts: Facts, pool: Pool | None, sampler: Sampler | None) -> Pass:
        state = self.state
        return Pass(
            facts,
            tuple(state["epochs"]),
            state["begin"],
            state["draw"],
            state["delivered"],
            state["failed"],
            pool=pool,
            workers_at_begin=() if pool is None else tuple(pool.workers),
            sampler=sampler,
        )


@dataclass(eq=False)
class Ledger:
    """All passes over one loader. Of several iterators alive at once, the one begun last is the loader's position."""

    generators: list[Any] = field(default_factory=list)
    begun: int = 0
    followers: int = 0  # trackers attached
    pending: Resume | None = None
    latest: Pass | None = None
    warned: bool = False
    _alive: list[Pass] = field(default_factory=list)

    def begin(self, passage: Pass, resumed: bool = False) -> None:
        self.begun += not resumed  # a resumed pass was counted when it was begun, by another incarnation
        self._alive.append(passage)
        self.latest = passage

    def finish(self, passage: Pass) -> None:
        self._end(passage, BETWEEN)

    def leave(self, passage: Pass) -> None:
        self._end(passage, LEFT)

    def _end(self, passage: Pass, phase: str) -> None:
        if passage.phase != INSIDE:
            return
        passage.phase = phase
        if passage in self._alive:
            self._alive.remove(passage)
        # A peek (`next(iter(loader))`) inside a pass must not make that pass forgotten.
        if self.latest is passage and self._alive:
            self.latest = self._alive[-1]

    def note(self) -> Noted:
        """This moment, for state_of(): taken at every batch, and told only when somebody asks."""
        held = rng.hold_generators(self.generators) if self.generators else ()
        passage = self.latest
        if passage is None:
            return (self.pending, self.begun, None, FRESH, 0, 0, None, (), held)
        pool = passage.pool
        workers = () if pool is None else tuple(pool.workers)
        return (self.pending, self.begun, passage, passage.phase, passage.delivered, passage.failed, passage.draw, workers, held)


def state_of(noted: Noted) -> dict[str, Any]:
    """The position at that moment. Nothing in it changes afterwards."""
    pending, begun, passage, phase, delivered, failed, draw, workers, held = noted
    generators = rng.told_generators(held)
    if pending is not None:
        return {**pending.state, "generators": generators}
    remembered = passage is not None and (phase == INSIDE or (phase == LEFT and _persistent(passage)))
    return {
        "kind": KIND,
        "version": VERSION,
        "begun": begun,
        "phase": phase,
        "delivered": delivered,
        "failed": failed,
        "generators": generators,
        "facts": None if passage is None else passage.facts,
        "epochs": () if passage is None else passage.epochs,
        "begin": passage.begin if remembered else None,
        "draw": draw if remembered else None,
        "pool": None if passage is None else _pool_entry(passage, workers, remembered),
        "sampler": None if passage is None else passage.sampler,  # absent where it was saved before worlds could change
    }


def check(state: dict[str, Any]) -> None:
    if state.get("kind") != KIND or state.get("version") != VERSION:
        raise errors.MismatchError(
            f"The saved data position is of kind {state.get('kind')!r}, version {state.get('version')!r}, but "
            f"this loader needs kind {KIND!r}, version {VERSION}. It was saved with another loader class or "
            f"another release of lastcall: use the same loader class, or leave the loader out of protect() to "
            f"start its data from the beginning."
        )


def _persistent(passage: Pass) -> bool:
    return passage.pool is not None and passage.pool.persistent


def _pool_entry(passage: Pass, delivered: tuple[Any, ...], remembered: bool) -> tuple[Any, ...] | None:
    pool = passage.pool
    if pool is None or not (remembered or pool.persistent):
        return None
    # The batches of an iterable dataset are made again from the start of the pass, so its workers start from there.
    replayed = remembered and passage.iterable
    return (pool.created, pool.persistent, passage.workers_at_begin if replayed else delivered)
