"""A Trainer that goes as far as a test says: see helpers.core.staged."""

from __future__ import annotations

from collections.abc import Mapping

from transformers import Trainer, TrainingArguments

from helpers.core.staged import quiet
from helpers.models.staged_torch import TorchTraining
from lastcall.adapters.transformers import calls, patch
from lastcall.adapters.transformers.callback import JITCheckpointCallback


def fresh() -> type[Trainer]:
    """Trainer as Hugging Face wrote it, patched for this training only."""
    originals = {
        name: getattr(getattr(Trainer, name), "_lastcall_original", getattr(Trainer, name))
        for name in ("train", "__init__")
    }
    kind = type("Fresh", (Trainer,), originals)
    patch.apply(kind, everywhere=False)
    return kind


class TrainerTraining(TorchTraining):
    epochs = False
    reports: frozenset[str] = frozenset()  # Trainer's own metrics are told where it saves

    def live(self) -> Mapping[str, object]:
        return {name: value for name, value in super().live().items() if name != "mean"}

    def step(self) -> None:
        """The end of an epoch is looked at, too, and has the number of its last step."""
        before = self.subject.ordinal
        while self.subject.ordinal == before:
            super().step()

    def train(self) -> None:
        arguments = TrainingArguments(
            output_dir=str(self.root), max_steps=100, per_device_train_batch_size=2, save_strategy="no",
            report_to="none", use_cpu=True, disable_tqdm=True, dataloader_pin_memory=False,
            logging_strategy="no", remove_unused_columns=False, max_grad_norm=0.0, seed=self.seed,
        )  # fmt: skip
        trainer = fresh()(
            model=self.net,
            args=arguments,
            train_dataset=[{"x": row} for row in self.rows],
            optimizers=(self.optimizer, self.scheduler),  # type: ignore[arg-type]
            callbacks=[JITCheckpointCallback(quiet())],
        )
        try:
            trainer.train()
        finally:
            calls.not_over(self.root)  # the next one is of a restarted process
