"""An exclusive lock on a file, for as long as this process lives.

The lock belongs to the open file (F_OFD_SETLK), not to the process: POSIX locks are dropped as soon as *any*
descriptor of the file is closed in the process, and any copy of the directory (shutil.copytree, push_to_hub,
log_artifacts) opens and closes every file in it. A forked child shares the open file, and would keep the lock
of a killed parent (DataLoader workers outlive it): children close it. Where the platform has no such locks, a
POSIX lock is used. The two kinds exclude each other.

Discarded: flock. It is no lock between machines on NFS of old, nor does it keep out the POSIX locks of older
versions of lastcall.
"""

from __future__ import annotations

import errno
import fcntl
import os
import struct

_open: set[int] = set()  # descriptors of locked files in this process


class Lock:
    """A lock that is held. Only the process that took it holds it: a forked child does not."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self._pid = os.getpid()
        _open.add(fd)

    @property
    def held(self) -> bool:
        return self._pid == os.getpid() and self.fd in _open

    def release(self) -> None:
        if self.held:
            _open.discard(self.fd)
            os.close(self.fd)


def take(fd: int) -> bool:
    """Lock the file, which is open for writing. False if another process has locked it; OSError if the file
    system has no locks."""
    try:
        _set(fd)
    except OSError as error:
        if error.errno in (errno.EACCES, errno.EAGAIN):
            return False
        raise
    return True


def _set(fd: int) -> None:
    command = getattr(fcntl, "F_OFD_SETLK", None)
    if command is not None:
        try:
            # struct flock: type, whence, start, length (0: to the end), and a process number, which must be 0
            fcntl.fcntl(fd, command, struct.pack("hhqqi4x", fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0))
            return
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP):
                raise
    fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)


def _let_go_in_child() -> None:
    for fd in _open:
        try:
            os.close(fd)
        except OSError:
            continue
    _open.clear()


os.register_at_fork(after_in_child=_let_go_in_child)
