"""Directories that several runs have used, where the run is known by name; and checkpoints that somebody
refers to."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import pytest

from lastcall.core.checkpoint import record as records
from lastcall.core.checkpoint.catalog import Catalog
from lastcall.core.checkpoint.record import Entry
from lastcall.core.checkpoint.retention import Keep, superfluous
from lastcall.storage import files as storage
from lastcall.types import Kind


@pytest.fixture
def cat(root: Path) -> Catalog:
    made = Catalog(root, storage.Files())
    made.run = "mine"
    return made


def folder(
    path: Path, sequence: int, step: int = 0, *, run: str = "mine", kind: Kind = Kind.PERIODIC, **more: object
) -> Path:
    path.mkdir(parents=True)
    (path / "content").write_text(run)
    record = records.Record(sequence, step, kind, "test", True, (), run=run, **more)  # type: ignore[arg-type]
    (path / records.NAME).write_bytes(record.to_json())
    return path


def steps(entries: list[Entry]) -> list[int]:
    return [entry.record.step for entry in entries]


def test_only_those_of_this_run_are_its_own(cat: Catalog, root: Path) -> None:
    folder(root / "checkpoint-1", 1, 1)
    folder(root / "checkpoint-2", 2, 2, run="theirs")
    folder(root / "checkpoint-3", 3, 3, run="")
    folder(root / "checkpoint-4", 4, 4)
    assert (steps(cat.entries()), steps(cat.foreign())) == ([4, 1], [3, 2])


def test_a_run_without_a_name_owns_all_that_is_there(cat: Catalog, root: Path) -> None:
    cat.run = ""
    folder(root / "checkpoint-1", 1, 1)
    folder(root / "checkpoint-2", 2, 2, run="theirs")
    assert (steps(cat.entries()), cat.foreign()) == ([2, 1], [])


def test_a_save_of_another_run_is_not_found_as_ours(cat: Catalog, root: Path) -> None:
    folder(root / "checkpoint-1", 1, 1, run="theirs", save="jit-1")
    assert cat.find("jit-1") is None
    folder(root / "checkpoint-2", 2, 2, save="jit-1")
    found = cat.find("jit-1")
    assert found is not None and found.record.step == 2


def test_publishing_the_step_of_another_run_keeps_theirs_aside(
    cat: Catalog, root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder(root / "checkpoint-7", 1, 7, run="theirs")
    built = folder(cat.staging / "checkpoint-7", 2, 7)
    with caplog.at_level(logging.WARNING, "lastcall"):
        final = cat.publish(built, 7)
    assert (final / "content").read_text() == "mine"
    assert (root / "checkpoint-7.replaced-0" / "content").read_text() == "theirs"
    assert (
        "checkpoint-7 is not a checkpoint of this run: it is kept as checkpoint-7.replaced-0" in caplog.text
    )
    assert (steps(cat.entries()), [entry.path.name for entry in cat.foreign()]) == (
        [7],
        ["checkpoint-7.replaced-0"],
    )


def test_each_one_that_steps_aside_gets_a_name_of_its_own(cat: Catalog, root: Path) -> None:
    folder(root / "checkpoint-7", 1, 7, run="first")
    for number, run in enumerate(("second", "third"), 2):
        cat.run = run
        cat.publish(folder(cat.staging / "checkpoint-7", number, 7, run=run), 7)
    assert {path.name: (path / "content").read_text() for path in root.glob("checkpoint-*")} == {
        "checkpoint-7": "third", "checkpoint-7.replaced-0": "first", "checkpoint-7.replaced-1": "second",
    }  # fmt: skip


def test_publishing_an_own_step_again_replaces_it(cat: Catalog, root: Path) -> None:
    folder(root / "checkpoint-7", 1, 7)
    cat.publish(folder(cat.staging / "checkpoint-7", 2, 7), 7)
    assert {name for name in os.listdir(root) if name != ".lastcall"} == {"checkpoint-7"}
    assert [entry.record.sequence for entry in cat.entries()] == [2]


def test_rotation_leaves_other_runs_alone(cat: Catalog, root: Path) -> None:
    for step in range(1, 6):
        folder(root / f"checkpoint-{step}", step, step)
        folder(root / f"checkpoint-1{step}", step, 10 + step, run="theirs")
    gone = cat.prune(Keep(2))
    assert sorted(path.name for path in gone) == ["checkpoint-1", "checkpoint-2", "checkpoint-3"]
    assert (steps(cat.entries()), sorted(steps(cat.foreign()))) == ([5, 4], [11, 12, 13, 14, 15])


def test_a_checkpoint_that_somebody_refers_to_stays(cat: Catalog, root: Path) -> None:
    for step in range(1, 7):
        folder(root / f"checkpoint-{step}", step, step)
    cat.prune(Keep(2, always=frozenset({"checkpoint-2", "checkpoint-99"})))
    assert steps(cat.entries()) == [6, 5, 2]
    cat.prune(Keep(2))
    assert steps(cat.entries()) == [6, 5]


def test_without_a_limit_a_superseded_one_of_a_notice_stays_too_if_somebody_refers_to_it() -> None:
    entries = [
        Entry(Path(f"checkpoint-{step}"), records.Record(step, step, Kind.JIT, "", True, (), run="mine"))
        for step in (5, 4, 3, 2, 1)
    ]
    assert [
        entry.record.step for entry in superfluous(entries, Keep(always=frozenset({"checkpoint-2"})))
    ] == [3, 1]
