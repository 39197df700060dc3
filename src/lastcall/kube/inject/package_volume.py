"""Provides lastcall in a container whose image lacks it: a tree of Python files on a volume of the pod.

    /opt/lastcall/                     the mount
      0.1.0-1f3c.../lastcall/...       a copy of the installed package, without compiled files
      lib -> 0.1.0-1f3c...             for a PYTHONPATH of one's own
      site -> 0.1.0-1f3c.../lastcall/auto/site      what a container's PYTHONPATH names: the sitecustomize of
      `lastcall run`
      stop-<container>                 written by the preStop hook

An init container copies it before the training starts. Everything is world-readable, since the training runs
as any user that its image sets; it never writes there. Any Python from 3.11 on can use it, an older one
ignores it. Digests then come from the standard library, unless the image has the xxhash package.

Discarded: a zip file (sitecustomize must be found without one); links to the installed package (it is in
another image).
"""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import lastcall
from lastcall import errors
from lastcall.auto import environment

MOUNT = "/opt/lastcall"
# goes onto PYTHONPATH, in front of its entries: it forwards to a sitecustomize behind it
SITE = f"{MOUNT}/site"
# sh does not have to be there: the kubelet then reports FailedPreStopHook and sends SIGTERM as always. The
# pod's grace begins before the hook does, so the file says all of it. The hook ends at once, and SIGTERM
# follows.
PRE_STOP = [
    "/bin/sh",
    "-c",
    'echo "{\\"grace\\": ${LASTCALL_GRACE_SECONDS:-30}, \\"reason\\": \\"preStop\\"}" > '
    '"$LASTCALL_STOP_FILE"',
]
_PACKAGE = "lastcall"
_LINKS = {"lib": ".", "site": f"{_PACKAGE}/auto/site"}
_SUFFIXES = (".py", ".typed")


def stop_file(container: str) -> str:
    """The LASTCALL_STOP_FILE of a container. One for each: a kubelet that restarts one of them must not stop
    the others."""
    return f"{MOUNT}/stop-{container}"


def copy(target: Path) -> None:
    """Copy the package there. Harmless if it exists already; a concurrent reader finds all of it or
    nothing."""
    source = Path(environment.SITE).parent.parent
    files = sorted(_files(source))
    name = f"{lastcall.__version__}-{_digest(source, files)[:16]}"
    try:
        target.mkdir(parents=True, exist_ok=True)
        if not (target / name).is_dir():
            _build(source, files, target, name)
        for link, place in _LINKS.items():
            _point(target / link, os.path.normpath(f"{name}/{place}"))
    except OSError as error:
        raise errors.LastcallError(
            f"{error.filename or target} cannot be written: {error.strerror}. Use a directory that this user "
            f"({os.getuid()}) may write to, for example the mount of an emptyDir volume."
        ) from error


def _files(source: Path) -> Iterator[Path]:
    """Relative to the package."""
    for folder, folders, names in os.walk(source):
        folders[:] = [name for name in folders if name != "__pycache__"]
        yield from (Path(folder, name).relative_to(source) for name in names if name.endswith(_SUFFIXES))


def _digest(source: Path, files: list[Path]) -> str:
    """Two trees of one name are the same: a development version covers many states."""
    hasher = hashlib.sha256()
    for path in files:
        data = (source / path).read_bytes()
        hasher.update(f"{path} {len(data)}\n".encode() + data)
    return hasher.hexdigest()


def _build(source: Path, files: list[Path], target: Path, name: str) -> None:
    under = Path(tempfile.mkdtemp(prefix=".building-", dir=target))
    try:
        for path in files:
            place = under / _PACKAGE / path
            _make(place.parent, under)
            shutil.copyfile(source / path, place)
            place.chmod(0o644)
        under.chmod(0o755)  # mkdtemp makes it ours alone
        try:
            os.rename(under, target / name)
        except OSError:
            if not (target / name).is_dir():  # otherwise another process was faster, with the same content
                raise
    finally:
        shutil.rmtree(under, ignore_errors=True)


def _make(folder: Path, top: Path) -> None:
    """World-readable, whatever the umask is."""
    if folder != top and not folder.is_dir():
        _make(folder.parent, top)
        folder.mkdir()
        folder.chmod(0o755)


def _point(link: Path, place: str) -> None:
    """Atomically, also if it pointed to another tree before."""
    if link.is_symlink() and os.readlink(link) == place:
        return
    under = link.with_name(f".{link.name}-{os.getpid()}")
    under.unlink(missing_ok=True)
    under.symlink_to(place)
    os.replace(under, link)
