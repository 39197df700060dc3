"""protect(accelerator=...): what is refused, what is written, and what the script sees of it."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator  # type: ignore[import-untyped]
from accelerate.state import PartialState  # type: ignore[import-untyped]
from accelerate.utils import ProjectConfiguration  # type: ignore[import-untyped]
from torch.utils.data import DataLoader, TensorDataset

import lastcall
from lastcall.adapters.torch.data import loaders as data
from lastcall.adapters.torch.recorded_save import per_thread

QUIET = lastcall.JITCheckpointConfig(kill_wait=0.0, spare=False)


class Script:
    """What a script has before its loop."""

    def __init__(self, folder: Path, **options: Any) -> None:
        torch.manual_seed(0)
        self.accelerator = Accelerator(cpu=True, **options)
        model = torch.nn.Linear(4, 2)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
        loader = DataLoader(TensorDataset(torch.arange(24.0).reshape(6, 4)), batch_size=2)
        self.model, self.optimizer, self.scheduler, self.loader = self.accelerator.prepare(
            model, optimizer, scheduler, loader
        )
        self.folder = folder / "run"

    def step(self, batch: torch.Tensor) -> None:
        with self.accelerator.accumulate(self.model):
            self.accelerator.backward(self.model(batch).sum())
            self.optimizer.step()
            self.scheduler.step()
            self.optimizer.zero_grad()

    def train(self, epochs: int, **more: Any) -> lastcall.Run:
        with lastcall.protect(self.folder, accelerator=self.accelerator, config=QUIET, **more) as run:
            for _ in run.epochs(epochs):
                for (batch,) in run.batches(self.loader):
                    self.step(batch)
        return run


@pytest.fixture(autouse=True)
def _kinds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data, "_kinds", [])


def test_the_files_are_those_of_save_state(tmp_path: Path) -> None:
    script = Script(tmp_path)
    script.train(1)
    script.accelerator.save_state(str(tmp_path / "theirs"))
    (ours,) = script.folder.glob("checkpoint-*")
    theirs = {path.name for path in (tmp_path / "theirs").iterdir()}
    assert {path.name for path in ours.iterdir()} - theirs == {"lastcall.json", "state.json"}
    assert theirs <= {path.name for path in ours.iterdir()}
    for name in ("optimizer.bin", "scheduler.bin", "random_states_0.pkl"):
        one, other = (torch.load(folder / name, weights_only=False) for folder in (ours, tmp_path / "theirs"))
        assert repr(one) == repr(other), name


def test_naming_and_counting_of_the_accelerators_own_saves_are_left_alone(tmp_path: Path) -> None:
    project = ProjectConfiguration(project_dir=str(tmp_path / "project"), automatic_checkpoint_naming=True)
    script = Script(tmp_path, project_config=project)
    script.train(1)
    assert project.iteration == 0 and not (tmp_path / "project").exists()
    assert [path.name for path in script.folder.glob("checkpoint-*")] == ["checkpoint-3"]


def test_goes_on_with_what_was_given_besides(tmp_path: Path) -> None:
    Script(tmp_path).train(1, counters={"best": 3}, mean=torch.full((3,), 7.0))
    counters, mean = {"best": 0}, torch.zeros(3)
    script = Script(tmp_path)
    run = script.train(2, counters=counters, mean=mean)
    assert (run.resumed, run.step, run.epoch) == (3, 6, 2)
    assert counters == {"best": 3} and mean.tolist() == [7.0, 7.0, 7.0]
    reference = Script(tmp_path / "other")
    reference.train(2)
    assert torch.equal(script.model.weight, reference.model.weight)
    assert script.loader.iteration == 2


def test_switched_off_it_is_a_plain_loop(tmp_path: Path) -> None:
    script = Script(tmp_path)
    off = lastcall.JITCheckpointConfig(enabled=False)
    with lastcall.protect(script.folder, accelerator=script.accelerator, config=off) as run:
        for _ in run.epochs(1):
            for (batch,) in run.batches(script.loader):
                script.step(batch)
    assert not script.folder.exists()


def test_what_the_accelerator_saves_is_refused_a_second_time(tmp_path: Path) -> None:
    script = Script(tmp_path)
    for state in ({"net": script.model}, {"opt": script.optimizer}, {"rate": script.scheduler}):
        with pytest.raises(lastcall.StateError, match="shares tensors"):
            lastcall.protect(script.folder, accelerator=script.accelerator, **state)
    with pytest.raises(lastcall.StateError, match="'model' is that of a file"):
        lastcall.protect(script.folder, accelerator=script.accelerator, model=torch.nn.Linear(1, 1))


def test_an_accelerator_that_has_prepared_nothing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(lastcall.StateError, match="before protect"):
        lastcall.protect(tmp_path / "run", accelerator=Accelerator(cpu=True))


def test_what_is_prepared_afterwards_is_refused(tmp_path: Path) -> None:
    script = Script(tmp_path)
    with (
        pytest.raises(lastcall.StateError, match="since protect"),
        lastcall.protect(script.folder, accelerator=script.accelerator, config=QUIET) as run,
    ):
        script.accelerator.prepare(torch.nn.Linear(2, 2))
        next(iter(run.epochs(1)))


def test_a_checkpoint_of_another_kind_is_refused(tmp_path: Path) -> None:
    script = Script(tmp_path)
    model = torch.nn.Linear(4, 2)
    with lastcall.protect(script.folder, model=model, config=QUIET) as run:
        for _ in run.steps(1):
            pass
    with pytest.raises(lastcall.MismatchError, match="protect\\(accelerator"):
        script.train(1)


def test_another_thread_is_answered_as_ever() -> None:
    Accelerator(cpu=True)
    found = []
    with per_thread.answering(PartialState, "is_main_process", "us", threading.get_ident()):
        assert PartialState().is_main_process == "us"
        other = threading.Thread(target=lambda: found.append(PartialState().is_main_process))
        other.start()
        other.join()
    assert found == [True] and PartialState().is_main_process is True
