"""What an epoch sets at its top and an inner loop with tick() carries on. Whole runs: tests/shapes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import lastcall


def trained(directory: Path, epoch: Any) -> None:
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def learn() -> None:
        optimizer.zero_grad()
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()

    with lastcall.protect(directory, model=model, optimizer=optimizer) as run:
        for _ in run.epochs(2):
            epoch(run, learn)


def counted(run: Any, learn: Any) -> None:
    n = 0
    while n < 3:
        learn()
        n += 1
        run.tick()


def asked_of_the_run(run: Any, learn: Any) -> None:
    while run.step < 3 * (run.epoch + 1):
        learn()
        run.tick()


def test_a_loop_that_carries_what_the_epoch_sets_is_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    trained(tmp_path, lambda run, learn: counted(run, learn))
    assert "`while n < 3` (test_epoch_top.py:" in caplog.text and "carries `n` and starts" in caplog.text
    assert caplog.text.count("in an epoch that is resumed") == 1


def test_one_that_carries_nothing_is_not(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    trained(tmp_path, lambda run, learn: asked_of_the_run(run, learn))
    assert "A resumed run will differ" not in caplog.text
