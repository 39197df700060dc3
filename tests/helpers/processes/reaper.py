"""A process that outlives the tests by a moment: when they end, however they end, it kills what bears their
mark.

The mark is a variable in the environment. Children inherit it, also those that have left their parent, their
group and their session.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

VARIABLE = "CLUSTER_OF_TESTS"  # neither RAY_... nor LASTCALL_..., which are searched for misspelt settings


class Reaper:
    def __init__(self, folder: Path) -> None:
        self.mark = {VARIABLE: str(folder)}
        self._process = subprocess.Popen(
            [sys.executable, "-S", __file__, str(folder)], stdin=subprocess.PIPE, start_new_session=True
        )

    def close(self) -> None:
        """Returns when all of them are gone. The pipe closes by itself where this is never called."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def marked(folder: str) -> Iterator[int]:
    mark = f"{VARIABLE}={folder}".encode()
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and mark in (entry / "environ").read_bytes().split(b"\0"):
                yield int(entry.name)
        except OSError:  # it is gone, or a zombie
            continue


def reap(folder: str) -> None:
    """New processes may appear meanwhile, so until none is left."""
    while pids := list(marked(folder)):
        for pid in pids:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
        time.sleep(0.05)
    shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    sys.stdin.read()
    reap(sys.argv[1])
