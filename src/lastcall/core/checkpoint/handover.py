"""Checkpoints that a script has saved by its own means, and that only its own resume can load: which is the
newest, and whether a later start has continued from it.

They lie where the script put them, under its own names, and nothing may be added beside them: scripts take
the newest folder that they find there. So all that is known is in the commit record of a save that answered a
notice: `run` is the job that made it, `save` says whether the same command was expected to continue from it,
and later that a start did.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from lastcall import errors
from lastcall.core import timing
from lastcall.core.checkpoint import record as records
from lastcall.core.checkpoint.record import Record
from lastcall.storage import files as storage

EXPECTED, TAKEN = "expected", "taken"
_STATE = "random_states_0.pkl"  # in everything that save_state() writes
_MOST = 1000  # entries of a folder that are looked at: one with more holds data


@dataclass(frozen=True)
class Saved:
    path: Path
    created: float
    record: Record | None = None

    def demands_a_resume(self, job: str, now: float) -> bool:
        """Whether a start that ignores it must be a restart that went wrong: of the same job, or just after
        the exit code that asks for one."""
        record = self.record
        if record is None:
            return False
        elsewhere = bool(job and record.run and job != record.run)
        return (bool(job) and record.run == job) or (
            record.save == EXPECTED and not elsewhere and 0 <= now - self.created < timing.RESTART
        )


def named(words: Iterable[str]) -> list[Path]:
    """The folders that a command names."""
    values = (value for word in words for value in (word, word.partition("=")[2]) if value)
    return [Path(value).absolute() for value in values if os.path.isdir(value)]


def newest(folders: Sequence[Path]) -> Saved | None:
    """What a restart should continue from."""
    return max(_saved(folders), key=lambda saved: saved.created, default=None)


def waiting(folders: Sequence[Path]) -> Saved | None:
    """The newest that answered a notice and that no start has continued from."""
    found = [saved for saved in _saved(folders) if saved.record is not None and saved.record.save != TAKEN]
    return max(found, key=lambda saved: saved.created, default=None)


def taken(folder: Path) -> None:
    """A script has continued from a checkpoint in this folder: what else is there is its own business."""
    for saved in _saved([folder]):
        if saved.record is not None and saved.record.save != TAKEN:
            with contextlib.suppress(OSError):  # it may be read-only: then the next start asks again
                body = dataclasses.replace(saved.record, save=TAKEN).to_json()
                storage.replace_small(saved.path / records.NAME, body)


def _saved(folders: Iterable[Path]) -> list[Saved]:
    found: dict[Path, Saved] = {}
    for folder in folders:
        with contextlib.suppress(OSError), os.scandir(folder) as entries:
            for entry in itertools.islice(entries, _MOST):
                path = Path(entry.path)
                if path not in found and entry.is_dir() and (saved := _look(path)) is not None:
                    found[path] = saved
    return list(found.values())


def _look(path: Path) -> Saved | None:
    if (path / records.SENTINEL).exists():
        return None
    if (path / records.NAME).exists():
        try:
            record = records.read(path)
        except errors.CheckpointError:
            return None
        return Saved(path, record.created, record) if record.file(_STATE) is not None else None
    state = path / _STATE
    return Saved(path, state.stat().st_mtime) if state.exists() else None
