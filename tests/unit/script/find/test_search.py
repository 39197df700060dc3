"""The script's own save is looked for in its source, and what is not there is said."""

from __future__ import annotations

import linecache
from pathlib import Path

import pytest

from helpers.script import shapes as script_shapes
from helpers.script.stage import Stage, enter

LOOP = script_shapes.STEP_SHAPES["plain"]


def _found(folder: Path, source: str) -> Stage:
    stage = Stage(folder, source, at=3, act=enter).run()
    assert stage.script is not None
    return stage


def _without_save(source: str) -> str:
    return "\n".join(line for line in source.splitlines() if "train.report" not in line)


@pytest.mark.parametrize(
    ("source", "because"),
    [
        (_without_save(LOOP), "no frame of the training loop calls"),
        (
            _without_save(LOOP) + "\n    train.report({}, "
            "checkpoint=Checkpoint.from_directory(tempfile.mkdtemp()))\n",
            "only when training is over",
        ),
        (
            LOOP.replace("checkpoint=Checkpoint.from_directory(folder)", "checkpoint=None"),
            "no frame of the training loop calls",
        ),
    ],
    ids=["none", "at the end", "without a checkpoint"],
)
def test_a_script_without_a_save_of_its_own_is_told_so(tmp_path: Path, source: str, because: str) -> None:
    stage = _found(tmp_path, source)
    assert stage.script is not None and stage.script.points == [] and because in stage.script.because


def test_a_source_that_was_edited_since_is_not_believed(tmp_path: Path) -> None:
    stage = Stage(tmp_path, LOOP, at=3, act=enter)
    code = compile((tmp_path / "script.py").read_text(), str(tmp_path / "script.py"), "exec")
    (tmp_path / "script.py").write_text(LOOP.replace("999", "998"))
    linecache.checkcache()
    stage.run_code(code)
    assert stage.script is not None and stage.script.points == []


@pytest.mark.parametrize(
    ("shape", "near"),
    [
        (script_shapes.EPOCH_SHAPES["seed"], False),
        (script_shapes.EPOCH_SHAPES["comprehension"], False),
        (script_shapes.STEP_SHAPES["plain"], True),
        (script_shapes.STEP_SHAPES["closure"], True),
    ],
)
def test_a_save_point_is_near_when_every_step_passes_it(tmp_path: Path, shape: str, near: bool) -> None:
    stage = _found(tmp_path, shape)
    assert stage.script is not None and stage.script.near is near


def test_without_a_notice_nothing_is_entered(tmp_path: Path) -> None:
    stage = Stage(tmp_path, LOOP).run()
    assert stage.saved is None and stage.reports == []


def test_another_rank_leaves_without_a_save(tmp_path: Path) -> None:
    stage = Stage(tmp_path, script_shapes.STEP_SHAPES["rank 0 alone"], rank=1, at=3, act=enter).run()
    assert stage.saved is None and stage.after == 1 and stage.steps == 3
