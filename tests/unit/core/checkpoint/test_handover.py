from __future__ import annotations

import dataclasses
import os
from pathlib import Path

from lastcall.core.checkpoint import handover
from lastcall.core.checkpoint import record as records
from lastcall.core.engine import digest
from lastcall.types import FileRecord, Kind

STATE = "random_states_0.pkl"


def by_a_notice(folder: Path, name: str, created: float, save: str = "", run: str = "") -> Path:
    path = folder / name
    path.mkdir(parents=True)
    chunks = (digest.of(b"x"),)
    (path / STATE).write_bytes(b"x")
    file = FileRecord(STATE, 1, digest.over(chunks), 4096, chunks)
    record = records.Record(1, 3, Kind.JIT, "SIGTERM", False, (file,), created=created, save=save, run=run)
    (path / records.NAME).write_bytes(record.to_json())
    return path


def by_the_script(folder: Path, name: str, created: float) -> Path:
    path = folder / name
    path.mkdir(parents=True)
    (path / STATE).touch()
    os.utime(path / STATE, (created, created))
    return path


def test_the_newest_is_what_was_saved_last_by_whomever(tmp_path: Path) -> None:
    assert handover.newest([tmp_path]) is None
    by_a_notice(tmp_path, "step_9", 100.0)
    (tmp_path / "logs").mkdir()
    torn = by_the_script(tmp_path, "step_20", 900.0)
    (torn / records.SENTINEL).touch()
    assert handover.newest([tmp_path, tmp_path / "gone"]).path.name == "step_9"  # type: ignore[union-attr]
    by_the_script(tmp_path, "epoch_0", 200.0)
    assert handover.newest([tmp_path]).path.name == "epoch_0"  # type: ignore[union-attr]
    assert handover.waiting([tmp_path]).path.name == "step_9"  # type: ignore[union-attr]


def test_what_somebody_has_gone_on_from_waits_no_more_and_is_still_whole(tmp_path: Path) -> None:
    path = by_a_notice(tmp_path, "step_9", 100.0, handover.EXPECTED)
    handover.taken(tmp_path)
    assert handover.waiting([tmp_path]) is None
    record = records.read(path)
    assert record == dataclasses.replace(record, save=handover.TAKEN) and {
        file.name for file in path.iterdir()
    } == {
        STATE,
        records.NAME,
    }
    assert handover.newest([tmp_path]).path == path  # type: ignore[union-attr]


def test_a_resume_is_demanded_of_the_same_job_and_just_after_75(tmp_path: Path) -> None:
    def demanded(save: str, run: str, job: str, now: float) -> bool:
        path = by_a_notice(tmp_path, f"step_{len(list(tmp_path.iterdir()))}", 100.0, save, run)
        return handover.Saved(path, 100.0, records.read(path)).demands_a_resume(job, now)

    assert demanded("", "slurm:1", "slurm:1", 1e9)
    assert not demanded("", "slurm:1", "slurm:2", 101.0)
    assert not demanded(handover.EXPECTED, "slurm:1", "slurm:2", 101.0)
    assert demanded(handover.EXPECTED, "", "", 101.0)
    assert not demanded(handover.EXPECTED, "", "", 1e9)
    assert not demanded("", "", "", 101.0)


def test_the_folders_of_a_command_are_those_that_are_there(tmp_path: Path) -> None:
    words = ["python", "train.py", "--out", str(tmp_path), f"--other={tmp_path}", "--lr=0.1", ""]
    assert handover.named(words) == [tmp_path, tmp_path]
