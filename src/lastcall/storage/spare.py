"""Space kept ready: files whose blocks are already written, so that the next checkpoint need not allocate.

Overwriting written blocks is 1.5 to 1.8 times as fast as new ones (ext4 converts unwritten extents as it
goes), and space that is already allocated cannot run out at the worst moment. A spare is always a file that
nothing else links to or has open.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
from pathlib import Path

from lastcall.storage import files as storage

_F_SETSIG = 10  # Linux; the fcntl module does not export them before 3.13
_F_SETLEASE = 1024
_LOCAL = frozenset({"ext2", "ext3", "ext4", "xfs", "btrfs", "f2fs", "tmpfs"})


class SparePool:
    """The folder `.lastcall/spare`. Every method may fail safely: a missing spare only costs time."""

    def __init__(self, folder: Path, files: storage.Files) -> None:
        self._folder = folder
        self._files = files

    def sizes(self) -> list[int]:
        return sorted(size for _, size in self._all())

    def take(self, size: int, to: Path) -> bool:
        """Move the best fitting spare to `to`. It still contains old bytes: the caller overwrites them and
        truncates the rest."""
        # The smallest that is large enough; failing that, the largest.
        by_fit = sorted(self._all(), key=lambda spare: (spare[1] < size, abs(spare[1] - size)))
        for path, _ in by_fit:
            try:
                if not free(path):  # a backup may have opened it since it was added
                    continue
                self._files.rename(path, to)
            except OSError:
                return False
            return True
        return False

    def give(self, path: Path, *, fresh: bool = False) -> bool:
        """Keep a file that is no longer needed as a spare. False (and the file stays) if something else links
        to or reads it, or may do so unseen, unless the file is `fresh`: created for this, never a part of a
        checkpoint. The caller must have made sure that no process can still open it by name."""
        try:
            if not os.path.lexists(self._folder):
                self._files.mkdir(self._folder)
            if self._folder.is_symlink() or not (fresh or sees_all_readers(path)) or not free(path):
                return False
            self._files.rename(path, storage.first_free(self._folder, (f"spare-{n}" for n in range(10_000))))
        except OSError:
            return False
        return True

    def trim(self, count: int, nbytes: int) -> None:
        """Keep at most `count` spares and about `nbytes` bytes, the largest first."""
        kept = total = 0
        for path, size in sorted(self._all(), key=lambda spare: -spare[1]):
            if kept < count and total + size <= nbytes:
                kept, total = kept + 1, total + size
            else:
                with contextlib.suppress(OSError):
                    self._files.unlink(path)

    def clear(self) -> int:
        """Free the space. Returns the bytes freed."""
        freed = sum(self.sizes())
        self.trim(0, 0)
        return freed

    def _all(self) -> list[tuple[Path, int]]:
        if self._folder.is_symlink():  # its target is not ours to overwrite
            return []
        try:
            with os.scandir(self._folder) as entries:
                return [
                    (Path(entry.path), entry.stat(follow_symlinks=False).st_size)
                    for entry in entries
                    if entry.is_file(follow_symlinks=False)
                ]
        except OSError:
            return []


def free(path: Path) -> bool:
    """Whether this name is the only link to the file: overwriting it changes nothing that another process can
    see."""
    return os.lstat(path).st_nlink == 1 and unread(path)


def sees_all_readers(path: Path) -> bool:
    """Whether this file's file system tracks every reader in its leases. An overlay loses track of a process
    that has mapped a file and closed it (as safetensors and torch.load(mmap=True) do), a network file system
    of other machines."""
    try:
        fd = os.open(path, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            facts = Path(f"/proc/self/fdinfo/{fd}").read_text()
        finally:
            os.close(fd)
        number = next(line.split()[1] for line in facts.splitlines() if line.startswith("mnt_id:"))
        mounts = [line.split() for line in Path("/proc/self/mountinfo").read_text().splitlines()]
        mount = next(mount for mount in mounts if mount[0] == number)
        return mount[mount.index("-") + 1] in _LOCAL
    except (OSError, ValueError, StopIteration):
        return False


def unread(path: Path) -> bool:
    """Whether no process has this file open or mapped. A write lease is only granted then; a file system
    without leases counts as no."""
    try:
        fd = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        # A process that opens the file while we hold the lease makes the kernel signal us: with SIGIO, which
        # kills a process.
        fcntl.fcntl(fd, _F_SETSIG, signal.SIGURG)
        fcntl.fcntl(fd, _F_SETLEASE, fcntl.F_WRLCK)
        fcntl.fcntl(fd, _F_SETLEASE, fcntl.F_UNLCK)
    except OSError:
        return False
    finally:
        os.close(fd)
    return True
