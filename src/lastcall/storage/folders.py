"""Folders that a rename does not move. overlayfs (the root of a container) refuses to rename a folder that
comes from a lower layer, an image or a read-only base: EXDEV, though both names lie in one directory. Files
can be moved there, one by one."""

from __future__ import annotations

import errno
import os
from pathlib import Path

from lastcall.storage.files import Files


def stuck(error: OSError) -> bool:
    """Whether a rename failed because of where the folder comes from, and not because of the disk."""
    return error.errno == errno.EXDEV


def move(files: Files, old: Path, new: Path) -> None:
    """Rename, atomically if possible, otherwise piece by piece. Only for folders that are not in use: a kill
    in the middle leaves two halves."""
    try:
        files.rename(old, new)
        return
    except OSError as error:
        if not stuck(error):
            raise
    files.mkdir(new)
    for entry in list(os.scandir(old)):
        if entry.is_dir(follow_symlinks=False):
            move(files, Path(entry.path), new / entry.name)
        else:
            files.rename(Path(entry.path), new / entry.name)
    files.rmdir(old)
