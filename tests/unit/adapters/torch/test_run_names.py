"""What protect() is given, and what a resumed run is given under other names."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
import tqdm

import lastcall
from lastcall import errors
from lastcall.adapters.torch.loop import endings
from lastcall.core.checkpoint.catalog import Catalog
from lastcall.core.progress.report import ProgressReport
from lastcall.storage.files import Files


def parts() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    model = torch.nn.Linear(2, 1)
    return model, torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)


def learn(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()


def trained(directory: Path, steps: int = 3) -> torch.nn.Module:
    model, optimizer = parts()
    with lastcall.protect(directory, model=model, optimizer=optimizer) as run:
        for _ in run.steps(steps):
            learn(model, optimizer)
    return model


def newest(directory: Path) -> Any:
    return Catalog(directory, Files()).entries()[0].record


@pytest.mark.parametrize(
    ("given", "spelling"),
    [
        ({"save_steps": 100}, "periodic=lastcall.PeriodicCheckpointConfig(save_steps=100)"),
        ({"grace": 100}, "config=lastcall.JITCheckpointConfig(grace=100)"),
        ({"kill_wait": 0.5}, "config=lastcall.JITCheckpointConfig(kill_wait=0.5)"),
        ({"grace_seconds": 100}, "config=lastcall.JITCheckpointConfig(grace=100)"),
        ({"LASTCALL_SAVE_STEPS": 5}, "periodic=lastcall.PeriodicCheckpointConfig(save_steps=5)"),
        ({"signals": ["SIGUSR1"]}, "config=lastcall.JITCheckpointConfig(signals=['SIGUSR1'])"),
        ({"config": {"grace": 100}}, "config=lastcall.JITCheckpointConfig(...)"),
        (
            {"periodic": lastcall.JITCheckpointConfig(environ={})},
            "periodic=lastcall.PeriodicCheckpointConfig(...)",
        ),
    ],
)
def test_f10_a_setting_among_the_state_is_refused_with_the_right_spelling(
    tmp_path: Path, given: dict[str, Any], spelling: str
) -> None:
    with pytest.raises(errors.ConfigError) as caught:
        lastcall.protect(tmp_path, model=torch.nn.Linear(1, 1), **given)
    assert spelling in str(caught.value) and caught.value.code == 78


def test_f10_a_model_may_have_the_name_of_a_setting(tmp_path: Path) -> None:
    lastcall.protect(tmp_path, mode=torch.nn.Linear(1, 1), monitor={"best": 0.0})


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            lambda model, optimizer: {"net": model, "optimizer": optimizer},
            "net: the checkpoint holds nothing .* .it holds `model`.",
        ),
        (
            lambda model, optimizer: {"model": model},
            "optimizer: the checkpoint holds an optimizer of this name",
        ),
        (
            lambda model, optimizer: {"optimizer": optimizer},
            "model: the checkpoint holds an nn.Module of this name",
        ),
        (
            lambda model, optimizer: {"model": model, "opt": optimizer},
            "opt: the checkpoint holds nothing of this name",
        ),
    ],
)
def test_f8_a_model_or_an_optimizer_of_another_name_is_refused(
    tmp_path: Path, change: Any, words: str
) -> None:
    trained(tmp_path)
    before = sorted(path.name for path in tmp_path.iterdir())
    with (
        pytest.raises(errors.MismatchError, match=words) as caught,
        lastcall.protect(tmp_path, **change(*parts())),
    ):
        raise AssertionError("it went on with fresh values")
    assert "LASTCALL_UNMATCHED=allow" in str(caught.value)
    assert sorted(path.name for path in tmp_path.iterdir()) == before


def test_f8_a_model_in_a_container_counts_too(tmp_path: Path) -> None:
    model, optimizer = parts()
    with lastcall.protect(tmp_path, all={"model": model, "optimizer": optimizer}) as run:
        for _ in run.steps(2):
            learn(model, optimizer)
    model, optimizer = parts()
    other = torch.nn.Linear(1, 1)
    with (
        pytest.raises(errors.MismatchError, match=r"all\['other'\]"),
        lastcall.protect(tmp_path, all={"model": model, "optimizer": optimizer, "other": other}),
    ):
        pass


def test_f8_whoever_allows_it_gets_a_record_that_is_not_exact(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    trained(tmp_path)
    model, optimizer = parts()
    config = lastcall.JITCheckpointConfig(unmatched="allow")
    with lastcall.protect(tmp_path, config=config, net=model, optimizer=optimizer) as run:
        assert run.resumed == 3
        for _ in run.steps(5):
            learn(model, optimizer)
    record = newest(tmp_path)
    assert not record.exact and "`net`" in record.because and "`model`" in record.because
    assert len([text for text in caplog.messages if "will differ" in text]) == 2


def test_f8_what_is_no_model_is_taken_note_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A scheduler that was not there before begins anew: that is another run. A number that was not there is
    nobody's loss."""
    trained(tmp_path)
    model, optimizer = parts()
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    with lastcall.protect(tmp_path, model=model, optimizer=optimizer, scheduler=scheduler, count=1) as run:
        for _ in run.steps(4):
            learn(model, optimizer)
            scheduler.step()
    record = newest(tmp_path)
    assert not record.exact and "`scheduler`" in record.because and "count" not in record.because
    assert "nothing called 'count'" in caplog.text


