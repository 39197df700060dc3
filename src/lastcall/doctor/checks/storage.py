"""Where the checkpoints go: does it outlive the machine, is it writable, is there room, and how fast is
it?"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from lastcall import memory
from lastcall.core.engine import writer
from lastcall.core.process.throughput import amount
from lastcall.doctor import finding
from lastcall.doctor.finding import Finding
from lastcall.storage import files as storage
from lastcall.types import Extent, FileLayout

TEST_BYTES = 256 * 1024 * 1024
_PIECE = 64 * 1024 * 1024
_LEAST = 4 * 1024 * 1024  # smaller writes do not measure bandwidth
_LONGEST = 20.0  # seconds for the write test
_FEW_INODES = 1000
_IN_MEMORY = ("tmpfs", "ramfs", "devtmpfs", "hugetlbfs", "rootfs")
_OF_A_CONTAINER = ("overlay", "aufs", "fuse-overlayfs", "fuse.fuse-overlayfs")
_NO_FILES = ("proc", "sysfs", "cgroup", "cgroup2", "devpts", "debugfs", "tracefs", "securityfs", "mqueue")
_OBJECT_STORES = ("gcsfuse", "s3fs", "goofys", "mountpoint-s3", "blobfuse", "blobfuse2", "rclone", "geesefs")
_ELSEWHERE = (
    "use a directory on a disk that outlives the machine, for example a mounted volume: "
    "protect('/data/runs/exp1', ...)"
)


@dataclass(frozen=True)
class Mount:
    point: str
    kind: str
    read_only: bool


@dataclass(frozen=True)
class Speed:
    nbytes: int
    seconds: float

    @property
    def bandwidth(self) -> float:
        return self.nbytes / self.seconds


def nearest(directory: Path) -> Path:
    """The directory, or its nearest existing parent."""
    path = Path(os.path.abspath(directory))
    while not path.is_dir() and path != path.parent:
        path = path.parent
    return path.resolve()


def mount_of(path: Path, table: str | None = None) -> Mount | None:
    """The file system that a path is on: of those mounted above it the deepest, and of several in one place
    the last."""
    try:
        lines = (
            Path("/proc/self/mountinfo").read_text(errors="replace") if table is None else table
        ).splitlines()
    except OSError:
        return None
    best: Mount | None = None
    for line in lines:
        fields = line.split(" ")
        try:
            point, options = _plain(fields[4]), fields[5]
            after = fields.index("-")
            kind, super_options = fields[after + 1], fields[after + 3]
        except (ValueError, IndexError):
            continue
        if path.is_relative_to(point) and (best is None or len(point) >= len(best.point)):
            best = Mount(point, kind, "ro" in options.split(",") or "ro" in super_options.split(","))
    return best


def _plain(text: str) -> str:
    """Spaces and the like are written in octal."""
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), text)


def check_place(directory: Path, mount: Mount | None) -> Finding:
    """Whether the files survive the machine or the container."""
    path = nearest(directory)
    if mount is None:
        return finding.ok("storage", f"the file system of {path} is unknown")
    facts = {"path": str(path), "mount": mount.point, "type": mount.kind}
    where = f"{directory} is on {mount.kind} ({mount.point})"
    if mount.kind in _NO_FILES:
        return finding.risk("storage", f"{where}, which does not store files", _ELSEWHERE, **facts)
    if mount.kind in _IN_MEMORY:
        return finding.risk(
            "storage", f"{where}: this is memory, and is lost with the machine", _ELSEWHERE, **facts
        )
    if mount.kind in _OF_A_CONTAINER:
        return finding.risk(
            "storage",
            f"{where}: this is the container's own layer, and is lost with the container",
            _ELSEWHERE,
            **facts,
        )
    if path.is_relative_to("/tmp") and mount.point in ("/", "/tmp"):
        return finding.risk(
            "storage",
            f"{directory} is in /tmp, which is emptied when the machine restarts",
            _ELSEWHERE,
            **facts,
        )
    if any(name in mount.kind for name in _OBJECT_STORES):
        return finding.warning(
            "storage",
            f"{where}: an object store behind FUSE renames by copying, so commits are slow and not atomic",
            "write to a disk or a network file system, and upload to the object store with LASTCALL_MIRROR",
            **facts,
        )
    return finding.ok("storage", where, **facts)


def check_writable(directory: Path, mount: Mount | None) -> Finding:
    path = nearest(directory)
    if directory.is_symlink() and not directory.exists():
        there = os.readlink(directory)
        return finding.risk(
            "writable",
            f"{directory} is a link to {there}, which does not exist",
            f"mkdir -p {there}; or mount it",
        )
    if directory.exists() and not directory.is_dir():
        return finding.risk(
            "writable", f"{directory} is a file where a directory belongs", f"mv {directory} {directory}.old"
        )
    if mount is not None and mount.read_only:
        return finding.risk(
            "writable",
            f"{mount.point} is mounted read-only: no checkpoint can be written to {directory}",
            f"mount -o remount,rw {mount.point}; in a pod: readOnly: false at the volumeMount",
            mount=mount.point,
        )
    trial = path / f".lastcall-doctor-{storage.own_name()}"
    try:
        trial.mkdir()  # what a save does first, and what the permissions of a directory may forbid
        trial.rmdir()
    except OSError as error:
        owner = f"chown -R $(id -u) {path}" if error.errno in (errno.EACCES, errno.EPERM) else _ELSEWHERE
        return finding.risk(
            "writable", f"{path} is not writable: {error.strerror}", owner, error=error.strerror
        )
    return finding.ok("writable", f"{path} is writable", path=str(path))


def check_room(directory: Path, needed: int | None, spare: int) -> Iterator[Finding]:
    """The free space, compared with the next checkpoint. Spare files count as room; the previous one stays
    until the new one is committed."""
    path = nearest(directory)
    try:
        info = os.statvfs(path)
    except OSError as error:
        yield finding.warning("space", f"the free space of {path} is unknown: {error.strerror}", f"df {path}")
        return
    free = info.f_bavail * info.f_frsize + spare
    facts = {"free": free, "needed": needed, "inodes_free": info.f_favail if info.f_files else None}
    if info.f_files and info.f_favail < _FEW_INODES:
        yield finding.risk(
            "inodes",
            f"only {info.f_favail} more files can be created on the file system of {path}",
            f"df -i {path}; remove small files",
            **facts,
        )
    if needed is not None and needed + 1024 * 1024 > free:
        yield finding.risk(
            "space",
            f"the next checkpoint needs {amount(needed)} in {directory}, but only {amount(free)} are free",
            f"lastcall prune {directory} --keep 2; or make room: du -xh {path} | sort -h | tail",
            **facts,
        )
    elif needed is not None and 2 * needed > free:
        yield finding.warning(
            "space",
            f"{amount(free)} are free in {directory}: enough for one checkpoint of {amount(needed)}, not for "
            "two",
            f"lastcall prune {directory} --keep 2",
            **facts,
        )
    else:
        against = "" if needed is None else f", a checkpoint needs {amount(needed)}"
        yield finding.ok("space", f"{amount(free)} are free{against}", **facts)


def measure(directory: Path, threads: int, nbytes: int = TEST_BYTES) -> Speed | None:
    """Write a file as a save does (threads, direct where possible, fsync) and remove it. None where there is
    no room."""
    path = nearest(directory)
    files = storage.Files()
    nbytes = min(nbytes, files.free_bytes(path) // 4 // writer.CHUNK * writer.CHUNK)
    if nbytes < _LEAST:
        return None
    buffer = memory.PageBuffer(min(_PIECE, nbytes))
    piece = min(_PIECE, nbytes)
    extents = tuple(
        Extent(at, memory.HostMemory(buffer.address, min(piece, nbytes - at), buffer))
        for at in range(0, nbytes, piece)
    )
    trial = path / f".lastcall-doctor-{storage.own_name()}.tmp"
    fd, direct = writer.open_direct(files, trial, os.O_RDWR | os.O_CREAT | os.O_EXCL)
    engine = writer.Engine(threads, files)
    began = time.perf_counter()
    try:
        output = writer.Output(FileLayout("test", nbytes, extents), fd, direct)
        engine.write([output], lambda: time.perf_counter() - began > _LONGEST)
        files.fsync(fd)
        took = time.perf_counter() - began
    finally:
        engine.close()
        files.close(fd)
        with contextlib.suppress(OSError):
            files.unlink(trial)
    done = sum(chunk is not None for chunk in output.chunks) * writer.CHUNK
    return Speed(min(done, nbytes), took) if done else None


def check_speed(directory: Path, threads: int) -> tuple[Finding, Speed | None]:
    try:
        speed = measure(directory, threads)
    except OSError as error:
        return finding.risk(
            "write-test", f"a test file in {nearest(directory)} failed: {error.strerror}", _ELSEWHERE
        ), None
    if speed is None:
        return finding.ok("write-test", f"not measured: too little space in {nearest(directory)}"), None
    says = (
        f"{amount(speed.nbytes)} written and synced in {speed.seconds:.2f} s: {speed.bandwidth / 1e6:.0f} "
        "MB/s"
    )
    return finding.ok(
        "write-test", says, bytes=speed.nbytes, seconds=speed.seconds, bandwidth=speed.bandwidth
    ), speed
