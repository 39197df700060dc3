"""Saved work is never silently dropped: what a train() call in a folder with checkpoints goes on from, says,
or refuses."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
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
from lastcall.core.checkpoint import record as records
from lastcall.settings import JITCheckpointConfig

Make = Callable[..., Any]
PLATFORM = (
    "SLURM_JOB_ID",
    "SLURM_ARRAY_JOB_ID",
    "RAY_JOB_CONFIG_JSON_ENV_VAR",
    "KUBERNETES_SERVICE_HOST",
    "TORCHELASTIC_RUN_ID",
)
RUNS: list[TrainerRun] = []


class Stopping(TrainerCallback):
    """A signal to this process after a step."""

    def __init__(self, step: int, signum: int = signal.SIGTERM) -> None:
        self._step, self._signum = step, signum

    def on_step_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        if state.global_step == self._step:
            os.kill(os.getpid(), self._signum)
            run = RUNS[-1]
            until(lambda: run.session.open and run.subject.due <= state.global_step, "a thread to hear it")


class Steps(TrainerCallback):
    """The steps that were trained."""

    def __init__(self) -> None:
        self.seen: list[int] = []

    def on_step_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        self.seen.append(state.global_step)


class Data(list[Any]):
    """A data set of the `datasets` library, as far as its fingerprint goes: made of paths and times."""

    _fingerprint = ""


class Folder:
    """One output_dir, in which scripts are started one after the other."""

    def __init__(self, make: Make, root: Path) -> None:
        self.root = root
        self._make = make

    def train(
        self, stop: int = 0, wanted: Any = None, fingerprint: str = "", drop: int = 0, signum: int = signal.SIGTERM,  # noqa: E501
        again: bool = False, **said: Any,
    ) -> list[int]:  # fmt: skip
        """The steps that this life trains. `again`: in the process of the life before."""
        if not again:
            calls._counted.clear()
        config = JITCheckpointConfig(
            kill_wait=0.0, signals=["SIGTERM", "SIGINT"], run_id=said.pop("run_id", None)
        )
        steps = Steps()
        trainer = self._make(
            callbacks=[steps, Stopping(stop, signum), JITCheckpointCallback(config)],
            **{"output_dir": str(self.root), "max_steps": 8, "per_device_train_batch_size": 1, **said},
        )
        trainer.train_dataset = Data(trainer.train_dataset[drop:])
        trainer.train_dataset._fingerprint = fingerprint
        with pytest.raises(errors.Preempted) if stop else contextlib.nullcontext() as left:
            trainer.train(resume_from_checkpoint=wanted)
        assert left is None or left.value.code == (130 if signum == signal.SIGINT else 75)
        return steps.seen

    def names(self) -> set[str]:
        return {path.name for path in self.root.glob("checkpoint-*")}


@pytest.fixture
def folder(fresh: Any, make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Folder:
    for name in PLATFORM:
        monkeypatch.delenv(name, raising=False)
    patch.apply(fresh, everywhere=False)
    monkeypatch.setattr(listeners, "begun", [RUNS.append])
    return Folder(make, tmp_path / "out")


def test_b1_the_fingerprint_of_a_data_set_is_not_what_a_run_is_known_by(folder: Folder) -> None:
    """B1: the same data under another path, or prepared by what cannot be pickled, has another fingerprint
    each time."""
    assert folder.train(stop=3, fingerprint="of a path") == [1, 2, 3]
    assert folder.train(stop=5, fingerprint="of another path") == [4, 5]
    assert folder.train(fingerprint="of a third one") == [6, 7, 8]
    assert not [name for name in folder.names() if "replaced" in name]


@pytest.mark.parametrize("strategy", ["no", "steps", "epoch"])
def test_b2_a_finished_run_is_lengthened(
    folder: Folder, strategy: str, caplog: pytest.LogCaptureFixture
) -> None:
    """B2: resume_from_checkpoint=True is the last checkpoint in the folder, also where max_steps has changed
    since."""
    caplog.set_level(logging.INFO, "lastcall")
    said: dict[str, Any] = {"save_strategy": strategy, "save_steps": 2}
    first = folder.train(max_steps=4, stop=3 if strategy == "no" else 0, **said)
    assert f"Starting from the beginning: {folder.root} holds no checkpoint of this run" in caplog.text
    caplog.clear()
    assert folder.train(max_steps=8, wanted=True, **said) == list(range(first[-1] + 1, 9))
    assert "Resuming from checkpoint-" in caplog.text and "Starting from the beginning" not in caplog.text


def test_b2_a_second_train_in_one_process_goes_on_where_it_is_told_to(folder: Folder) -> None:
    """B2"""
    said: dict[str, Any] = {"save_strategy": "steps", "save_steps": 2}
    assert folder.train(max_steps=4, **said) == [1, 2, 3, 4]
    assert folder.train(max_steps=4, again=True, **said) == [1, 2, 3, 4], (
        "a call of its own, as Transformers has it"
    )
    assert folder.train(max_steps=6, again=True, wanted=True, **said) == [5, 6]


def test_b2_a_damaged_one_is_passed_over_for_the_one_before_it(
    folder: Folder, caplog: pytest.LogCaptureFixture
) -> None:
    """B2"""
    said: dict[str, Any] = {"save_strategy": "steps", "save_steps": 2}
    folder.train(max_steps=6, **said)
    weights = folder.root / "checkpoint-6" / "model.safetensors"
    body = bytearray(weights.read_bytes())
    body[-1] ^= 1
    weights.write_bytes(body)
    assert folder.train(max_steps=8, wanted=True, **said) == [5, 6, 7, 8]
    assert "Skipping checkpoint-6: a file is damaged" in caplog.text


def test_a_named_run_that_had_finished_is_lengthened_without_a_word_in_the_script(folder: Folder) -> None:
    said: dict[str, Any] = {"save_strategy": "steps", "save_steps": 2, "run_id": "exp1"}
    assert folder.train(max_steps=4, **said) == [1, 2, 3, 4]
    assert folder.train(max_steps=4, **said) == []
    assert folder.train(max_steps=8, **said) == [5, 6, 7, 8]


def test_a_run_that_begins_beside_saved_work_says_so_in_one_line_with_what_to_type(
    folder: Folder, caplog: pytest.LogCaptureFixture
) -> None:
    """Issue 7, section 3."""
    said: dict[str, Any] = {"save_strategy": "steps", "save_steps": 4}
    folder.train(max_steps=4, **said)
    caplog.clear()
    assert folder.train(stop=2, max_steps=12, **said) == [1, 2]
    (line,) = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    name = records.read(folder.root / "checkpoint-4").run[:8]
    assert (
        "checkpoint-4 (step 4) is of another training (max_steps is 12, was 4): it is NOT resumed from"
        in line
    )
    assert f"export LASTCALL_RUN_ID={name}, or pass resume_from_checkpoint=True" in line
    assert folder.train(max_steps=6, run_id=name, **said) == [5, 6], "what the line says works"


def test_after_an_exit_with_75_another_training_is_refused_and_not_started_over(
    folder: Folder, caplog: pytest.LogCaptureFixture
) -> None:
    """Issue 7, section 3: a restart goes on from what was saved, or not at all."""
    assert folder.train(stop=3) == [1, 2, 3]
    with pytest.raises(errors.ConfigError) as refused:
        folder.train(learning_rate=1e-3)
    assert refused.value.code == 78
    name = records.read(folder.root / "checkpoint-3").run[:8]
    assert "learning_rate is 0.001, was 5e-05" in str(refused.value) and f"LASTCALL_RUN_ID={name}" in str(
        refused.value
    )
    with pytest.raises(errors.ConfigError):
        folder.train(learning_rate=1e-3)  # and again: to be refused is no end of anything
    assert folder.train(learning_rate=1e-3, run_id="new", stop=1) == [1]  # a person says so
    assert folder.train(learning_rate=1e-3, run_id=name, stop=5) == [4, 5]
    assert folder.train(learning_rate=1e-3, wanted=True) == [6, 7, 8]


def test_what_a_person_stopped_may_be_begun_anew(folder: Folder, caplog: pytest.LogCaptureFixture) -> None:
    assert folder.train(stop=3, signum=signal.SIGINT) == [1, 2, 3]
    assert folder.train(learning_rate=1e-3) == list(range(1, 9))
    assert "checkpoint-3 (step 3) is of another training" in caplog.text


def test_a_job_that_comes_back_is_the_same_run_whatever_has_changed(
    folder: Folder, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Issue 7, section 3: the platform's own identity of the job comes before what is trained."""
    monkeypatch.setenv("SLURM_JOB_ID", "4711")
    assert folder.train(stop=3) == [1, 2, 3]
    assert folder.train(stop=5, drop=1) == [4, 5]
    assert "This is job slurm:4711 again" in caplog.text and "the data has 7 samples, had 8" in caplog.text
    monkeypatch.setenv("SLURM_JOB_ID", "4712")  # submitted anew: known by what it trains
    assert folder.train(drop=1) == [6, 7, 8]


