"""A copy of the state, so that training may continue to change the live one: memory that is allocated and
touched before it is needed.

First touch of new memory runs at 1.4 GB/s, a copy into memory that is already mapped at 14: the arena is kept
and reused.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from lastcall import memory
from lastcall.core.engine.writer import Engine
from lastcall.formats import safetensors
from lastcall.types import Capture, Extent, Group, Source, TensorEntry

log = logging.getLogger("lastcall")
_PIECE = 32 * 1024 * 1024
_ALIGN = safetensors.SECTOR
_P = TypeVar("_P", TensorEntry, Extent)


class Arena:
    """Room for one snapshot. One at a time: the caller does not stage a second before the first is
    written."""

    def __init__(self, allocate: Callable[[int], memory.Buffer] = memory.PageBuffer) -> None:
        self._allocate = allocate
        self._lock = threading.Lock()
        self._buffer: memory.Buffer | None = None
        self._size = 0

    def reserve(self, nbytes: int) -> bool:
        """Make room, ahead of time. False where the memory is not there; the caller then saves without a
        snapshot."""
        with self._lock:
            if self._size >= nbytes:
                return True
            available = available_memory()
            if available is not None and nbytes > 0.8 * (available + self._size):
                return False
            self._buffer, self._size = None, 0
            try:
                self._buffer = self._allocate(nbytes)
            except (MemoryError, OSError, RuntimeError):
                return False
            self._size = nbytes
            return True

    def stage(self, capture: Capture, engine: Engine) -> Capture | None:
        """A copy of the capture that training cannot change. None where there is no room for it."""
        sources = {
            id(source): source for source in capture.sources if not isinstance(source, memory.BytesSource)
        }
        offsets: dict[int, int] = {}
        total = safetensors.PHASE  # the same phase as in the file: the copy can be written from where it lies
        for key, source in sources.items():
            offsets[key] = total
            total += -(-source.nbytes // _ALIGN) * _ALIGN
        if not self.reserve(max(total, _ALIGN)):
            return None
        buffer = self._buffer
        assert buffer is not None
        engine.copy(_copies(sources, offsets, buffer.address))

        def held(source: Source) -> Source:
            place = offsets.get(id(source))
            return (
                source if place is None else memory.HostMemory(buffer.address + place, source.nbytes, buffer)
            )

        def copied(part: _P) -> _P:
            return dataclasses.replace(part, source=held(part.source))

        groups = tuple(
            dataclasses.replace(group, entries=tuple(map(copied, group.entries))) for group in capture.groups
        )
        files = []
        for file in capture.files:
            layout = dataclasses.replace(file.layout, extents=tuple(map(copied, file.layout.extents)))
            files.append(dataclasses.replace(file, layout=layout))
        return dataclasses.replace(capture, groups=groups, files=tuple(files))


def _copies(sources: dict[int, Source], offsets: dict[int, int], address: int) -> list[Callable[[], None]]:
    """Pieces of even size, so that the threads end together; small tensors are bundled, since a task costs
    more than their copy."""
    copies: list[Callable[[], None]] = []
    bundle: list[tuple[Source, int, int, int]] = []
    bundled = 0
    for key, source in sources.items():
        for begin in range(0, source.nbytes, _PIECE):
            length = min(_PIECE, source.nbytes - begin)
            bundle.append((source, address + offsets[key] + begin, begin, length))
            bundled += length
            if bundled >= _PIECE // 2:
                copies.append(functools.partial(_copy, bundle))
                bundle, bundled = [], 0
    if bundle:
        copies.append(functools.partial(_copy, bundle))
    return copies


def _copy(bundle: list[tuple[Source, int, int, int]]) -> None:
    for source, address, begin, length in bundle:
        source.read_into(address, begin, length)


def available_memory() -> int | None:
    """Bytes that may still be allocated, on this machine and in our container, or None where that is
    unknown."""
    known = [left for left in (_left_on_machine(), *_left_in_groups()) if left is not None]
    return min(known, default=None)


def _left_on_machine() -> int | None:
    try:
        with open("/proc/meminfo") as lines:
            for line in lines:
                if line.startswith("MemAvailable:"):
                    return int(line.split()[1]) * 1024
    except OSError:
        pass
    return None


def _left_in_groups(root: Path = Path("/sys/fs/cgroup"), own: Path = Path("/proc/self/cgroup")) -> list[int]:
    """What the limits of our control groups leave: past one of them the kernel kills, whatever the machine
    has."""
    try:
        place = next(line[3:] for line in own.read_text().splitlines() if line.startswith("0::"))
    except (OSError, StopIteration):
        place = "/"
    start = root / place.strip("/")
    groups = [folder for folder in (start, *start.parents) if folder.is_relative_to(root)]
    found = [_left(folder, "memory.max", "memory.current", "inactive_file") for folder in groups]
    found.append(
        _left(root / "memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
    )
    return [left for left in found if left is not None]


def _left(folder: Path, limit: str, used: str, cache: str) -> int | None:
    try:
        # "max" is no number: no limit
        left = int((folder / limit).read_text()) - int((folder / used).read_text())
        stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
        return max(0, left + int(stat[cache]))
    except (OSError, ValueError, KeyError):
        return None


def without(groups: tuple[Group, ...], names: set[str]) -> tuple[Group, ...]:
    return tuple(group for group in groups if group.name not in names)
