from __future__ import annotations

import enum
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import EarlyStoppingCallback, TrainerCallback
from transformers.trainer_callback import CallbackHandler, ExportableState, TrainerControl, TrainerState

from lastcall.adapters.transformers import ledger as ledgers
from lastcall.adapters.transformers.ledger import Ledger, Pending, Tally


class Counting(TrainerCallback, ExportableState):
    def __init__(self, seen: int = 0) -> None:
        self.seen = seen

    def state(self) -> dict[str, Any]:
        return {"args": {}, "attributes": {"seen": self.seen}}


def trainer(*callbacks: Any, **state: Any) -> Any:
    handler = SimpleNamespace(callbacks=list(callbacks))
    return SimpleNamespace(state=TrainerState(**state), control=TrainerControl(), callback_handler=handler)


def through_json(value: Any) -> Any:
    return json.loads(json.dumps(value))


# ---- state -------------------------------------------------------------------------------------------------


def test_a_copy_is_plain_and_knows_the_history_by_its_length() -> None:
    live = trainer(
        global_step=7,
        epoch=np.float64(1.5),
        best_metric=torch.tensor(0.25),
        log_history=[{"loss": 1.0}, {"loss": 0.5}],
    )
    ledger = Ledger(live)
    ledger.pending = Pending("step", log=True, grad_norm=2.0)
    ledger.origin, ledger.first = "from/here", 3
    copied = ledger.state_dict()
    assert through_json(copied) == through_json(through_json(copied))
    assert (copied["state"]["global_step"], copied["state"]["epoch"], copied["state"]["best_metric"]) == (
        7,
        1.5,
        0.25,
    )
    assert (copied["history"], copied["origin"], copied["first"]) == (2, "from/here", 3)
    assert copied["pending"]["grad_norm"] == 2.0
    assert (
        not {"log_history", "stateful_callbacks", "is_world_process_zero", "is_local_process_zero"}
        & copied["state"].keys()
    )


def test_trainer_state_json_is_what_it_was_at_the_copy_and_hugging_face_reads_it(tmp_path: Path) -> None:
    live = trainer(Counting(4), global_step=7, epoch=1.5, log_history=[{"loss": 1.0}])
    ledger = Ledger(live)
    copied = through_json(ledger.state_dict())
    live.state.global_step, live.state.epoch = 9, 2.0
    live.state.log_history.append({"loss": 0.5})
    live.callback_handler.callbacks[0].seen = 99
    (tmp_path / "trainer_state.json").write_bytes(ledger.to_json(copied))
    found = TrainerState.load_from_json(str(tmp_path / "trainer_state.json"))
    assert (found.global_step, found.epoch, found.log_history) == (7, 1.5, [{"loss": 1.0}])
    assert found.stateful_callbacks["Counting"]["attributes"] == {"seen": 4}
    assert live.state.global_step == 9 and len(live.state.log_history) == 2


def test_it_is_the_file_that_hugging_face_writes(tmp_path: Path) -> None:
    handler = CallbackHandler([EarlyStoppingCallback(2), Counting(1), Counting(2)], None, None, None, None)
    live = SimpleNamespace(control=TrainerControl(), callback_handler=handler)
    exportable = [
        callback for callback in [*handler.callbacks, live.control] if isinstance(callback, ExportableState)
    ]
    live.state = TrainerState(
        global_step=3,
        log_history=[{"loss": 1.0, "step": 1}],
        stateful_callbacks=exportable,  # type: ignore[arg-type]
    )
    live.state.save_to_json(str(tmp_path / "theirs"))
    ledger = Ledger(live)
    assert json.loads(ledger.to_json(ledger.state_dict())) == json.loads((tmp_path / "theirs").read_text())


