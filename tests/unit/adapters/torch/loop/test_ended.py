"""A run that had finished by a loop of the script's own, and is started again."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch

import lastcall
from lastcall.adapters.torch.loop import endings
from lastcall.core.checkpoint.catalog import Catalog
from lastcall.storage.files import Files


def parts() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    model = torch.nn.Linear(2, 1)
    return model, torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)


def learn(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()


def newest(directory: Path) -> Any:
    return Catalog(directory, Files()).entries()[0].record


def ticked(directory: Path, form: str, total: int = 6) -> int:
    """A run by a loop of the script's own, in an incarnation of its own. How many steps it made."""
    endings.again(directory)  # as in another process
    model, optimizer = parts()
    data = torch.utils.data.DataLoader(torch.zeros(total, 2))  # type: ignore[arg-type, var-annotated]
    run = lastcall.protect(directory, model=model, optimizer=optimizer)
    return FORMS[form](run, model, optimizer, total, data)


def counted_in_the_head(run: Any, model: Any, optimizer: Any, total: int, _: Any) -> int:
    count = 0
    with run:
        while count < total:
            learn(model, optimizer)
            count += 1
            run.tick()
    return int(run.step) - (run.resumed or 0)


def counted_before_the_step(run: Any, model: Any, optimizer: Any, total: int, _: Any) -> int:
    count = 0
    with run:
        while True:
            if count >= total:
                break
            learn(model, optimizer)
            count += 1
            run.tick()
    return int(run.step) - (run.resumed or 0)


def counted_behind_the_step(run: Any, model: Any, optimizer: Any, total: int, _: Any) -> int:
    count = 0
    with run:
        while True:
            learn(model, optimizer)
            count += 1
            run.tick()
            if count >= total:
                break
    return int(run.step) - (run.resumed or 0)


def counted_inside_the_block(run: Any, model: Any, optimizer: Any, total: int, _: Any) -> int:
    with run:
        count = 0
        while count < total:
            learn(model, optimizer)
            count += 1
            run.tick()
    return int(run.step) - (run.resumed or 0)


def asked_of_the_run(run: Any, model: Any, optimizer: Any, total: int, _: Any) -> int:
    with run:
        while run.step < total:
            learn(model, optimizer)
            run.tick()
    return int(run.step) - (run.resumed or 0)


def epochs_of_its_own(run: Any, model: Any, optimizer: Any, _: int, data: Any) -> int:
    epoch = 0
    with run:
        while epoch < 2:
            for _ in run.batches(data):
                learn(model, optimizer)
            epoch += 1
    return int(run.step) - (run.resumed or 0)


FORMS = {
    "head": counted_in_the_head,
    "before": counted_before_the_step,
    "behind": counted_behind_the_step,
    "inside": counted_inside_the_block,
    "asks": asked_of_the_run,
    "epochs": epochs_of_its_own,
}


@pytest.mark.parametrize("form", ["head", "before", "asks", "epochs"])
def test_a_finished_run_whose_loop_counts_by_itself_has_nothing_left_to_do(
    form: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "lastcall")
    assert ticked(tmp_path, form)
    caplog.clear()
    assert ticked(tmp_path, form) == 0
    assert "Nothing left to do: the run in" in caplog.text and newest(tmp_path).exact


def test_it_trains_on_where_more_is_asked_for(tmp_path: Path) -> None:
    ticked(tmp_path, "before", 6)
    assert ticked(tmp_path, "before", 9) == 3
    assert newest(tmp_path).step == 9 and newest(tmp_path).exact


@pytest.mark.parametrize(("form", "more"), [("behind", 1), ("inside", 6)])
def test_a_finished_run_that_trains_again_before_it_asks_is_not_exact(
    form: str, more: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    ticked(tmp_path, form)
    caplog.clear()
    assert ticked(tmp_path, form) == more
    assert "the run had finished at step 6, and was started again" in caplog.text
    assert not newest(tmp_path).exact and "had finished at step 6" in newest(tmp_path).because


def test_a_periodic_save_of_the_last_step_does_not_hide_the_end(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    every = lastcall.PeriodicCheckpointConfig(save_steps=1)
    for _ in range(2):
        endings.again(tmp_path)
        model, optimizer = parts()
        run = lastcall.protect(tmp_path, model=model, optimizer=optimizer, periodic=every)
        counted_behind_the_step(run, model, optimizer, 6, None)
    assert "the run had finished at step 6, and was started again" in caplog.text
