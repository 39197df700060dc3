"""The commit protocol: what makes a folder a checkpoint, and what ends one. Every save goes through it.

    stage     the folder and the sentinel in it: whatever happens from here on, this is no checkpoint yet
    (files)   the caller's: each written and fsynced, the names in the folders below made durable
    seal      the record, fsynced; then the sentinel goes; then the folder's names are made durable
    publish   the folder gets its name by one rename or swap, and that name is made durable
    withdraw  the same in reverse, where a checkpoint cannot be renamed away

In an object store nothing can be renamed. There the record is written last and its arrival is the commit: a
folder with a sentinel or without a record is an upload that was never finished.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from lastcall.core.checkpoint.record import NAME, SENTINEL, Record
from lastcall.storage import files as storage
from lastcall.storage.files import Files
from lastcall.storage.patience import Patient


def stage(files: Files, folder: Path, *, shared: bool = False) -> None:
    """`shared`: several ranks stage into this folder, and each comes here."""
    try:
        files.mkdir(folder)
    except FileExistsError:
        if not shared:
            raise
    storage.write_small(files, folder / SENTINEL, b"lastcall is writing this checkpoint\n")


def seal(
    files: Files,
    folder: Path,
    record: Record | None,
    *,
    scaffold: Iterable[Path] = (),
    durable: bool = True,
) -> None:
    """All files are there. `scaffold`: what else was needed to build it only. Without a record the folder is
    whole, and no checkpoint of ours."""
    if record is not None:
        storage.write_small(files, folder / NAME, record.to_json())
    for path in scaffold:
        files.unlink(path)
    if os.path.lexists(folder / SENTINEL):
        files.unlink(folder / SENTINEL)
    if durable:
        files.sync_directory(folder)


def publish(files: Files, folder: Path, name: Path, aside: Path | None = None) -> Path | None:
    """Give a sealed folder its name. With `aside` it may replace a folder of that name; returns where that
    one is now. Where names cannot be swapped, there is for a moment none of this name, but one at `aside`."""
    replaced = None
    if aside is None or not os.path.lexists(name):
        files.rename(folder, name)
    else:
        try:
            files.exchange(folder, name)
            replaced = folder
        except OSError:
            files.rename(name, aside)
            files.rename(folder, name)
            replaced = aside
    files.sync_directory(name.parent)
    return replaced


def withdraw(files: Files, folder: Path) -> None:
    """Remove a checkpoint where it is: a kill in the middle leaves a folder that the next start recognizes as
    incomplete."""
    storage.write_small(files, folder / SENTINEL, b"lastcall is removing this checkpoint\n")
    files.unlink(folder / NAME)
    files.sync_directory(folder)
    for entry in list(os.scandir(folder)):
        if entry.name != SENTINEL:
            if entry.is_dir(follow_symlinks=False):
                storage.remove_tree(files, Path(entry.path))
            else:
                files.unlink(Path(entry.path))
    files.unlink(folder / SENTINEL)
    files.rmdir(folder)


# ---- in an object store ------------------------------------------------------------------------------------


def stage_upload(place: Patient, name: str, run: str) -> None:
    """The sentinel says whose upload it is."""
    place.write(f"{name}/{SENTINEL}", run.encode())


def commit_upload(place: Patient, name: str, record: Record) -> None:
    place.remove([f"{name}/{SENTINEL}"])
    place.write(f"{name}/{NAME}", record.to_json())


def withdraw_upload(place: Patient, name: str, run: str) -> None:
    """From here on it is an upload that was never finished."""
    stage_upload(place, name, run)
    place.remove([f"{name}/{NAME}"])


def remove_upload(place: Patient, name: str) -> None:
    sentinel = f"{name}/{SENTINEL}"
    place.remove(sorted(place.names(f"{name}/").keys() - {sentinel}))
    place.remove([sentinel])  # last: while it exists, the rest is known to be unfinished
