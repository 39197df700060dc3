"""Whether a folder is on the intended disk, as far as can be determined.

An unused mount point is an ordinary folder of the disk below. The intent cannot be known, but three signs
reveal a missing disk: the folder above does not exist either; fstab names a disk for this place, and it is
not mounted; or the folder is on another file system than a moment ago.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

FSTAB = Path("/etc/fstab")
MOUNTED = Path("/proc/self/mountinfo")


class Missing(Exception):
    """The disk is missing."""


def check(folder: Path, device: int | None) -> int:
    """Create the folder if needed, and return its device; `device` is what this returned before. Only the
    folder itself is created, not the one above it. Raises Missing if its disk is missing."""
    try:
        found = os.stat(folder).st_dev
    except FileNotFoundError:
        found = _make(folder, device)
    if device is None:
        _check_table(folder)
    elif found != device:
        raise Missing(
            "it is on another file system than before: its disk is no longer mounted. Mount it "
            f"again (findmnt -T {folder})"
        )
    return found


def _make(folder: Path, device: int | None) -> int:
    above = folder.parent
    if not above.is_dir():
        raise Missing(f"{above} does not exist. Is its disk mounted (findmnt)? If it is: mkdir -p {folder}")
    _check_table(folder)
    if device is not None and os.stat(above).st_dev != device:
        raise Missing(
            f"it is gone, and {above} is on another file system than it was. Mount its disk again "
            f"(findmnt -T {folder})"
        )
    folder.mkdir(exist_ok=True)
    return os.stat(folder).st_dev


def _check_table(folder: Path) -> None:
    """Checks that what fstab lists for this path is mounted."""
    mounted = {_unescaped(line.split()[4]) for line in _lines(MOUNTED) if len(line.split()) > 4}
    if not mounted:
        return
    resolved = folder.resolve()
    for line in _lines(FSTAB):
        words = line.split("#")[0].split()
        point = _unescaped(words[1]) if len(words) >= 3 else ""
        if point.startswith("/") and point != "/" and point not in mounted and resolved.is_relative_to(point):
            raise Missing(
                f"{FSTAB} lists a disk for {point}, but none is mounted there. Mount it: mount {point}"
            )


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(errors="surrogateescape").splitlines()
    except OSError:
        return []


def _unescaped(text: str) -> str:
    return re.sub(r"\\([0-7]{3})", lambda found: chr(int(found[1], 8)), text)