@pytest.mark.parametrize(
    ("value", "plain"),
    [
        (np.float32(0.5), 0.5), (np.int64(3), 3), (np.bool_(True), True), (torch.tensor(2), 2), (torch.tensor([1, 2]), [1, 2]),  # noqa: E501
        ((1, (2,)), [1, [2]]), ({1: np.float64(1.0)}, {"1": 1.0}), (enum.IntEnum("E", "A").A, 1), (Path("x"), "x"), (None, None),  # type: ignore[attr-defined]  # noqa: E501
    ],
    ids=repr,
)  # fmt: skip
def test_numbers_of_libraries_become_plain_ones(value: object, plain: object) -> None:
    found = ledgers._plain(value)
    assert found == plain and type(found) is type(plain)


# ---- callbacks ---------------------------------------------------------------------------------------------


def test_callbacks_are_restored_in_place() -> None:
    before = trainer(early := EarlyStoppingCallback(3, 0.1), Counting(5))
    early.early_stopping_patience_counter = 2
    ledger = Ledger(before)
    ledger.origin, ledger.first, ledger.pending = "there", 4, Pending("epoch", evaluate=True, stop=True)
    saved = through_json(ledger.state_dict())
    stopping, counting = EarlyStoppingCallback(3, 0.1), Counting()
    live = trainer(stopping, counting)
    again = Ledger(live)
    again.load_state_dict(saved)
    assert again.pending == Pending("epoch", evaluate=True, stop=True)
    assert (again.origin, again.first) == ("there", 4)
    assert live.callback_handler.callbacks == [stopping, counting]
    assert live.callback_handler.callbacks[0] is stopping
    assert (stopping.early_stopping_patience_counter, counting.seen) == (2, 5)


def test_two_of_a_kind_get_each_its_own_state() -> None:
    saved = through_json(Ledger(trainer(Counting(1), Counting(2))).state_dict())
    one, other, new = Counting(), Counting(), Counting(7)
    Ledger(trainer(one, TrainerCallback(), other, new)).load_state_dict(saved)
    assert (one.seen, other.seen, new.seen) == (1, 2, 7)


def test_a_callback_that_is_gone_or_new_is_no_trouble() -> None:
    saved = through_json(Ledger(trainer(Counting(1))).state_dict())
    early = EarlyStoppingCallback(3)
    Ledger(trainer(early)).load_state_dict(saved)
    assert early.early_stopping_patience_counter == 0


# ---- what this rank has counted ----------------------------------------------------------------------------


def test_a_tally_comes_back() -> None:
    one = SimpleNamespace(
        _tr_loss=torch.tensor(0.75),
        _total_loss_scalar=2.5,
        _globalstep_last_logged=4,
        current_flos=10.0,
        tokens=5,
        recent=[1],
    )
    tally = Tally(one)
    tally.before, tally.began = 100.0, tally.began - 5.0
    saved = through_json(tally.state_dict())
    assert 105.0 <= saved["seconds"] < 115.0
    loss, recent = torch.tensor(0.0), [9, 9]
    other = SimpleNamespace(
        _tr_loss=loss,
        _total_loss_scalar=0.0,
        _globalstep_last_logged=0,
        current_flos=0.0,
        tokens=0,
        recent=recent,
    )
    again = Tally(other)
    again.load_state_dict(saved)
    assert other._tr_loss is loss and other.recent is recent
    assert vars(other) == vars(one)
    assert again.before == saved["seconds"]


def test_before_training_there_is_nothing_to_count() -> None:
    found = Tally(SimpleNamespace()).state_dict()
    found.pop("seconds")
    assert found == {"waiting": 0.0, "total": 0.0, "logged": 0, "flos": 0.0, "attributes": {}}


def test_a_tally_from_before_there_were_attributes_is_taken() -> None:
    live = SimpleNamespace(_tr_loss=torch.tensor(0.0), tokens=3)
    Tally(live).load_state_dict({"waiting": 1.0, "total": 1.0, "logged": 2, "flos": 0.0, "seconds": 1.0})
    assert (live.tokens, float(live._tr_loss)) == (3, 1.0)