def test_e10_a_number_that_no_float_holds_is_left_out(tmp_path: Path) -> None:
    model, optimizer = parts()
    with lastcall.protect(tmp_path, model=model, optimizer=optimizer) as run:
        for _ in run.steps(2):
            learn(model, optimizer)
            run.report(x=10**400, loss=1.5, words="no number")
        run.save()
    assert newest(tmp_path).metrics == {"loss": 1.5}


def test_a_run_has_an_id_of_its_own_that_stays(tmp_path: Path) -> None:
    """From "Missing": run.id, for W&B's resume."""
    seen = []
    for steps in (2, 4):
        model, optimizer = parts()
        with lastcall.protect(tmp_path / "a", model=model, optimizer=optimizer) as run:
            seen.append(run.id)
            for _ in run.steps(steps):
                learn(model, optimizer)
    with lastcall.protect(tmp_path / "b", model=torch.nn.Linear(1, 1)) as run:
        seen.append(run.id)
    assert seen[0] == seen[1] != seen[2] and all(isinstance(name, str) and len(name) >= 8 for name in seen)
    with lastcall.protect(tmp_path / "c", config=lastcall.JITCheckpointConfig(enabled=False)) as run:
        assert run.id is None and run.stopping is False


@pytest.mark.usefixtures("leaving")
def test_a_run_says_when_it_was_told_to_stop(tmp_path: Path) -> None:
    """From "Missing": run.stopping."""
    stop = tmp_path / "stop"
    model, optimizer = parts()
    config = lastcall.JITCheckpointConfig(stop_file=str(stop), kill_wait=0.0)
    seen = []
    with (
        pytest.raises(SystemExit),
        lastcall.protect(tmp_path / "run", config=config, model=model, optimizer=optimizer) as run,
    ):
        for _ in run.steps(10_000_000):
            if not stop.exists():
                seen.append(run.stopping)
                stop.touch()
            while not run.stopping:
                pass
            seen.append(run.stopping)
            learn(model, optimizer)
    assert seen[:2] == [False, True]


@pytest.fixture(autouse=True)
def _heard(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "lastcall")


def test_f22_epochs_report_a_total_and_a_percentage(tmp_path: Path) -> None:
    """From the batches of the first epoch, and then from the epochs as they were."""
    model, optimizer = parts()
    data = torch.utils.data.DataLoader(torch.zeros(12, 2), batch_size=2)  # type: ignore[arg-type, var-annotated]
    said: list[tuple[int, object, object]] = []
    with lastcall.protect(tmp_path, model=model, optimizer=optimizer) as run:
        assert run._driver is not None
        context = run._driver.context
        report = ProgressReport(context.progress, context.events, context.clock)
        for epoch in run.epochs(5, start=1):
            for _ in run.batches(data):
                learn(model, optimizer)
                run.report(loss=1.0)
                context.progress.flush()
                said.append((run.step, context.progress.total, report.document()["progressPercentage"]))
                if epoch > 1 and run.batch == 3:
                    break
    assert said[0] == (0, None, 0) and said[3] == (3, 24, 12)
    # 6 + 4 + 4 of three epochs, so 18.7 of four
    assert said[-1][1] == 19 and context.progress.total_epochs == 4


