"""Runs a script on a disk that takes its time.

slow_disk.py SCRIPT [ARGUMENT ...]

SLOW_DISK   the first checkpoint file becomes durable when this file appears in the working directory, and not
            before
NO_LOCKS    1: a file system without locks
IMPATIENT   1: who holds the directory and has not said that it leaves is not waited for
"""

from __future__ import annotations

import errno
import fcntl
import os
import runpy
import sys
import time

from lastcall.core.startup import takeover
from lastcall.storage import files as storage

plain = storage.Files.fsync
waited = False


def slow(self: storage.Files, fd: int) -> None:
    global waited
    if not waited and "/staging/" in os.readlink(f"/proc/self/fd/{fd}"):
        waited = True
        print("waiting for the disk", flush=True)
        while not os.path.exists(os.environ["SLOW_DISK"]):
            time.sleep(0.01)
    plain(self, fd)


def refuse(*_: object) -> None:
    raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))


if os.environ.get("SLOW_DISK"):
    storage.Files.fsync = slow  # type: ignore[method-assign]
if os.environ.get("NO_LOCKS"):
    fcntl.lockf = fcntl.fcntl = refuse  # type: ignore[assignment]
if os.environ.get("IMPATIENT"):
    takeover.PATIENCE = 0.0
del sys.argv[0]
runpy.run_path(sys.argv[0], run_name="__main__")
