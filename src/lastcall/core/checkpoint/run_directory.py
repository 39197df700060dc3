"""The directory of a run, before anything is in it: it can be made, its paths are short enough, and its whole
group may use it. What is wrong is an error at the start, as a wrong setting, and not at the notice."""

from __future__ import annotations

import contextlib
import errno
import os
import shlex
import stat
from pathlib import Path

from lastcall import errors, settings
from lastcall.storage import errnos

# bytes of the longest path in our part of the directory: a file, its folder
_BELOW = len("/staging/checkpoint-/") + 20 + 2 * 255
# no restart changes these
_CANNOT_BEGIN = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENAMETOOLONG, errno.ELOOP)


def make(root: Path, private: Path) -> int:
    """Make both, as any rank may. Returns the device that they are on. ConfigError where they cannot be."""
    _check_length(root, private)
    try:
        root.mkdir(parents=True, exist_ok=True)
        # of a directory from another user: everything in its target could be overwritten
        if private.is_symlink():
            there = os.readlink(private)
            settings.fail(
                f"{private} is a link to {there}, and lastcall writes into no other folder. Remove "
                f"it: rm {private}"
            )
        new = not private.is_dir()
        private.mkdir(exist_ok=True)
        if new:
            share(root, private)
        return os.stat(root).st_dev
    except (FileExistsError, NotADirectoryError) as error:
        settings.fail(in_the_way(Path(error.filename)))
    except OSError as error:
        if error.errno not in _CANNOT_BEGIN:
            raise
        what = f"{error.filename} cannot be made ({errnos.named(error)}), and without it nothing can be saved"
        settings.fail(f"{what}. {whose(root, error)}")


def in_the_way(path: Path) -> str:
    """What stands where a directory belongs."""
    if path.is_symlink() and not path.exists():
        there = os.readlink(path)
        return (
            f"{path} is a link to {there}, which does not exist. Make or mount that, or remove the link: rm "
            f"{shlex.quote(str(path))}"
        )
    return f"{path} is a file where a directory belongs. Move it away, or give protect() another directory."


def _check_length(root: Path, private: Path) -> None:
    """Otherwise a path that is too long would fail the first save, which may be the last one."""
    try:
        longest = os.pathconf("/", "PC_PATH_MAX")
    except (OSError, ValueError):
        longest = 4096
    if len(os.fsencode(private)) + _BELOW > longest:
        settings.fail(
            f"{root!s:.60}... has {len(os.fsencode(root))} bytes, and the files of a checkpoint in it would "
            "have paths of more than "
            f"the {longest} that the system allows. Give protect() a directory with a shorter path."
        )


def share(root: Path, path: Path) -> None:
    """What a group may write in the directory, it may write below it, whatever the umask: a second user
    resumes the run."""
    if os.stat(root).st_mode & stat.S_IWGRP:
        with contextlib.suppress(OSError):  # another user's, or a file system without modes
            os.chmod(path, stat.S_IMODE(os.stat(path).st_mode) | stat.S_IWGRP)


def check_device(root: Path, device: int) -> None:
    """SaveError where the directory would be recreated on another file system than before."""
    there = next(path for path in (root, *root.parents) if path.is_dir())
    if os.stat(there).st_dev != device:
        raise errors.SaveError(
            f"{root} is gone, and so is its file system: {there} is on another one now. Mount it again (see "
            "findmnt)."
        )


def whose(path: Path, error: OSError) -> str:
    """Who may write here, and what to do about it."""
    if error.errno == errno.EROFS:
        return (
            "Mount it for writing (mount -o remount,rw; in a pod: readOnly: false), or give protect() "
            "another directory."
        )
    there = next((each for each in (path, *path.parents) if os.path.lexists(each)), path)
    try:
        info = os.stat(there)
    except OSError:
        return "Give protect() another directory."
    return (
        f"{there} belongs to user {info.st_uid} and group {info.st_gid} (mode "
        f"{stat.S_IMODE(info.st_mode):o}); this is user "
        f"{os.getuid()}. Let the group write: chmod -R g+rwX {shlex.quote(str(there))}, and run with umask "
        "002; or give protect() "
        "another directory."
    )
