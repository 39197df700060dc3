"""Storage that keeps files by name and has no rename: a bucket of an object store, or a folder that is
treated like one.

`Objects` is all that a mirror (`core.mirror`) needs of them. Names are relative to the place, with slashes;
writes are atomic. Failures are StorageErrors that name the object; a failure that no retry would fix is a
ConfigError.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Protocol

from lastcall import errors, parsing
from lastcall.storage import files as storage
from lastcall.storage import mounts
from lastcall.storage.files import Moved, nothing

_PIECE = 8 * 1024 * 1024
_TEMPORARY = ".lastcall-part-"
_FOR_GOOD = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EEXIST)  # what a retry does not fix


class Objects(Protocol):
    @property
    def url(self) -> str: ...

    def names(self, prefix: str = "") -> dict[str, int]:
        """The objects, with their sizes."""

    def read(self, name: str, largest: int) -> bytes | None:
        """A small object; None if it does not exist. One that is larger than `largest` is refused."""

    def write(self, name: str, data: bytes) -> None: ...

    def send(self, path: Path, name: str, moved: Moved = nothing, *, threads: bool = True) -> None:
        """`threads`: whether any may be started; at the end of a process none can be."""

    def fetch(self, name: str, path: Path, moved: Moved = nothing) -> None: ...

    def copy(self, old: str, new: str) -> None:
        """A server-side copy. An error if the store cannot: a file may be too large for it."""

    def remove(self, names: Iterable[str]) -> None:
        """A missing object is not an error."""

    def age(self, name: str) -> float | None:
        """Its age in seconds, by one clock; None if it does not exist."""


def opened(url: str, keys: str | None = None) -> Objects:
    """`keys`: a folder with the credentials, if they are not found otherwise."""
    scheme, place = parsing.split_place(url)
    if scheme == "file":
        return FolderStore(Path("/", place))
    from lastcall.storage import s3

    bucket, _, prefix = place.partition("/")
    return s3.Bucket(bucket, prefix, keys)


class FolderStore:
    """A folder of another file system: the network disk that outlives the machine."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._files = storage.Files()
        self._device: int | None = None  # of its file system; None before the first check

    @property
    def url(self) -> str:
        return f"file://{self._root}"

    def names(self, prefix: str = "") -> dict[str, int]:
        self._check("", "listed")
        found: dict[str, int] = {}
        for folder, _, files in os.walk(self._root, onerror=self._unreadable):
            for file in files:
                path = Path(folder, file)
                name = path.relative_to(self._root).as_posix()
                if name.startswith(prefix) and not file.startswith(_TEMPORARY):
                    try:
                        info = path.stat(follow_symlinks=False)
                        if stat.S_ISREG(info.st_mode):  # a link, a pipe or a device is not one of our files
                            found[name] = info.st_size
                    except FileNotFoundError:
                        continue  # removed meanwhile
                    except OSError as error:
                        raise self._failed(name, "looked at", error) from error
        return found

    def _unreadable(self, error: OSError) -> None:
        """A missing disk must not look like one without checkpoints: the run would start from scratch."""
        if not isinstance(error, FileNotFoundError):
            raise self._failed("", "listed", error) from error

    def read(self, name: str, largest: int) -> bytes | None:
        self._check(name, "read")
        try:
            return storage.read_plain(self._root / name, largest)
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            raise self._failed(name, "read", error) from error

    def write(self, name: str, data: bytes) -> None:
        self._put(name, lambda under: storage.write_small(self._files, under, data))

    def send(self, path: Path, name: str, moved: Moved = nothing, *, threads: bool = True) -> None:
        self._put(name, lambda under: _copied(path, under, moved))

    def fetch(self, name: str, path: Path, moved: Moved = nothing) -> None:
        try:
            _copied(self._root / name, path, moved)
        except OSError as error:
            raise self._failed(name, "fetched", error) from error

    def copy(self, old: str, new: str) -> None:
        self._put(new, lambda under: os.link(self._root / old, under))

    def remove(self, names: Iterable[str]) -> None:
        for name in names:
            path = self._root / name
            try:
                path.unlink(missing_ok=True)
                while path.parent != self._root and not self._others(path.parent):
                    path = path.parent
                    path.rmdir()
            except FileNotFoundError:
                continue
            except OSError as error:
                raise self._failed(name, "removed", error) from error

    def _others(self, folder: Path) -> list[str]:
        """What is left in it. If only unfinished files of killed processes are left, they are removed,
        too."""
        names = os.listdir(folder)
        if all(name.startswith(_TEMPORARY) for name in names):
            for name in names:
                (folder / name).unlink(missing_ok=True)
            names = []
        return names

    def age(self, name: str) -> float | None:
        """By the clock of the file system, which also dates a file written for comparison."""
        now = self._root / f"{_TEMPORARY}{storage.own_name()}"
        try:
            written = (self._root / name).stat().st_mtime
            now.touch()
            return max(0.0, now.stat().st_mtime - written)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise self._failed(name, "looked at", error) from error
        finally:
            now.unlink(missing_ok=True)

    def _check(self, name: str, what: str) -> None:
        """Checks that it is on the intended file system. An unmounted disk must not be replaced by a folder
        on the disk below: no checkpoint would be found there, and new ones would be lost with the machine."""
        try:
            self._device = mounts.check(self._root, self._device)
        except mounts.Missing as error:
            raise errors.StorageRefused(f"{self.url}: {error}") from None
        except OSError as error:
            raise self._failed(name, what, error) from error

    def _put(self, name: str, make: Callable[[Path], None]) -> None:
        self._check(name, "written")
        path = self._root / name
        under = path.with_name(f"{_TEMPORARY}{storage.own_name()}")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            try:
                make(under)
                os.replace(under, path)
            finally:
                under.unlink(missing_ok=True)
            self._files.sync_directory(path.parent)
        except OSError as error:
            raise self._failed(name, "written", error) from error

    def _failed(self, name: str, what: str, error: OSError) -> errors.StorageError:
        kind = errors.StorageRefused if error.errno in _FOR_GOOD else errors.StorageError
        return kind(f"{self.url}/{name} could not be {what}: {error.strerror or error}")


def _copied(old: Path, new: Path, moved: Moved) -> None:
    """The current bytes of a plain file: a link, a pipe or a device is refused, and a growing file is not
    followed."""
    with (
        storage.opened_plain(old) as (fd, info),
        os.fdopen(fd, "rb", closefd=False) as source,
        open(new, "wb") as target,
    ):
        left = info.st_size
        while left > 0 and (piece := source.read(min(_PIECE, left))):
            target.write(piece)
            moved(len(piece))
            left -= len(piece)
        target.flush()
        os.fsync(target.fileno())
