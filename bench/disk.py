"""Files: made durable, evicted, removed, and the space for them checked beforehand."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

GB = 1e9
_SPARE = 1.1  # of what is needed: journals, metadata, and a file system that is never filled to the brim


class NoSpace(Exception):
    """The disk has no room for the benchmark."""


def require(folder: Path, nbytes: float) -> None:
    free = shutil.disk_usage(folder).free
    needed = int(nbytes * _SPARE)
    if free < needed:
        raise NoSpace(
            f"this benchmark needs {needed / GB:.1f} GB free in {folder}, and {free / GB:.1f} GB are."
            " Use --dir to name a folder on another disk, or a smaller --size."
        )


def fsync(path: Path) -> None:
    """Make a file's bytes, or a directory's names, durable."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def files(folder: Path) -> list[Path]:
    return [path for path in sorted(folder.rglob("*")) if path.is_file() and not path.is_symlink()]


def evict(folder: Path) -> None:
    """Drop the files from the page cache, so that the next read comes from the disk."""
    for path in files(folder):
        fd = os.open(path, os.O_RDONLY)
        try:
            os.fsync(fd)  # dirty pages stay where they are
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(fd)


def drop_caches() -> None:
    """Drop the page cache of the whole machine; needs root."""
    os.sync()
    Path("/proc/sys/vm/drop_caches").write_text("3")


def clear(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def kind_of(folder: Path) -> str:
    """The type of the file system a folder lies on ("ext4"), from the mount that is the longest prefix of its
    path."""
    wanted = str(folder.resolve()) + "/"
    best, kind = "", "unknown"
    for line in Path("/proc/self/mounts").read_text().splitlines():
        _, mount, name, *_ = line.split()
        prefix = mount.rstrip("/") + "/"
        if wanted.startswith(prefix) and len(prefix) >= len(best):
            best, kind = prefix, name
    return kind
