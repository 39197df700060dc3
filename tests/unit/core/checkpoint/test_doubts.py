"""What lastcall found that it does not save: warned of once, in every record from then on, and back with the
checkpoint."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch

import lastcall
from lastcall.core.checkpoint import record as records
from lastcall.core.checkpoint.doubts import Doubts
from lastcall.types import Kind


def test_a_doubt_is_warned_of_once(caplog: pytest.LogCaptureFixture) -> None:
    doubts = Doubts()
    assert not doubts and doubts.because == ""
    with caplog.at_level(logging.WARNING, "lastcall"):
        doubts.add("`best` was not handed over", "Use run.carry(best=best).")
        doubts.add("`best` was not handed over", "Use run.carry(best=best).")
    assert caplog.messages == [
        "A resumed run will differ: `best` was not handed over. Use run.carry(best=best)."
    ]
    assert doubts and doubts.because == "`best` was not handed over"


def test_many_doubts_are_counted() -> None:
    doubts = Doubts()
    for number in range(5):
        doubts.add(f"reason {number}", "Do something.")
    assert doubts.because == "reason 0; reason 1; reason 2; and 2 more"
    assert doubts.document() == [f"reason {number}" for number in range(5)]


def test_a_checkpoint_of_a_doubtful_run_is_whole_and_not_exact(tmp_path: Path) -> None:
    for incarnation in range(2):
        model = torch.nn.Linear(2, 2)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        with lastcall.protect(tmp_path / "run", model=model, optimizer=optimizer) as run:
            for step in run.steps(3 + incarnation):
                model(torch.ones(1, 2)).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
                if incarnation == 0 and step == 0:
                    run._subject.doubts.add("`best` was not handed over", "Use run.carry().")
        found = records.read(tmp_path / "run" / f"checkpoint-{3 + incarnation}")
        assert (
            not found.exact and found.whole and found.because == found.doubt == "`best` was not handed over"
        )


def test_a_record_without_doubt_reads_as_before() -> None:
    record = records.Record(1, 2, Kind.MANUAL, "", True, ())
    assert b"doubt" not in record.to_json() and records.parse(record.to_json()) == record
    doubted = records.Record(1, 2, Kind.MANUAL, "", False, (), because="x", doubt="x")
    assert records.parse(doubted.to_json()) == doubted and doubted.whole
