"""The ranks of a run as threads of one process: a directory and a store that they share, each with a catalog,
an engine and a saver of its own. Nothing is faked but death, which is told instead of seen."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from helpers.ranks import states
from helpers.ranks.states import Whole, rows
from lastcall import clock as clocks
from lastcall.core.checkpoint.catalog import Catalog
from lastcall.core.checkpoint.ownership import Fence
from lastcall.core.checkpoint.record import Entry
from lastcall.core.engine.writer import Engine
from lastcall.core.joint.save import JointSave, Order
from lastcall.core.ranks import partition
from lastcall.core.ranks.heartbeat import Peers
from lastcall.core.ranks.peers import Ranks
from lastcall.core.ranks.world import World
from lastcall.core.save.budget import Budget
from lastcall.core.save.saver import Saver
from lastcall.core.store.memory import MemoryStore
from lastcall.core.transfer.directories import Directories
from lastcall.core.transfer.parts import PartTransfer
from lastcall.storage import files as storage
from lastcall.types import Capture, Kind

T = TypeVar("T")
PATIENCE = 30.0  # of the tests; nothing is expected to take anywhere near it
SHAPE = (64, 48)


def sharded(world: int) -> dict[str, Whole]:
    """A tensor that is cut into as many shards as there are ranks, and one that all of them hold."""
    return {
        "w": Whole("F32", SHAPE, rows(SHAPE, world), 1),
        "b": Whole("BF16", (512,), states.grid((512,), {}), 2),
    }


def replicated(world: int) -> dict[str, Whole]:
    return {"w": Whole("F32", SHAPE, states.grid(SHAPE, {}), 1)}


def at_once(*work: Callable[[], T]) -> list[T | BaseException]:
    """All of them, each in a thread: what it returned, or raised. One that hangs fails the test, and keeps
    nothing else waiting."""
    results: dict[int, T | BaseException] = {}

    def caught(place: int) -> None:
        try:
            results[place] = work[place]()
        except BaseException as error:
            results[place] = error

    threads = [threading.Thread(target=caught, args=(place,), daemon=True) for place in range(len(work))]
    for thread in threads:
        thread.start()
    for place, thread in enumerate(threads):
        thread.join(PATIENCE)
        assert not thread.is_alive(), f"number {place} does not end; the others: {results}"
    return [results[place] for place in range(len(work))]


class Told(Peers):
    """Who is dead, because a test says so."""

    def __init__(self, dead: set[int]) -> None:
        super().__init__({}, "")
        self._dead = dead

    def gone(self) -> set[int]:
        return set(self._dead)


@dataclass
class Member:
    """One rank, with what it saves through."""

    rank: int
    catalog: Catalog
    engine: Engine
    saver: Saver
    ranks: Ranks
    joint_save: JointSave
    tensors: Mapping[str, Whole]
    document: dict[str, object] = field(default_factory=dict)

    def capture(self, step: int, writers: Sequence[int], **more: Any) -> Capture:
        groups = states.state(self.tensors, self.rank, self.ranks.size)
        return Capture(step, {"rank": self.rank}, partition.portion(groups, self.rank, writers), **more)

    def save(self, order: Order, step: int = 1, **more: Any) -> Entry:
        return self.joint_save.save(self.capture(step, order.writers, **more), order)


class Company:
    """A directory, a store, and the ranks that share them. `files`: the file system of a rank, where it is a
    faulty one."""

    def __init__(
        self,
        root: Path,
        size: int,
        tensors: Callable[[int], Mapping[str, Whole]] = sharded,
        files: Mapping[int, storage.Files] | None = None,
        clock: clocks.Clock | None = None,
        homes: Sequence[str] = (),
    ) -> None:
        """`homes`: the names of the ranks' directories, where they have more than one; the first is called
        directories.FIRST."""
        self.size = size
        self._homes = homes
        self.root = root
        self.store = MemoryStore()
        self.dead: set[int] = set()
        self._opened = contextlib.ExitStack()
        clock = clock or clocks.Clock()
        for rank in range(size):
            Catalog(self.root_of(rank), storage.Files()).make()
        self.fence = Fence.take(self.root_of(0) / ".lastcall", 1)
        self.members = [
            self._member(rank, tensors(size), (files or {}).get(rank, storage.Files()), clock)
            for rank in range(size)
        ]

    def _member(
        self, rank: int, tensors: Mapping[str, Whole], files: storage.Files, clock: clocks.Clock
    ) -> Member:
        catalog, homes = Catalog(self.root_of(rank), files, rank), Directories(rank, self._homes)
        if homes.opens_it:
            catalog.open(clock)
        self._opened.callback(catalog.close)
        engine = Engine(1, files)
        self._opened.callback(engine.close)
        saver = Saver(catalog, engine, Budget(clock), clock, run="r", incarnation=1, rank=rank)
        fence = Fence(catalog.private, self.fence.token)
        if homes.elsewhere and homes.opens_it:
            fence.adopt(1)
        ranks = Ranks(World(rank, self.size), clock, self.store.clone(), fence.token, peers=Told(self.dead))
        part_transfer = (
            PartTransfer(catalog, self.store, fence.token, rank, "127.0.0.1") if homes.spread else None
        )
        joint_save = JointSave(catalog, saver, fence, ranks, clock, homes, part_transfer)
        if homes.spread:
            self._opened.callback(joint_save.close)
        return Member(rank, catalog, engine, saver, ranks, joint_save, tensors)

    def root_of(self, rank: int) -> Path:
        return self.root / self._homes[rank] if self._homes else self.root

    def save(
        self, order: Order, ranks: Sequence[int] | None = None, step: int = 1, **more: Any
    ) -> list[Entry | BaseException]:
        """These ranks (all) take part, at once."""
        taking = [self.members[rank] for rank in (range(self.size) if ranks is None else ranks)]
        return at_once(*(partial(member.save, order, step, **more) for member in taking))

    def order(self, name: str = "jit-1", writers: Sequence[int] | None = None, **more: Any) -> Order:
        return Order(
            name, Kind.JIT, "SIGTERM", tuple(range(self.size) if writers is None else writers), **more
        )

    def entries(self) -> list[Entry]:
        return self.members[0].catalog.entries()

    def staged(self) -> list[str]:
        staging = self.members[0].catalog.staging
        return sorted(path.name for path in staging.iterdir()) if staging.exists() else []

    def close(self) -> None:
        self._opened.close()


@contextlib.contextmanager
def company(root: Path, size: int, **more: Any) -> Iterator[Company]:
    made = Company(root, size, **more)
    try:
        yield made
    finally:
        made.close()


class Looked:
    """An order's `paused` that never pauses: it tells that somebody waits, and has not found what it waits
    for."""

    def __init__(self) -> None:
        self._seen = threading.Event()

    def __call__(self) -> bool:
        self._seen.set()
        return False

    def wait(self) -> None:
        assert self._seen.wait(PATIENCE)