@pytest.mark.parametrize("script", ["pretrain.py", "finetune.py"])
def test_a_job_that_lost_its_process_goes_on_with_the_same_script_only(
    folder: Folder, script: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "4711")
    monkeypatch.setattr("sys.argv", ["/code/pretrain.py"])
    assert folder.train(stop=3) == [1, 2, 3]
    notes = folder.root / ".lastcall" / "calls.json"
    notes.write_text(notes.read_text().replace('"ended": "saved"', '"ended": ""'))  # killed since
    monkeypatch.setattr("sys.argv", [script])
    assert folder.train(learning_rate=1e-3) == list(range(4 if script == "pretrain.py" else 1, 9))


def test_another_job_is_another_run_and_only_says_what_is_left(
    folder: Folder, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "4711")
    assert folder.train(stop=3) == [1, 2, 3]
    monkeypatch.setenv("SLURM_JOB_ID", "4712")
    assert folder.train(learning_rate=1e-3) == list(range(1, 9))
    assert "checkpoint-3 (step 3) is of another training (learning_rate is 0.001, was 5e-05)" in caplog.text


def test_two_stages_of_one_script_are_restarted_without_a_word(
    folder: Folder, caplog: pytest.LogCaptureFixture
) -> None:
    said: dict[str, Any] = {"save_strategy": "steps", "save_steps": 2}
    folder.train(max_steps=4, **said)
    assert folder.train(max_steps=4, learning_rate=1e-3, again=True, stop=3, **said) == [1, 2, 3]
    assert folder.train(max_steps=4, **said) == []
    assert folder.train(max_steps=4, learning_rate=1e-3, again=True, **said) == [4]
    assert "NOT resumed" not in caplog.text


@pytest.mark.parametrize("managed", [False, True])
def test_e4_true_in_an_empty_folder_is_an_error_unless_lastcall_run_starts_it_again(
    folder: Folder, managed: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """E4"""
    if managed:
        (tmp_path / "registry").mkdir()
        monkeypatch.setenv("LASTCALL_REGISTRY", str(tmp_path / "registry"))
        assert folder.train(wanted=True) == list(range(1, 9))
    else:
        with pytest.raises(ValueError, match="No valid checkpoint found in output directory"):
            folder.train(wanted=True)


@pytest.mark.parametrize("damage", [b"", b"[]", b'{"1": {}}', b'{"1": {"run": 7, "traits": null}}', b"\xff"])
def test_what_the_folder_knows_may_be_damaged(folder: Folder, damage: bytes) -> None:
    assert folder.train(stop=3) == [1, 2, 3]
    (folder.root / ".lastcall" / "calls.json").write_bytes(damage)
    assert folder.train() == list(range(4, 9))
