"""A process that is the first of its own, as in a container: it counts from 1, and sees no others."""

from __future__ import annotations

import os
import shutil
import subprocess

import pytest

_USER = () if os.geteuid() == 0 else ("--user", "--map-root-user")
ALONE = ("unshare", *_USER, "--pid", "--fork", "--kill-child=KILL", "--mount-proc")  # before its words


def need() -> None:
    """Skips a test where there can be none. As root, as in CI, there can."""
    if shutil.which("unshare") is None:
        pytest.skip("there is no unshare here: apt-get install -y util-linux")
    done = subprocess.run([*ALONE, "true"], capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"no process can be the first of its own here: {done.stderr.strip()}")
