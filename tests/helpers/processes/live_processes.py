"""What the kernel says of all processes that run. They may end while they are looked at."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path


def files(name: str) -> Iterator[tuple[int, bytes]]:
    """The number of each process, and what is in this file of it."""
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                yield int(entry.name), (entry / name).read_bytes()
            except OSError:  # it is gone, or a zombie
                continue


def stats() -> Iterator[tuple[int, list[str]]]:
    """The fields of `stat` behind the name: the state, the parent, the group, the session and so on."""
    for pid, content in files("stat"):
        yield pid, content.decode(errors="replace").rpartition(")")[2].split()
