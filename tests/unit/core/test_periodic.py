"""Checkpoints without a notice, of several ranks."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from helpers.sessions import Crew
from lastcall import testing
from lastcall.core import exits
from lastcall.core.catalog import Catalog
from lastcall.settings import PeriodicCheckpointConfig
from lastcall.storage import files as storage
from lastcall.testing import Fault, FaultyFiles
from lastcall.types import Kind


@pytest.fixture(autouse=True)
def _nobody_leaves_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exits, "leave", lambda code: None)


def every(steps: int, **more: object) -> PeriodicCheckpointConfig:
    return PeriodicCheckpointConfig(save_strategy="steps", save_steps=steps, **more, environ={})  # type: ignore[arg-type]


def found(root: Path) -> list[tuple[int, Kind, int]]:
    return [(entry.record.step, entry.record.kind, entry.record.world) for entry in Catalog(root, storage.Files()).entries()]


def test_all_ranks_save_every_few_steps(tmp_path: Path) -> None:
    assert Crew(tmp_path, 2, periodic=every(2)).train(5) == [5, 5]
    assert found(tmp_path) == [(5, Kind.FINAL, 2), (4, Kind.PERIODIC, 2), (2, Kind.PERIODIC, 2)]


def test_the_ranks_do_what_rank_0_has_found_to_be_better(tmp_path: Path) -> None:
    crew = Crew(tmp_path, 2, periodic=every(1, monitor="loss", save_best_only=True))
    losses = [9.0, 3.0, 7.0, 1.0, 5.0]
    crew.sessions[0].metrics = lambda: {"loss": losses[crew.subjects[0].step - 1]}
    crew.sessions[1].metrics = lambda: {"loss": -crew.subjects[1].step}  # would find each one better
    assert crew.train(5) == [5, 5]
    assert [step for step, kind, _ in found(tmp_path) if kind is Kind.PERIODIC] == [4, 2, 1]


def test_a_periodic_save_that_fails_on_one_rank_is_none_on_all_and_training_goes_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    files = FaultyFiles(*(Fault("fsync", number, errno.EIO) for number in (1, 2, 3)))
    assert Crew(tmp_path, 2, periodic=every(2), files={1: files}).train(5) == [5, 5]
    assert found(tmp_path) == [(5, Kind.FINAL, 2), (4, Kind.PERIODIC, 2)]
    assert caplog.text.count("Periodic checkpoint of step 2 was not saved: ") == 2
    testing.assert_resumable(tmp_path, step=5, exact=True)


def test_rotation_is_rank_0s_business(tmp_path: Path) -> None:
    Crew(tmp_path, 2, periodic=every(1, save_total_limit=2)).train(6)
    assert [step for step, _, _ in found(tmp_path)] == [6, 5]
