"""Whether a folder is on the disk that was meant, as far as anybody can tell.

A mount point that nothing is mounted on is an ordinary folder of the disk below. Nobody can know what was meant, but three things tell:
the folder above is not there either; fstab names a disk for this place, and it is not mounted; or the folder is on another file system
than a moment ago.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

FSTAB = Path("/etc/fstab")
MOUNTED = Path("/proc/self/mountinfo")


class Missing(Exception):
    """The disk is not there."""


def check(folder: Path, device: int | None) -> int:
    """Have the folder, and return the device that it is on; `device` is what this returned before. Only the folder itself is made, not
    the one above it. Missing where its disk is."""
    try:
        found = os.stat(folder).st_dev
    except FileNotFoundError:
        found = _make(folder, device)
    if device is None:
        _check_table(folder)
    elif found != device:
        raise Missing(
            f"it is on another file system than before: its disk is not mounted any more. Mount it again (findmnt -T {folder})"
        )
    return found


def _make(folder: Path, device: int | None) -> int:
    above = folder.parent
    if not above.is_dir():
        raise Missing(f"{above} does not exist. Is its disk mounted (findmnt)? If it is: mkdir -p {folder}")
    _check_table(folder)
    if device is not None and os.stat(above).st_dev != device:
        raise Missing(f"it is gone, and {above} is on another file system than it was. Mount its disk again (findmnt -T {folder})")
    folder.mkdir(exist_ok=True)
    return os.stat(folder).st_dev


def _check_table(folder: Path) -> None:
    """What fstab says belongs here is here."""
    mounted = {_unescaped(line.split()[4]) for line in _lines(MOUNTED) if len(line.split()) > 4}
    if not mounted:
        return
    resolved = folder.resolve()
    for line in _lines(FSTAB):
        words = line.split("#")[0].split()
        point = _unescaped(words[1]) if len(words) >= 3 else ""
        if point.startswith("/") and point != "/" and point not in mounted and resolved.is_relative_to(point):
            raise Missing(f"{FSTAB} names a disk for {point}, and none is mounted there. Mount it: mount {point}")


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(errors="surrogateescape").splitlines()
    except OSError:
        return []


def _unescaped(text: str) -> str:
    return re.sub(r"\\([0-7]{3})", lambda found: chr(int(found[1], 8)), text)
