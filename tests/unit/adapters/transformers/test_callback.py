from __future__ import annotations

from typing import Any

from lastcall.adapters.transformers.callback import JITCheckpointCallback
from lastcall.settings import JITCheckpointConfig, PeriodicCheckpointConfig

EVENTS = ("on_train_begin", "on_step_begin", "on_substep_end", "on_prediction_step", "on_step_end", "on_log")


class Run:
    def __init__(self) -> None:
        self.said: list[Any] = []
        self.stepped = False

    def train_begins(self) -> None:
        self.said.append("begins")

    def leave_if_saved(self) -> None:
        self.said.append("leaves?")

    def logged(self, logs: dict[str, Any]) -> None:
        self.said.append(logs)


def test_outside_a_protected_call_it_does_nothing() -> None:
    callback = JITCheckpointCallback()
    assert (callback.config, callback.periodic, callback.run) == (None, None, None)
    for event in EVENTS:
        assert getattr(callback, event)(None, None, None) is None


def test_it_keeps_what_it_was_given() -> None:
    config, periodic = JITCheckpointConfig(environ={}), PeriodicCheckpointConfig(environ={})
    callback = JITCheckpointCallback(config, periodic)
    assert callback.config is config and callback.periodic is periodic


def test_inside_one_the_run_hears_of_everything_and_control_stays_the_trainers() -> None:
    callback, run = JITCheckpointCallback(), Run()
    callback.run = run  # type: ignore[assignment]
    for event in EVENTS:
        assert getattr(callback, event)(None, None, None, model=None) is None
    callback.on_log(None, None, None, logs={"loss": 1.0})
    assert run.said == ["begins", "leaves?", "leaves?", "leaves?", {}, {"loss": 1.0}]
    assert run.stepped