def test_steps_and_epochs_have_a_length_for_a_bar(tmp_path: Path) -> None:
    """Rough edges of section F: `tqdm(run.steps(n))` had no total."""
    model, optimizer = parts()
    with lastcall.protect(tmp_path, model=model, optimizer=optimizer) as run:
        bar = tqdm.tqdm(run.steps(5), disable=True)
        assert len(bar) == 5
        seen = []
        for step in bar:
            seen.append(step)
            learn(model, optimizer)
        assert seen == [0, 1, 2, 3, 4]
    with lastcall.protect(tmp_path, model=model, optimizer=optimizer) as run:
        assert len(run.steps(7)) == 2 and len(run.steps(3)) == 0 and run.steps(3)
        assert list(run.steps(6)) == [5] and next(run.steps(9)) == 6
    with lastcall.protect(tmp_path / "epochs", model=model, optimizer=optimizer) as run:
        assert len(run.epochs(7, start=3)) == 4


def test_f13_an_early_stop_is_not_called_finished_and_the_next_start_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model, optimizer = parts()
    with lastcall.protect(tmp_path, model=model, optimizer=optimizer) as run:
        for step in run.steps(100):
            learn(model, optimizer)
            if step == 4:
                break
    assert newest(tmp_path).reason == "the loop was left at step 5 of 100" and not run.left_early
    with lastcall.protect(tmp_path, model=model, optimizer=optimizer) as run:
        assert run.left_early and run.resumed == 5
    assert (
        "the loop was left at step 5 of 100 (an early stop?)" in caplog.text
        and "if not run.left_early:" in caplog.text
    )


def test_f13_in_epochs_and_beside_a_periodic_save(tmp_path: Path) -> None:
    model, optimizer = parts()
    data = torch.utils.data.DataLoader(torch.zeros(4, 2))  # type: ignore[arg-type, var-annotated]
    every = lastcall.PeriodicCheckpointConfig(save_steps=1)
    with lastcall.protect(tmp_path, model=model, optimizer=optimizer, periodic=every) as run:
        for epoch in run.epochs(10):
            for _ in run.batches(data):
                learn(model, optimizer)
            if epoch == 1:
                break
    assert newest(tmp_path).reason == "the loop was left at step 8, in epoch 1 of 10"


def test_f12_a_finished_run_that_is_started_again_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "lastcall")
    trained(tmp_path)
    endings.again(tmp_path)  # as in another process
    trained(tmp_path)
    assert "Nothing left to do: the run in" in caplog.text and "has finished at step 3" in caplog.text


def test_f12_the_next_fold_is_not_given_the_weights_of_the_last(tmp_path: Path) -> None:
    trained(tmp_path)
    with pytest.raises(errors.ConfigError, match=r"directory of its own: protect\(.*fold-1") as caught:
        trained(tmp_path)
    assert caught.value.code == 78
    trained(tmp_path / "fold-1")


def test_f12_going_on_in_one_process_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    trained(tmp_path)
    trained(tmp_path, 5)
    assert "This process has already finished a run in" in caplog.text


def test_f18_a_learning_rate_edited_before_a_restart_is_named_with_both_values(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def train(rate: float, steps: int, decay: float = 0.0) -> float:
        model = torch.nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), rate, momentum=0.9, weight_decay=decay)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
        with lastcall.protect(tmp_path, model=model, optimizer=optimizer, scheduler=scheduler) as run:
            for _ in run.steps(steps):
                learn(model, optimizer)
                scheduler.step()
        endings.again(tmp_path)
        return float(optimizer.param_groups[0]["lr"])

    assert train(0.1, 2) == 0.025
    train(0.1, 3)
    assert not caplog.messages  # the scheduler's doing is nobody's edit
    assert train(0.3, 4) == 0.1 / 16
    assert [
        text
        for text in caplog.messages
        if "optimizer: lr was 0.1 when the run began and is 0.3 in the script now" in text
    ]
    caplog.clear()
    train(0.3, 5, decay=0.01)
    assert len(caplog.messages) == 1 and "weight_decay was 0.0" in caplog.messages[0]  # each edit once
