"""Memory: the guardian's two copies in shared memory, the snapshot of periodic saves, and which processes are
killed when the limit is reached."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from lastcall import settings
from lastcall.core.engine import snapshot
from lastcall.core.process.throughput import amount
from lastcall.doctor import finding
from lastcall.doctor.finding import Finding

_COPIES = 2
_SLACK = 4 * 1024 * 1024  # two copies of the description beside the tensors
_DOCKER = 64 * 1024 * 1024  # /dev/shm of a container, unless it asks for more
_SHARE = 0.8  # the share of available memory that a snapshot may take: core/engine/snapshot.py


def check_shared(jit: settings.JITCheckpointConfig, state: int | None) -> Finding:
    folder = Path(jit.guard_folder)
    try:
        info = os.statvfs(folder)
    except OSError as error:
        return finding.risk(
            "shared-memory",
            f"the guardian's folder {folder} cannot be used: {error.strerror}. The run will not be guarded",
            "unset LASTCALL_GUARD_FOLDER",
            folder=str(folder),
        )
    total, free = info.f_blocks * info.f_frsize, info.f_bavail * info.f_frsize
    needed = None if state is None else _COPIES * state + _SLACK
    facts = {"folder": str(folder), "total": total, "free": free, "needed": needed}
    docker = " (64 MB is what Docker gives unless asked)" if total <= _DOCKER else ""
    if needed is not None and needed > free:
        room = f"{amount(free)} are free{docker}"
        says = (
            f"two copies of the state need {amount(needed)} in {folder}, {room}: the run will not be guarded"
        )
        return finding.risk("shared-memory", says, _more(needed), **facts)
    if needed is None and docker:
        says = f"{folder} has {amount(total)}{docker}: it holds states of up to {amount(free // _COPIES)}"
        return finding.warning("shared-memory", says, _more(8 * 10**9), **facts)
    against = (
        f"holds states of up to {amount(free // _COPIES)}"
        if needed is None
        else f"two copies need {amount(needed)}"
    )
    return finding.ok("shared-memory", f"{amount(free)} are free in {folder}, {against}", **facts)


def _more(needed: int) -> str:
    mega = needed // 1_000_000 + 1
    return (
        f"docker run --shm-size={mega}m ...; in a pod: an emptyDir with medium: Memory and sizeLimit: "
        f"{mega}M, mounted at /dev/shm"
    )


def check_group(guarded: bool, group: Path | None = None) -> Iterator[Finding]:
    """Kubernetes (1.28 and later, cgroup v2) makes the kernel kill a container as a whole, the guardian
    included."""
    folder = group or own_group()
    try:
        whole = (folder / "memory.oom.group").read_text().strip() == "1"
    except OSError:
        return
    if whole and guarded:
        yield finding.warning(
            "oom",
            "memory.oom.group is 1: when memory runs out, the kernel kills the guardian together with the "
            "training. The copy in shared memory is saved only when the container restarts on this machine",
            "keep the copies where they outlive the container, in an emptyDir with medium: Memory: export "
            "LASTCALL_GUARD_FOLDER=/guard",
            group=str(folder),
        )


def own_group(root: Path = Path("/sys/fs/cgroup")) -> Path:
    try:
        place = next(
            line[3:] for line in Path("/proc/self/cgroup").read_text().splitlines() if line.startswith("0::")
        )
    except (OSError, StopIteration):
        place = "/"
    return root / place.strip("/")


def check_memory(state: int | None, periodic: bool) -> Finding:
    """A periodic save copies the state so that training can continue; without room for the copy, training
    waits for the disk."""
    left = snapshot.available_memory()
    facts = {"available": left, "state": state}
    if left is None:
        return finding.ok("memory", "the available memory is unknown", **facts)
    if periodic and state is not None and state > _SHARE * left:
        return finding.warning(
            "memory",
            f"periodic saves copy the state first ({amount(state)}), but only {amount(left)} of memory are "
            "available: training will wait for the disk at each save",
            "raise the memory limit of the container, or save less often: export LASTCALL_SAVE_STEPS=1000",
            **facts,
        )
    return finding.ok("memory", f"{amount(left)} of memory are available", **facts)
