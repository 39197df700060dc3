"""JITCheckpointCallback: what a script adds to a Trainer that is to be protected; in zero-code runs lastcall
adds it automatically."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from transformers.trainer_callback import TrainerCallback

from lastcall.settings import JITCheckpointConfig, PeriodicCheckpointConfig

if TYPE_CHECKING:
    from lastcall.adapters.transformers.run import TrainerRun


class JITCheckpointCallback(TrainerCallback):
    """Protects the train() calls of the Trainer that it is added to. `config` and `periodic` default to the
    environment."""

    def __init__(
        self, config: JITCheckpointConfig | None = None, periodic: PeriodicCheckpointConfig | None = None
    ) -> None:
        self.config = config
        self.periodic = periodic
        self.run: TrainerRun | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.run is not None:
            self.run.train_begins()

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.run is not None:
            self.run.leave_if_saved()

    on_substep_end = on_prediction_step = on_step_begin

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.run is not None:
            self.run.stepped = True

    def on_log(
        self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **kwargs: Any
    ) -> None:
        if self.run is not None:
            self.run.logged(logs or {})
