"""What a Trainer logs and leaves behind is what it would without lastcall, preempted or not."""

from __future__ import annotations

import contextlib
import os
import signal
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import TrainerCallback

from helpers.processes.forkserver import until
from lastcall import errors
from lastcall.adapters.transformers import calls, listeners, patch
from lastcall.adapters.transformers.callback import JITCheckpointCallback
from lastcall.adapters.transformers.run import TrainerRun
from lastcall.settings import JITCheckpointConfig

Make = Callable[..., Any]
RUNS: list[TrainerRun] = []


class Stopping(TrainerCallback):
    def __init__(self, step: int) -> None:
        self._step = step

    def on_step_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        if state.global_step == self._step:
            os.kill(os.getpid(), signal.SIGTERM)
            run = RUNS[-1]
            until(lambda: run.session.open and run.subject.due <= state.global_step, "a thread to hear it")


@pytest.fixture
def protected(fresh: type, monkeypatch: pytest.MonkeyPatch) -> type:
    patch.apply(fresh, everywhere=False)
    monkeypatch.setattr(listeners, "begun", [RUNS.append])
    return fresh


def train(make: Make, kind: type, folder: Path, stop: int | None, **said: Any) -> Any:
    """`stop`: the step after which it is told to; None: without lastcall, 0: never."""
    calls._counted.clear()
    config = JITCheckpointConfig(kill_wait=0.0)
    ours = [] if stop is None else [Stopping(stop), JITCheckpointCallback(config)]
    trainer = make(kind=kind, callbacks=ours, output_dir=str(folder), per_device_train_batch_size=1, **said)
    with pytest.raises(errors.Preempted) if stop else contextlib.nullcontext():
        trainer.train()
    return trainer


def gathering(base: type) -> type:
    """TRL's way: metrics wait in lists, by whether the model trains, and are logged with whatever is logged
    next."""

    class Gathering(base):  # type: ignore[misc, valid-type]
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            self._metrics: dict[str, dict[str, list[float]]] = {
                "train": defaultdict(list),
                "eval": defaultdict(list),
            }
            super().__init__(*args, **kwargs)
            self.model.eval()  # as from_pretrained() leaves it

        def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            self._metrics["train" if self.model.training else "eval"]["tokens"].append(
                float(self.state.global_step)
            )
            return super().compute_loss(model, inputs, *args, **kwargs)

        def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
            waiting = self._metrics["train" if self.model.training else "eval"]
            super().log(
                {**logs, **{name: sum(values) / len(values) for name, values in waiting.items()}},
                *args,
                **kwargs,
            )
            waiting.clear()

    return Gathering


@pytest.mark.parametrize("stop", [3, 4])
def test_e3_metrics_that_wait_for_a_log_line_stand_in_the_line_they_belong_to(
    make: Make, protected: type, tmp_path: Path, stop: int
) -> None:
    """E3: the save falls on a step that logs, or on the one before."""
    kind, said = gathering(protected), {"max_steps": 8, "logging_steps": 2}
    wanted = train(make, kind, tmp_path / "peace", None, **said)
    train(make, kind, tmp_path / "struck", stop, **said)
    found = train(make, kind, tmp_path / "struck", 0, **said)

    def lines(trainer: Any) -> list[dict[str, float]]:
        return [
            {name: line[name] for name in ("step", "loss", "tokens")}
            for line in trainer.state.log_history
            if "loss" in line
        ]

    assert lines(found) == lines(wanted) and len(lines(found)) == 4


BEST = {2: 5.0, 4: 4.0, 6: 3.0, 8: 6.0, 10: 7.0}  # the evaluations; the best one is that of step 6


def evaluating(base: type) -> type:
    class Evaluating(base):  # type: ignore[misc, valid-type]
        def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
            metrics = {"eval_loss": BEST[self.state.global_step]}
            self.log(metrics)
            self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
            return metrics

    return Evaluating


@pytest.mark.parametrize("limit", [None, 1, 2])
@pytest.mark.parametrize("strategy", ["best", "steps"])
def test_e4_as_many_checkpoints_are_left_as_without_lastcall(
    make: Make, protected: type, tmp_path: Path, strategy: str, limit: int | None
) -> None:
    """E4: `save_strategy="best"` asks for the best and for nothing else, interrupted or not. With "steps" the
    last one always stays."""
    said = {
        "max_steps": 10,
        "eval_strategy": "steps",
        "eval_steps": 2,
        "save_strategy": strategy,
        "save_steps": 2,
        "save_total_limit": limit,
        "metric_for_best_model": "eval_loss",
        "greater_is_better": False,
    }
    kind = evaluating(protected)

    def left(folder: Path) -> list[str]:
        return sorted(path.name for path in folder.glob("checkpoint-*"))

    train(make, kind, tmp_path / "without", None, **said)
    train(make, kind, tmp_path / "with", 0, **said)
    train(make, kind, tmp_path / "struck", 7, **said)
    train(make, kind, tmp_path / "struck", 0, **said)
    wanted = left(tmp_path / "without")
    if strategy == "steps" and limit == 1:
        # Transformers leaves the best alone; a restart after the end would train again
        wanted = sorted({*wanted, "checkpoint-10"})
    assert (left(tmp_path / "with"), left(tmp_path / "struck")) == (wanted, wanted)
