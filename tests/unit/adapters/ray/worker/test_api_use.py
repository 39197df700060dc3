"""What the script does itself is left to it; what it forgets is a warning at the first step."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, NoReturn

import pytest
import torch
from ray.train import Checkpoint
from ray.train.v2._internal.execution.train_fn_utils import DistributedTrainFnUtils

from helpers.ray.thread_ranks import PATIENCE, Group, Parked
from lastcall.adapters.ray import internals
from lastcall.adapters.ray.saves import trainers
from lastcall.adapters.ray.saves.fallback import Fallback
from lastcall.adapters.ray.saves.script_save import OwnSave
from lastcall.adapters.ray.worker import committing
from lastcall.adapters.ray.worker.api_use import ApiUse


class Context:
    def __init__(self, checkpoint: Any = None) -> None:
        self.checkpoint = checkpoint

    def get_checkpoint(self) -> Any:
        return self.checkpoint


@pytest.fixture
def flow() -> Iterator[Any]:
    made: list[ApiUse] = []

    def make(checkpoint: Any = None) -> ApiUse:
        made.append(ApiUse(Context(checkpoint)))
        made[-1].begin()
        return made[-1]

    yield make
    for each in made:
        each.end()


def saved_by_trainer(folder: Path) -> Checkpoint:
    (folder / "checkpoint").mkdir(parents=True)
    (folder / "checkpoint" / "trainer_state.json").write_text("{}")
    return Checkpoint(str(folder))


def test_b4_a_checkpoint_that_the_script_does_not_ask_for_is_mentioned_once_it_starts_without(
    flow: Any, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    flow(Checkpoint(str(tmp_path))).warn(saves=True)
    assert f"This run has a checkpoint ({tmp_path}), and the script has not asked for it" in caplog.text
    assert "ray.train.get_checkpoint()" in caplog.text


def test_b4_a_script_that_saves_and_never_asks_is_told_before_anything_is_lost(
    flow: Any, caplog: pytest.LogCaptureFixture
) -> None:
    flow().warn(saves=True)
    assert "after a preemption it would start from scratch" in caplog.text


def test_b4_nothing_is_said_to_a_script_that_asks_or_has_nothing_to_ask_for(
    flow: Any, caplog: pytest.LogCaptureFixture
) -> None:
    asking = flow(Checkpoint("/storage/exp/checkpoint_1"))
    assert asking._context.get_checkpoint() is asking.found
    asking.warn(saves=True)
    flow().warn(saves=False)
    assert caplog.text == ""


def test_b5_a_script_that_asks_or_has_a_checkpoint_goes_its_own_way(flow: Any) -> None:
    assert not flow().own_checkpoints and flow(Checkpoint("/storage/exp/checkpoint_1")).own_checkpoints
    asking = flow()
    asking._context.get_checkpoint()
    assert asking.own_checkpoints


def test_b9_a_script_that_looks_for_a_preemption_itself_is_known_by_it(
    flow: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(DistributedTrainFnUtils, "get_preemption_info", lambda self: "info")
    handling = flow()
    assert not handling.native
    assert DistributedTrainFnUtils().get_preemption_info() == "info" and handling.native


def test_b9_a_script_that_has_not_come_to_look_for_a_preemption_yet_is_known_by_its_loop(flow: Any) -> None:
    import sys

    def train(each: ApiUse, *, soon: bool) -> None:
        import ray.train

        each.look(sys._getframe())
        if soon:
            ray.train.get_preemption_info()

    def other(each: ApiUse) -> None:
        each.look(sys._getframe())

    handling, plain = flow(), flow()
    train(handling, soon=False)
    other(plain)
    assert (handling.native, plain.native) == (True, False)


class RayTrainReportCallback:
    """By the name of Ray's own."""


class Trainer:
    """As much of Hugging Face's as is touched."""

    def __init__(self, *callbacks: Any) -> None:
        self.callback_handler = SimpleNamespace(callbacks=list(callbacks))
        self.resumed: list[Any] = []

    def train(self, resume_from_checkpoint: Any = None, trial: Any = None) -> None:
        self.resumed.append(resume_from_checkpoint)


