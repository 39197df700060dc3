"""Every file operation of a save or a start, behind one class, so that tests can make any of them fail
(lastcall.testing.FaultyFiles).

`Files` is the real implementation: thin, no policy. It holds no state and may be shared by threads.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import itertools
import os
import secrets
import shutil
import stat
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

RWF_DONTCACHE = 0x80  # Linux 6.14: buffered, but the pages are dropped once written
_RENAME_EXCHANGE = 2
_AT_FDCWD = -100
Moved = Callable[[int], None]  # called with the number of further bytes; what it raises ends the transfer
_PROCESS = secrets.token_hex(8)
_numbers = itertools.count()


def own_name() -> str:
    """A unique name in a directory: not taken by another thread, a fork, or a process with the same ID in
    another container or on another machine that shares the directory."""
    return f"{_PROCESS}-{os.getpid()}-{next(_numbers)}"


def nothing(moved: int) -> None:
    """A callback that ignores progress."""


class Files:
    """The local file system."""

    def open(self, path: Path, flags: int, mode: int = 0o644) -> int:
        return os.open(path, flags | os.O_CLOEXEC, mode)

    def close(self, fd: int) -> None:
        os.close(fd)

    def pwrite(self, fd: int, views: Sequence[memoryview], offset: int, flags: int = 0) -> int:
        """May write less than requested, as the system call may; the caller continues from there."""
        return os.pwritev(fd, views, offset, flags)

    def pread(self, fd: int, data: memoryview, offset: int) -> int:
        return os.preadv(fd, [data], offset)

    def fsync(self, fd: int) -> None:
        os.fsync(fd)

    def truncate(self, fd: int, size: int) -> None:
        os.ftruncate(fd, size)

    def allocate(self, fd: int, size: int) -> None:
        if size:
            os.posix_fallocate(fd, 0, size)

    def rename(self, old: Path, new: Path) -> None:
        os.rename(old, new)

    def exchange(self, one: Path, other: Path) -> None:
        """Swap two names in one atomic step. OSError(ENOSYS/EINVAL) where the file system cannot."""
        libc = ctypes.CDLL(None, use_errno=True)
        if not hasattr(libc, "renameat2"):
            raise OSError(errno.ENOSYS, "renameat2 is missing")
        done = libc.renameat2(_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), _RENAME_EXCHANGE)
        if done != 0:
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code), str(one))

    def link(self, old: Path, new: Path) -> None:
        os.link(old, new, follow_symlinks=False)

    def unlink(self, path: Path) -> None:
        os.unlink(path)

    def mkdir(self, path: Path) -> None:
        os.mkdir(path)

    def rmdir(self, path: Path) -> None:
        os.rmdir(path)

    def sync_directory(self, path: Path) -> None:
        """Make the names in a directory durable. Without it a rename may be lost with the power."""
        fd = self.open(path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            self.fsync(fd)
        except OSError as error:
            # some network file systems refuse it and need none
            if error.errno not in (errno.EINVAL, errno.ENOTSUP):
                raise
        finally:
            self.close(fd)

    def free_bytes(self, path: Path) -> int:
        stat = os.statvfs(path)
        return stat.f_bavail * stat.f_frsize

    def free_inodes(self, path: Path) -> int | None:
        """The number of further files possible; None if the file system has no such limit."""
        stat = os.statvfs(path)
        return stat.f_favail if stat.f_files else None


_IOV_MAX = 1024


def write_all(files: Files, fd: int, views: Sequence[memoryview], offset: int, flags: int = 0) -> None:
    """Write everything, continuing after short writes."""
    left = [view for view in views if len(view)]
    while left:
        written = files.pwrite(fd, left[:_IOV_MAX], offset, flags)
        if written <= 0:
            raise OSError(errno.EIO, "a write made no progress")
        offset += written
        while left and written >= len(left[0]):
            written -= len(left.pop(0))
        if written:
            left[0] = left[0][written:]


def write_small(files: Files, path: Path, data: bytes) -> None:
    """Create a small file and make its bytes durable. The name is durable only after sync_directory()."""
    fd = files.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    try:
        write_all(files, fd, [memoryview(data)], 0)
        files.fsync(fd)
    finally:
        files.close(fd)


def make_durable(files: Files, path: Path) -> None:
    """The bytes of a file that another library has written."""
    fd = files.open(path, os.O_RDONLY)
    try:
        files.fsync(fd)
    finally:
        files.close(fd)


def replace_small(path: Path, data: bytes, mode: int = 0o666) -> None:
    """Write a small file and rename it atomically, for concurrent readers. It is written under an
    unpredictable name, so no other user can have placed a link there. `mode` is subject to the umask, as for
    any file."""
    under = path.with_name(f"{path.name}.{own_name()}.tmp")
    fd = os.open(under, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, mode)
    try:
        try:
            write_all(Files(), fd, [memoryview(data)], 0)
        finally:
            os.close(fd)
        os.replace(under, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(under)
        raise


@contextlib.contextmanager
def opened_plain(path: Path) -> Iterator[tuple[int, os.stat_result]]:
    """A plain file, as if hostile: never through a link, never a pipe or a device. OSError if not."""
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        info = os.fstat(fd)
        if not stat.S_ISREG(info.st_mode):
            raise OSError(errno.EINVAL, "not a plain file", str(path))
        yield fd, info
    finally:
        os.close(fd)


def read_plain(path: Path, largest: int) -> bytes:
    """A plain file, as if hostile, and never more than `largest` bytes. OSError if not."""
    with opened_plain(path) as (fd, info), os.fdopen(fd, "rb", closefd=False) as file:
        if info.st_size > largest:
            raise OSError(errno.EFBIG, f"more than {largest} bytes", str(path))
        return file.read(largest)


def remove_tree(files: Files, path: Path) -> None:
    """Remove a folder and what is in it; links are removed, never followed."""
    if path.is_symlink():
        files.unlink(path)
        return
    for entry in list(os.scandir(path)):
        if entry.is_dir(follow_symlinks=False):
            remove_tree(files, Path(entry.path))
        else:
            files.unlink(Path(entry.path))
    files.rmdir(path)


def first_free(parent: Path, names: Iterable[str]) -> Path:
    """The first of these names that is free."""
    return next(path for name in names if not (path := parent / name).exists() and not path.is_symlink())


def copy_file(old: Path, new: Path) -> None:
    """A plain copy (copy_file_range where the kernel can share the blocks)."""
    shutil.copyfile(old, new, follow_symlinks=False)
