"""Keeps a machine within the machine: processes, mounts and a network of its own, in which everything that is
started ends with it.

    warden.py FOLDER

It waits until its input ends, as it does however the tests end. Then it kills the first process of that
machine, and the kernel with it all others in there, the containers' too, every mount and every interface.
What would be left are the folder, the control groups and the kernel settings that a kubelet changes: they are
cleaned up here. Needs nothing but the standard library.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

_GROUPS = Path("/sys/fs/cgroup")
_SETTINGS = (
    "vm/overcommit_memory",
    "vm/panic_on_oom",
    "kernel/panic",
    "kernel/panic_on_oops",
    "kernel/keys/root_maxkeys",
    "kernel/keys/root_maxbytes",
)
_UNSHARE = (
    "unshare",
    "--mount",
    "--pid",
    "--net",
    "--fork",
    "--kill-child=KILL",
    "--mount-proc",
    "--propagation",
    "private",
)


def keep(folder: Path) -> None:
    settings = {path: path.read_text() for name in _SETTINGS if (path := Path("/proc/sys", name)).exists()}
    first = subprocess.Popen(
        [*_UNSHARE, sys.executable, "-S", __file__, "--first", str(folder)], stdin=subprocess.DEVNULL
    )
    sys.stdin.read()
    first.kill()
    first.wait()
    for path, value in settings.items():
        if path.read_text() != value:
            path.write_text(value)
    shutil.rmtree(folder, ignore_errors=True)
    _remove_groups()


def first(folder: Path) -> None:
    """The first process of the new machine. /run and /var hold what servers write where no option says so."""
    for name in ("var", "work"):
        (folder / name).mkdir()
    _run("mount", "-t", "tmpfs", "tmpfs", "/run")
    _run(
        "mount",
        "-t",
        "overlay",
        "overlay",
        "-o",
        f"lowerdir=/var,upperdir={folder}/var,workdir={folder}/work",
        "/var",
    )
    _run("ip", "link", "set", "lo", "up")
    Path("/proc/sys/net/ipv4/ip_forward").write_text("1")
    (folder / "first").write_text("ready")
    while True:  # orphans are ours to collect
        try:
            os.wait()
        except ChildProcessError:
            time.sleep(0.2)


def _run(*words: str) -> None:
    subprocess.run(words, check=True)


def _remove_groups() -> None:
    """The containers' control groups, which stay when their processes are gone.

    Those of a cluster that lives are in use and stay, too.
    """
    for top in _GROUPS.glob("*/k8s.io"):
        for folder, _, _ in os.walk(top, topdown=False):
            try:
                os.rmdir(folder)
            except OSError:
                continue


if __name__ == "__main__":
    if sys.argv[1] == "--first":
        first(Path(sys.argv[2]))
    keep(Path(sys.argv[1]))
