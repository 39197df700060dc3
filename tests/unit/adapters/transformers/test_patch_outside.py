"""What is said to a Trainer from outside, and what it says there: its folder, who is told that it is
protected, and Kubeflow."""

from __future__ import annotations

import logging
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lastcall.adapters.transformers import listeners, patch
from lastcall.adapters.transformers.callback import JITCheckpointCallback
from lastcall.settings import JITCheckpointConfig

Make = Callable[..., Any]


def test_a_trainer_is_made_with_the_directory_that_was_named_outside(
    fresh: Any, make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    patch.apply(fresh, everywhere=True)
    monkeypatch.setenv("LASTCALL_DIRECTORY", str(tmp_path / "volume"))
    trainer = make(max_steps=2, save_strategy="steps", save_steps=1)
    # where the script will save its final model, too
    assert trainer.args.output_dir == str(tmp_path / "volume")
    trainer.train()
    assert (tmp_path / "volume" / "checkpoint-2" / "lastcall.json").exists() and not (
        tmp_path / "out"
    ).exists()


def test_a_trainer_that_is_not_protected_keeps_its_own(
    fresh: Any, make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    patch.apply(fresh, everywhere=False)
    monkeypatch.setenv("LASTCALL_DIRECTORY", str(tmp_path / "volume"))
    assert make().args.output_dir == str(tmp_path / "out")
    patch.apply(fresh, everywhere=True)
    monkeypatch.setenv("LASTCALL_ENABLED", "0")
    assert make().args.output_dir == str(tmp_path / "out")


def test_a_callback_that_is_added_later_brings_the_directory_too(
    fresh: Any, make: Make, tmp_path: Path
) -> None:
    patch.apply(fresh, everywhere=False)
    trainer = make()
    trainer.add_callback(JITCheckpointCallback(JITCheckpointConfig(directory=str(tmp_path / "volume"))))
    trainer.train()
    assert (tmp_path / "volume" / ".lastcall").exists()


def test_listeners_are_told_of_each_run_before_its_first_step(
    fresh: Any, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    patch.apply(fresh, everywhere=True)
    told: list[tuple[str, int, bool, int | None]] = []
    tell = lambda run: told.append((str(run.root), run.trainer.state.global_step, run.listening, run.resumed))  # noqa: E731
    monkeypatch.setattr(listeners, "begun", [tell])
    trainer = make()
    trainer.train()
    assert told == [(trainer.args.output_dir, 0, True, None)]


def test_a_run_that_answers_no_signal_trains_and_leaves_the_scripts_handler_alone(
    fresh: Any, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    patch.apply(fresh, everywhere=True)
    monkeypatch.setenv("LASTCALL_SIGNALS", "none")
    told: list[tuple[bool, object]] = []
    monkeypatch.setattr(
        listeners, "begun", [lambda run: told.append((run.listening, signal.getsignal(signal.SIGTERM)))]
    )
    before = signal.getsignal(signal.SIGTERM)
    trainer = make()
    trainer.train()
    assert told == [(False, before)] and trainer.state.global_step == 2


@pytest.mark.parametrize("push", [True, False])
def test_transformers_own_report_to_kubeflow_stands_down_for_ours(
    fresh: Any,
    make: Make,
    push: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    from transformers.integrations import KubeflowCallback

    patch.apply(fresh, everywhere=True)
    monkeypatch.setenv("KUBEFLOW_TRAINER_SERVER_URL", "http://127.0.0.1:9/status")
    monkeypatch.setenv("KUBEFLOW_TRAINER_SERVER_TOKEN", str(tmp_path / "none"))
    monkeypatch.setenv("LASTCALL_PROGRESS_PUSH", str(int(push)))
    trainer = make(callbacks=[KubeflowCallback()])
    with caplog.at_level(logging.INFO, "lastcall"):
        trainer.train()
    theirs = [type(callback).__name__ for callback in trainer.callback_handler.callbacks]
    assert ("KubeflowCallback" in theirs) is not push
    assert (
        ("KubeflowCallback is disabled" in caplog.text)
        is ("Could not report progress" in caplog.text)
        is push
    )
