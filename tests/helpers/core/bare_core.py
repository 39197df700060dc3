"""The core without a framework: a state made of plain memory, and a directory with everything that saves into
it."""

from __future__ import annotations

import contextlib
import ctypes
import random
import shutil
import subprocess
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import TracebackType

import pytest

from lastcall import clock as clocks
from lastcall import errors, memory
from lastcall.core.checkpoint import catalog
from lastcall.core.checkpoint.record import Entry
from lastcall.core.engine import writer
from lastcall.core.restore import restore
from lastcall.core.save import saver
from lastcall.core.save.budget import Budget
from lastcall.core.subject import Stored
from lastcall.formats import safetensors
from lastcall.storage import files as storage
from lastcall.types import Capture, Group, Kind, TensorEntry


def block(data: bytes) -> memory.HostMemory:
    """Live memory that holds these bytes."""
    owner = ctypes.create_string_buffer(data, len(data)) if data else ctypes.create_string_buffer(1)
    return memory.HostMemory(ctypes.addressof(owner), len(data), owner)


def content(live: memory.HostMemory) -> bytes:
    return ctypes.string_at(live.address, live.nbytes)


def put(live: memory.HostMemory, data: bytes) -> None:
    assert len(data) == live.nbytes
    ctypes.memmove(live.address, data, len(data))


def noise(nbytes: int, seed: int | str) -> bytes:
    return random.Random(seed).randbytes(nbytes)


SIZES = {
    "model": {"w": 20_000, "b": 100, "none": 0},
    "base": {"w": 30_000},
    "optimizer": {"m": 25_000, "v": 8192},
}
RANKS = {"model": 0, "base": 0, "optimizer": 2}


class State:
    """Named tensors in named groups, and one number: a Restorable that needs no framework."""

    loads_by_itself = False

    def __init__(
        self,
        seed: int = 0,
        sizes: Mapping[str, Mapping[str, int]] = SIZES,
        frozen: tuple[str, ...] = ("base",),
    ) -> None:
        self.tensors = {
            group: {name: block(bytes(n)) for name, n in names.items()} for group, names in sizes.items()
        }
        self.value: object = None
        self.frozen = frozen
        self.groups = tuple(
            Group(
                group,
                tuple(TensorEntry(name, "U8", (live.nbytes,), live) for name, live in names.items()),
                group in frozen,
                RANKS.get(group, 1),
            )
            for group, names in self.tensors.items()
        )
        self.prepared = 0
        self.on_prepare: Callable[[], None] = lambda: None
        self.on_finish: Callable[[], None] = lambda: None
        for group in self.tensors:
            self.change(group, seed)

    def change(self, group: str, seed: int) -> None:
        for name, live in self.tensors[group].items():
            put(live, noise(live.nbytes, f"{group} {name} {seed}"))

    def step(self, number: int) -> None:
        """What training would do: everything changes that is not frozen."""
        self.value = number
        for group in self.tensors:
            if group not in self.frozen:
                self.change(group, 1000 + number)

    def capture(self, step: int, **more: object) -> Capture:
        return Capture(step, {"value": self.value}, self.groups, **more)  # type: ignore[arg-type]

    def contents(self) -> dict[str, object]:
        found: dict[str, object] = {
            f"{group}/{name}": content(live)
            for group, names in self.tensors.items()
            for name, live in names.items()
        }
        return {**found, "value": self.value}

    def prepare(self, document: dict[str, object], stored: Stored) -> Loading:
        self.prepared += 1
        self.on_prepare()
        targets: dict[str, dict[str, memory.HostMemory]] = {}
        for group, names in stored.items():
            for name, there in names.items():
                live = self.tensors.get(group, {}).get(name)
                if live is None or live.nbytes != there.end - there.begin:
                    raise errors.MismatchError(f"{group}/{name} does not fit")
                targets.setdefault(group, {})[name] = live
        return Loading(self, document, targets)


class Loading:
    whole = False
    saved_step = None

    def __init__(
        self, state: State, document: dict[str, object], targets: dict[str, dict[str, memory.HostMemory]]
    ) -> None:
        self._state = state
        self._document = document
        self.targets = targets

    def finish(self) -> None:
        self._state.on_finish()
        self._state.value = self._document["value"]


class World:
    """A directory that is ours, with an engine and a saver."""

    def __init__(
        self,
        root: Path,
        files: storage.Files | None = None,
        clock: clocks.Clock | None = None,
        threads: int = 2,
    ) -> None:
        self.clock = clock or clocks.Clock()
        self.files = files or storage.Files()
        self.catalog = catalog.Catalog(root, self.files)
        self.catalog.open(self.clock)
        self.engine = writer.Engine(threads, self.files)
        self.budget = Budget(self.clock)
        self.saver = saver.Saver(self.catalog, self.engine, self.budget, self.clock, run="r", incarnation=1)
        entries = self.catalog.entries()
        self.saver.follow(entries, entries[0] if entries else None)

    def save(self, state: State, step: int, kind: Kind = Kind.JIT, **request: object) -> Entry:
        return self.saver.save(state.capture(step), saver.Request(kind, "test", **request))  # type: ignore[arg-type]

    def restore(self, state: State) -> Entry | None:
        return restore.newest(self.catalog, self.engine, state)

    def __enter__(self) -> World:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.engine.close()
        self.catalog.close()


def restored(root: Path) -> dict[str, object]:
    """What a new incarnation would start with."""
    found = State()
    with World(root) as again:
        again.catalog.clean()
        assert again.restore(found) is not None
    return found.contents()


@contextlib.contextmanager
def mounted(kind: str, options: str, at: Path) -> Iterator[Path]:
    """A file system of its own for a test; skips the test where mounting is not allowed."""
    at.mkdir()
    if not shutil.which("mount"):
        pytest.skip("there is no mount command here")
    done = subprocess.run(["mount", "-t", kind, "-o", options, kind, str(at)], capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"mounting a {kind} is not possible here: {done.stderr.strip()}")
    try:
        yield at
    finally:
        subprocess.run(["umount", str(at)], check=True, capture_output=True)


def header_of(path: Path) -> dict[str, safetensors.Stored]:
    return safetensors.parse(safetensors.read_header(path), path.stat().st_size)[0]


def flip(path: Path, position: int) -> None:
    """Damage one byte (negative: from the end)."""
    with path.open("r+b") as file:
        file.seek(position, 0 if position >= 0 else 2)
        byte = file.read(1)
        file.seek(-1, 1)
        file.write(bytes([byte[0] ^ 0x40]))
