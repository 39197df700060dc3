"""save_state(), made atomic: written beside its folder, made durable, and then renamed. Saves that answer a
notice get a commit record, so that `lastcall ls` and `lastcall verify` know them.

The scratch folder is not among the user's own: scripts that resume take the newest folder that they find
there. Only the script knows which ranks take part in a save of many; `participants` finds out what can be
known.
"""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lastcall.adapters.accelerate.participants import Participants
from lastcall.core.checkpoint import commit, handover
from lastcall.core.checkpoint import record as records
from lastcall.core.checkpoint.record import SENTINEL, Record
from lastcall.core.engine import writer
from lastcall.core.process import job_identity
from lastcall.storage import files as storage
from lastcall.types import FileRecord, Kind, Notice

NOT_EXACT = "the script's own save: how exactly it resumes is up to the script"


@dataclass(frozen=True)
class Occasion:
    """The notice that a save answers."""

    notice: Notice
    resumes: bool  # whether the same command is expected to resume from it


def save(
    original: Callable[[str], Any],
    accelerator: Any,
    output_dir: Any,
    participants: Participants,
    occasion: Occasion | None,
) -> Any:
    """`original` is save_state() of this accelerator; `occasion`: the notice that it answers, if it does."""
    if output_dir is None or accelerator.project_configuration.automatic_checkpoint_naming:
        return original(output_dir)
    target = Path(os.path.abspath(os.path.expanduser(output_dir)))
    group = participants.gather()
    if group is None:
        return original(output_dir)
    target.parent.mkdir(parents=True, exist_ok=True)
    staging = _beside(target, group.token)
    try:
        group.take_part(
            lambda: _write(original, staging),
            lambda: _publish(staging, target, occasion, accelerator.num_processes),
        )
        if staging.exists():  # the ranks of this machine have a disk of their own
            with contextlib.suppress(FileNotFoundError):
                _publish(staging, target, occasion, accelerator.num_processes)
    finally:
        if group.leads:
            _clear(storage.Files(), staging)
    return Path(output_dir)


def _beside(target: Path, token: str) -> Path:
    above = target.parent.parent
    home = (
        above
        if os.stat(above).st_dev == os.stat(target.parent).st_dev and os.access(above, os.W_OK)
        else target.parent
    )
    return home / f".{target.parent.name}-lastcall-{token}"


def _write(original: Callable[[str], Any], staging: Path) -> None:
    commit.stage(storage.Files(), staging, shared=True)
    original(str(staging))


def _publish(staging: Path, target: Path, occasion: Occasion | None, world: int) -> None:
    """All ranks have written."""
    files = storage.Files()
    for folder, _, names in os.walk(staging):
        for name in names:
            storage.make_durable(files, Path(folder, name))
        files.sync_directory(Path(folder))
    commit.seal(files, staging, None if occasion is None else _record(staging, target, occasion, world))
    _put(files, staging, target)


def _record(staging: Path, target: Path, occasion: Occasion, world: int) -> Record | None:
    paths = sorted(path for path in staging.rglob("*") if path.is_file() and path.name != SENTINEL)
    found = [_recorded(path, path.relative_to(staging).as_posix()) for path in paths]
    if not all(records.is_plain(file.name) for file in found):
        return None  # a hook of the script's wrote a file whose name no record may hold
    number = re.search(r"(\d+)\D*$", target.name)
    return Record(
        sequence=int(time.time()),
        step=int(number[1]) if number else 0,
        kind=Kind.JIT,
        reason=occasion.notice.reason,
        exact=False,
        because=NOT_EXACT,
        files=tuple(found),
        run=job_identity.identity(),
        save=handover.EXPECTED if occasion.resumes else "",
        world=world,
        created=time.time(),
        seconds=round(time.monotonic() - occasion.notice.at, 4),
        written=sum(file.size for file in found),
    )


def _recorded(path: Path, name: str) -> FileRecord:
    with open(path, "rb") as file:
        return writer.recorded(name, file)


def _put(files: storage.Files, staging: Path, target: Path) -> None:
    """Give the folder its name. Other files of the script in a folder of that name are kept."""
    if not target.is_dir() or not any(target.iterdir()):
        commit.publish(files, staging, target)
        return
    old = staging.with_name(f"{staging.name}-old")
    if commit.publish(files, staging, target, old) == staging:
        files.rename(staging, old)  # a rank that finds the staging folder takes it for one to be published
    for path in list(old.iterdir()):
        if not (target / path.name).exists():
            files.rename(path, target / path.name)
    files.sync_directory(target)
    storage.remove_tree(files, old)


def _clear(files: storage.Files, path: Path) -> None:
    if path.exists():
        storage.remove_tree(files, path)
