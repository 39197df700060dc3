"""A Trainer that is told to stop at every kind of moment, in this process, and goes on in a second one: what
it trains on, and the randomness that it leaves, are those of one that was never told.

The data draws now and then, and not from all generators: what is noted at a batch is copied only where one
has moved."""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, IterableDataset
from transformers import Trainer, TrainerCallback, TrainingArguments

from helpers.processes.forkserver import until
from lastcall import errors
from lastcall.adapters.transformers import listeners, patch
from lastcall.adapters.transformers.callback import JITCheckpointCallback
from lastcall.adapters.transformers.run import TrainerRun
from lastcall.settings import JITCheckpointConfig

SIZE, STEPS = 22, 14
RUNS: list[TrainerRun] = []


def drawn(index: int, how: str) -> float:
    """What a sample draws: nothing, or what each generator may do without moving as one would think."""
    if how == "now and then" and index % 3:
        return 0.0
    if how == "normal":  # every second one is the spare number: no word moves
        return np.random.standard_normal() + random.gauss(0, 1) + float(torch.randn(()))
    if how == "rounds":  # 624 words: the position does not move
        return float(np.random.bytes(4 * 624)[0])
    return float(np.random.rand()) if how else 0.0


class Rows(Dataset[dict[str, Any]]):
    def __init__(self, how: str) -> None:
        self.how = how

    def __len__(self) -> int:
        return SIZE

    def __getitem__(self, index: int) -> dict[str, Any]:
        if index >= SIZE:
            raise IndexError(index)  # group_by_length goes through it without asking for its length
        return {"x": torch.tensor([float(index), drawn(index, self.how)]), "input_ids": [0] * (1 + index % 4)}


class Flow(IterableDataset[dict[str, Any]]):
    def __init__(self, how: str) -> None:
        self.rows = Rows(how)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return (self.rows[index] for index in range(SIZE))


def collated(rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    return {"x": torch.stack([row["x"] for row in rows]), "labels": torch.zeros(len(rows))}


class Dropping(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(2, 1)
        self.seen: list[Any] = []

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        if self.training:
            self.seen.append(x.flatten().tolist())
        return {"loss": (torch.nn.functional.dropout(self.linear(x), 0.3, self.training) ** 2).mean()}


class Stopping(TrainerCallback):
    """SIGTERM to this process, at one event of one step."""

    def __init__(self, event: str, step: int) -> None:
        setattr(self, event, self._stop)
        self._step = step
        self.stopped = False

    def _stop(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == self._step and not self.stopped:
            self.stopped = True
            os.kill(os.getpid(), signal.SIGTERM)
            until(
                lambda: RUNS[-1].driver.notified,
                "a thread to hear it: the steps that are left take milliseconds",
            )


@pytest.fixture
def protected(fresh: type, monkeypatch: pytest.MonkeyPatch) -> type:
    patch.apply(fresh, everywhere=False)
    monkeypatch.setattr(listeners, "begun", [*listeners.begun, RUNS.append])
    return fresh


def seed() -> None:
    random.seed(1), np.random.seed(2)
    torch.manual_seed(3)


def train(
    kind: type, folder: Path, data: Any, callbacks: list[Any], said: dict[str, Any]
) -> tuple[list[Any], list[Any]]:
    """The samples of each micro-batch that was trained on, and what is left: weights, and one more number of
    each generator."""
    seed()
    arguments = TrainingArguments(
        output_dir=str(folder),
        max_steps=STEPS,
        per_device_train_batch_size=2,
        save_strategy="no",
        report_to="none",
        use_cpu=True,
        disable_tqdm=True,
        dataloader_pin_memory=False,
        logging_strategy="no",
        remove_unused_columns=False,
        **said,
    )
    model = Dropping()
    trainer: Trainer = kind(
        model=model,
        args=arguments,
        data_collator=collated,
        train_dataset=data,
        eval_dataset=Rows(""),
        callbacks=callbacks,
    )
    try:
        trainer.train()
    except errors.Preempted as left:
        return model.seen, [left.code]
    return model.seen, [
        *(p.tolist() for p in model.parameters()),
        random.random(),
        np.random.rand(),
        torch.rand(()).item(),
    ]


CASES: dict[str, tuple[Any, str, dict[str, Any]]] = {
    "nothing is drawn": (Rows, "", {}),
    "numpy now and then": (Rows, "now and then", {}),
    "normal numbers that were kept": (Rows, "normal", {}),
    "whole rounds of numpy's words": (Rows, "rounds", {}),
    "accumulation": (Rows, "now and then", {"gradient_accumulation_steps": 3}),
    "lengths": (Rows, "now and then", {"train_sampling_strategy": "group_by_length"}),
    "a stream": (Flow, "", {}),
    "a worker": (Rows, "now and then", {"dataloader_num_workers": 1}),
    "evaluations": (Rows, "now and then", {"eval_strategy": "steps", "eval_steps": 4}),
}
MOMENTS = [("on_step_begin", 3), ("on_step_end", 11)]  # an epoch has 11 batches
QUICK = ("numpy now and then", "normal numbers that were kept", "accumulation", "evaluations")


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
@pytest.mark.parametrize(
    "case", [case if case in QUICK else pytest.param(case, marks=pytest.mark.slow) for case in CASES]
)
def test_no_moment_leaves_a_trace_where(protected: type, tmp_path: Path, case: str) -> None:
    source, how, said = CASES[case]
    wanted, left = train(protected, tmp_path / "peace", source(how), [], said)
    moments = (
        [*MOMENTS, ("on_prediction_step", 8)]
        if "eval_steps" in said
        else [*MOMENTS, ("on_optimizer_step", 7)]
    )
    for number, (event, step) in enumerate(moments):
        folder = tmp_path / f"struck-{number}"
        stopping = Stopping(event, step)
        config = JITCheckpointConfig(enabled=True, kill_wait=0.0)
        former, code = train(protected, folder, source(how), [stopping, JITCheckpointCallback(config)], said)
        assert stopping.stopped and code == [75], (event, step, code)
        rest, found = train(protected, folder, source(how), [JITCheckpointCallback(config)], said)
        assert found == left, (event, step)
        assert rest == wanted[len(wanted) - len(rest) :], (event, step)
        assert len(former) + len(rest) >= len(wanted), "a batch was left out"