@pytest.fixture
def patched() -> type[Trainer]:
    kind = type("Trainer", (Trainer,), {"train": Trainer.train})
    module: Any = ModuleType("transformers.trainer")
    module.Trainer = kind
    trainers.patch(module)
    trainers.patch(module)  # once is enough
    return kind


def test_b4_a_trainer_is_resumed_under_ray_as_outside(
    flow: Any, patched: type[Trainer], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    found = flow(saved_by_trainer(tmp_path / "checkpoint_1"))
    monkeypatch.setattr(internals, "train_context", lambda: found._context)
    trainer = patched(RayTrainReportCallback())
    trainer.train()
    trainer.train()  # another training of the same script is another one
    assert trainer.resumed == [str(tmp_path / "checkpoint_1" / "checkpoint"), None]


def test_b4_a_trainer_whose_script_asks_or_says_where_or_reports_nothing_is_left_alone(
    flow: Any, patched: type[Trainer], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    found = flow(saved_by_trainer(tmp_path / "checkpoint_1"))
    monkeypatch.setattr(internals, "train_context", lambda: found._context)
    silent, told = patched(), patched(RayTrainReportCallback())
    silent.train()
    told.train(resume_from_checkpoint="elsewhere")
    found._context.get_checkpoint()
    told.train()
    assert (silent.resumed, told.resumed) == ([None], ["elsewhere", None])


def test_b5_lightning_is_known_by_the_callback_that_reports_for_it(caplog: pytest.LogCaptureFixture) -> None:
    class Trainer:
        def __init__(self) -> None:
            self.callbacks = [RayTrainReportCallback()]

        def fit(self, own: OwnSave) -> bool:
            import sys

            return own.look(sys._getframe())

    own = OwnSave()
    assert Trainer().fit(own)
    assert own.position()["checkpoints"] and own.saves
    assert "training will continue until its next report" in caplog.text


def test_b7_a_step_before_the_loop_is_not_taken_for_the_loop(caplog: pytest.LogCaptureFixture) -> None:
    import sys

    def train(own: OwnSave) -> list[bool]:
        from ray.train import report

        seen = [own.look(sys._getframe())]
        for step in range(1):
            seen.append(own.look(sys._getframe()))
            if step == 7:
                report({}, checkpoint=None or Checkpoint("/nowhere"))
        return seen

    own = OwnSave()
    # as under Ray: no frame further out, where a test runner has loops of its own
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(train, own).result() == [False, True]
    assert own.position()["points"] and caplog.text == ""


class TestWhatIsSavedOfAScriptWithoutASave:
    """The state of a script without a save: what is not in it is not called exact."""

    @pytest.fixture(autouse=True)
    def no_parking(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def wait() -> NoReturn:
            raise Parked

        monkeypatch.setattr(committing, "wait_for_kill", wait)

    def saved(self, storage: Any, *, asked: bool, named: dict[str, Any]) -> dict[str, Any]:
        rank = Group(storage, 1).ranks[0]
        rank.api_use.asked = asked
        model = torch.nn.Linear(2, 1)
        optimizer = torch.optim.Adam(model.parameters())
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        fallback = Fallback(rank.context, rank.strategy, rank.committing, rank.committing._connection)
        fallback.name(named)
        rank.told(PATIENCE)
        try:
            fallback.save("it has none")
        except Parked:
            pass
        path = Path(storage.experiment_fs_path, ".lastcall", "uncommitted.json")
        return json.loads(path.read_text()) if path.exists() else {}

    def test_a9_a_saved_state_is_not_exact_and_says_why(self, storage: Any) -> None:
        record = self.saved(storage, asked=False, named={})
        assert (record["how"], record["exact"]) == ("state", False) and "start from scratch" in record[
            "because"
        ]

    def test_b5_no_state_is_saved_for_a_script_that_asks_for_its_own(
        self, storage: Any, caplog: pytest.LogCaptureFixture
    ) -> None:
        assert self.saved(storage, asked=True, named={}) == {}
        assert "this run has checkpoints of its own" in caplog.text

    def test_b5_what_was_named_is_saved_in_any_case(self, storage: Any) -> None:
        record = self.saved(storage, asked=True, named={"progress": {"step": 3}})
        assert record["how"] == "state" and record["exact"] is False
