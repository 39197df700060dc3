"""A directory and the place of its mirror, a folder that can be watched, held up, and made to fail."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from types import TracebackType

import pytest

from helpers.core.bare_core import State, World
from helpers.processes import forkserver as nursery
from lastcall import clock as clocks
from lastcall import errors
from lastcall.core.checkpoint import record as records
from lastcall.core.checkpoint.record import Entry
from lastcall.core.checkpoint.retention import Keep
from lastcall.core.mirror.mirror import Mirror
from lastcall.core.save import saver
from lastcall.events import EventLog
from lastcall.storage import objects
from lastcall.storage.objects import FolderStore, Moved, nothing
from lastcall.types import Kind

PATIENCE = 30.0  # of the tests; nothing is expected to take anywhere near it


def copies(place: Path) -> dict[str, str]:
    """For processes whose checkpoints go there."""
    return {"LASTCALL_MIRROR": f"file://{place}"}


class Watched(FolderStore):
    """`calls` says what was asked of it; `hook` is called before each of them, and may wait or raise."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.root = root
        self.calls: list[tuple[str, str]] = []
        self.hook: Callable[[str, str], None] = lambda operation, name: None

    def _saw(self, operation: str, name: str) -> None:
        self.calls.append((operation, name))
        self.hook(operation, name)

    def names(self, prefix: str = "") -> dict[str, int]:
        self._saw("names", prefix)
        return super().names(prefix)

    def read(self, name: str, largest: int) -> bytes | None:
        self._saw("read", name)
        return super().read(name, largest)

    def write(self, name: str, data: bytes) -> None:
        self._saw("write", name)
        super().write(name, data)

    def send(self, path: Path, name: str, moved: Moved = nothing, *, threads: bool = True) -> None:
        self._saw("send", name)
        super().send(path, name, moved, threads=threads)

    def fetch(self, name: str, path: Path, moved: Moved = nothing) -> None:
        self._saw("fetch", name)
        super().fetch(name, path, moved)

    def copy(self, old: str, new: str) -> None:
        self._saw("copy", new)
        super().copy(old, new)

    def remove(self, names: Iterable[str]) -> None:
        for name in names:
            self._saw("remove", name)
            super().remove([name])

    def done(self, operation: str) -> list[str]:
        """The names that this was asked for."""
        return [name for what, name in self.calls if what == operation]

    def checkpoints(self) -> list[str]:
        """The whole ones."""
        return sorted(path.parent.name for path in self.root.glob(f"checkpoint-*/{records.NAME}"))

    def folders(self) -> list[str]:
        return sorted(path.name for path in self.root.glob("checkpoint-*"))


class Held:
    """A hook that keeps whoever comes by with such a call waiting, until it is let go."""

    def __init__(self, operation: str, part: str) -> None:
        self._wanted = operation, part
        self.there = threading.Event()
        self._free = threading.Event()

    def __call__(self, operation: str, name: str) -> None:
        if operation == self._wanted[0] and self._wanted[1] in name:
            self.there.set()
            assert self._free.wait(PATIENCE)

    def wait(self) -> None:
        assert self.there.wait(PATIENCE)

    def let_go(self) -> None:
        self._free.set()


class Failing:
    """A hook that raises at so many such calls, and then no more."""

    def __init__(
        self,
        operation: str,
        part: str = "",
        times: int = 1,
        error: type[errors.StorageError] = errors.StorageError,
    ) -> None:
        self._wanted = operation, part
        self._left = times
        self._error = error
        self._lock = threading.Lock()

    def __call__(self, operation: str, name: str) -> None:
        with self._lock:
            if operation == self._wanted[0] and self._wanted[1] in name and self._left > 0:
                self._left -= 1
                raise self._error(f"{name}: the network is down")


class Life:
    """One incarnation of a run that needs no framework, in a directory with a mirror."""

    def __init__(
        self,
        root: Path,
        place: FolderStore,
        *,
        clock: clocks.Clock | None = None,
        limit: int | None = None,
        run: str = "",
    ) -> None:
        self.world = World(root, clock=clock)
        self.root = root
        self.catalog = self.world.catalog
        self.catalog.run, self.world.saver.run = run, run or "r"
        self.keep = Keep(limit)
        events = EventLog(self.catalog.private / "events-0.jsonl", self.world.clock)
        self.mirror = Mirror(place.url, self.catalog, self.world.clock, events, lambda: self.keep)
        self.state = State()

    def start(self, told: Callable[[], bool] = lambda: False) -> bool:
        """As an incarnation does: fetch, then go on after what is there."""
        if not self.mirror.take_over(told):
            return False
        self.catalog.clean()
        entry = self.world.restore(self.state)
        self.world.saver.follow(self.catalog.entries(), entry)
        return True

    @property
    def resumed(self) -> object:
        return self.state.value

    def save(self, step: int, kind: Kind = Kind.PERIODIC, **more: object) -> Entry:
        self.state.step(step)
        return self.world.saver.save(self.state.capture(step, **more), saver.Request(kind, "test"))

    def copied(self, step: int, kind: Kind = Kind.PERIODIC, **more: object) -> Entry:
        entry = self.save(step, kind, **more)
        self.mirror.push(entry)
        assert self.mirror.settle()
        return entry

    def __enter__(self) -> Life:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.world.__exit__(kind, error, trace)


def watched(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Watched:
    """The place that every mirror of the test gets."""
    place = Watched(folder)
    monkeypatch.setattr(objects, "opened", lambda url, keys=None: place)
    return place


def until(condition: Callable[[], bool]) -> None:
    nursery.until(condition, "what another thread does", PATIENCE)
