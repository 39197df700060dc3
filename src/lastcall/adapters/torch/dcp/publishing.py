"""From a staging folder beside the target to a committed checkpoint in its place."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from lastcall import errors, memory
from lastcall.core.checkpoint import catalog, commit, filenames
from lastcall.core.checkpoint import record as records
from lastcall.core.checkpoint.record import Record
from lastcall.core.engine import writer
from lastcall.formats import manifest
from lastcall.storage import files as storage
from lastcall.types import Extent, FileLayout, FileRecord, Kind

_files = storage.Files()
_OF_A_RUN = re.compile(r"checkpoint-\d+")
REASON = "torch.distributed.checkpoint"


@dataclass(frozen=True)
class Completion:
    """What makes the files of all ranks a checkpoint."""

    files: Sequence[FileRecord]
    manifest: bytes
    document: object
    world: int
    seconds: float


def check(path: Path, *, overwrite: bool) -> None:
    """Refuse to write where something is that must not be replaced."""
    if _OF_A_RUN.fullmatch(path.name) and (path.parent / catalog.PRIVATE).is_dir():
        raise errors.SaveError(
            f"{path} lies among the checkpoints of a run, which would take it for its "
            "own. Write it elsewhere."
        )
    if not os.path.lexists(path):
        return
    if not path.is_dir():
        raise errors.SaveError(
            f"{path} is a file where the checkpoint's folder belongs. Move it away, or write elsewhere."
        )
    if not os.listdir(path):
        return
    if not os.path.lexists(path / records.NAME):
        raise errors.SaveError(
            f"{path} is not empty, and no checkpoint of lastcall: it is not replaced. Move it away, or write "
            "elsewhere."
        )
    if not overwrite:
        raise errors.SaveError(
            f"{path} holds a checkpoint, and overwrite is False. Write elsewhere, or "
            "allow it with overwrite=True."
        )


def stage(path: Path) -> Path:
    """A new folder beside the target. Those that earlier saves to this path left behind when they were killed
    are removed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    for leftover in _staged(path):
        with contextlib.suppress(OSError):
            storage.remove_tree(_files, leftover)
    folder = path.parent / f"{_prefix(path)}{secrets.token_hex(4)}"
    commit.stage(_files, folder)
    return folder


def find(path: Path, name: str) -> Path:
    """The staging folder of this save. A planner that caches plans (enable_plan_caching) hands out the one of
    an earlier save, which is gone: then it is the only one that is there."""
    if (path.parent / name).is_dir():
        return path.parent / name
    found = _staged(path)
    if len(found) != 1:
        raise errors.SaveError(
            f"{path.parent / name} is not there: the coordinator made it. Do all ranks see the same file "
            f"system under {path.parent}?"
        )
    return found[0]


def _prefix(path: Path) -> str:
    return f".{path.name}.incomplete-"


def _staged(path: Path) -> list[Path]:
    with os.scandir(path.parent) as entries:
        return [
            Path(entry.path)
            for entry in entries
            if entry.name.startswith(_prefix(path)) and entry.is_dir(follow_symlinks=False)
        ]


def write(
    folder: Path, layouts: Sequence[FileLayout], engine: writer.Engine, *, sync: bool
) -> list[FileRecord]:
    """Write files, durable unless told otherwise. What could be written in part is removed again: the space
    may be needed."""
    done = []
    try:
        with contextlib.ExitStack() as opened:
            outputs = []
            for layout in layouts:
                outputs.append(output := writer.opened(_files, folder / layout.name, layout))
                assert output.fd is not None
                opened.callback(_files.close, output.fd)
            engine.write(outputs)
            for output in outputs:
                assert output.fd is not None and output.record is not None
                _files.truncate(output.fd, output.layout.size)
                if sync:
                    _files.fsync(output.fd)
                done.append(output.record)
    except OSError as error:
        for layout in layouts:
            with contextlib.suppress(OSError):
                _files.unlink(folder / layout.name)
        _explain(error, folder, sum(layout.size for layout in layouts))
    return done


def _explain(error: OSError, folder: Path, needed: int) -> None:
    what = f"the checkpoint could not be written to {folder} ({error.strerror or error})"
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        free = _files.free_bytes(folder)
        raise errors.NoSpaceError(
            f"{what}. This rank needs {needed / 1e6:.1f} MB, {free / 1e6:.1f} MB are free: make room."
        ) from error
    raise errors.SaveError(what) from error


def publish(folder: Path, path: Path, made: Completion, *, sync: bool) -> None:
    """Complete the folder and give it its name. Runs on the coordinator, after every rank has said that its
    file is there."""
    engine = writer.Engine(1)
    try:
        small = [
            _layout(manifest.NAME, made.manifest),
            _layout(filenames.document(0), json.dumps(made.document).encode()),
        ]
        files = [*write(folder, small, engine, sync=sync), *made.files]
    finally:
        engine.close()
    record = Record(
        sequence=1,
        step=0,
        kind=Kind.MANUAL,
        reason=REASON,
        exact=True,
        files=tuple(files),
        world=made.world,
        created=time.time(),
        seconds=round(made.seconds, 4),
        written=sum(file.size for file in files),
    )
    commit.seal(_files, folder, record, durable=sync)
    there = os.path.lexists(path / records.NAME)
    old = commit.publish(_files, folder, path, folder.with_name(f"{folder.name}.replaced") if there else None)
    if old is not None:
        with contextlib.suppress(OSError):
            storage.remove_tree(_files, old)


def _layout(name: str, data: bytes) -> FileLayout:
    return FileLayout(name, len(data), (Extent(0, memory.BytesSource(data)),))
