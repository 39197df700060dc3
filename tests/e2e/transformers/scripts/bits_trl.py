"""A trainer in the style of TRL: prepares its data, packs it, counts tokens, gathers metrics until they are
logged, writes model cards.

CASE: TrainingArguments by name, and `count_tokens`: log what the trainer counts in attributes of its own.
"""

import json
import os
from collections import defaultdict
from pathlib import Path
from typing import Any

import bits
import torch
from transformers import Trainer, TrainerCallback
from transformers.trainer_callback import ExportableState

case: dict[str, Any] = json.loads(os.environ.get("CASE", "{}"))
count_tokens = case.pop("count_tokens", False)


class Temperature(TrainerCallback, ExportableState):  # type: ignore[misc]
    """Warms up with the steps it has seen, and the loss with it."""

    def __init__(self, start: float = 1.0) -> None:
        self.start = start
        self.value = start
        self.seen: list[int] = []

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.value *= 1.01
        self.seen = [*self.seen, state.global_step][-5:]

    def state(self) -> dict[str, Any]:
        return {"args": {"start": self.start}, "attributes": {"value": self.value, "seen": self.seen}}


class SFT(Trainer):  # type: ignore[misc]
    """What SFTTrainer does around a Trainer, in short."""

    def __init__(
        self, model: Any, args: Any, train_dataset: Any, eval_dataset: Any, temperature: Temperature
    ) -> None:
        self._metrics: dict[str, dict[str, list[float]]] = {
            "train": defaultdict(list),
            "eval": defaultdict(list),
        }
        self._total_train_tokens = 0
        self._temperature = temperature
        super().__init__(
            model=model,
            args=args,
            train_dataset=self._prepare_dataset(train_dataset),
            eval_dataset=self._prepare_dataset(eval_dataset),
            data_collator=bits.padded,
            callbacks=[temperature],
        )

    def _prepare_dataset(self, rows: Any) -> list[dict[str, torch.Tensor]]:
        """Everything in one row, cut into pieces of equal length."""
        tokens = torch.cat([rows[index]["input_ids"] for index in range(len(rows))])
        return [{"input_ids": piece} for piece in tokens.split(16) if len(piece) == 16]

    def train(self, *args: Any, **kwargs: Any) -> Any:
        self.model.config.use_cache = False
        result = super().train(*args, **kwargs)
        self.model.config.use_cache = True
        return result

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        loss, outputs = super().compute_loss(
            model, inputs, return_outputs=True, num_items_in_batch=num_items_in_batch
        )
        mode = "train" if self.model.training else "eval"
        if mode == "train":
            self._total_train_tokens += inputs["attention_mask"].sum().item()
            loss = loss / self._temperature.value
        guess = outputs.logits[..., :-1, :].argmax(-1)
        self._metrics[mode]["mean_token_accuracy"].append(
            (guess == inputs["labels"][..., 1:]).float().mean().item()
        )
        return (loss, outputs) if return_outputs else loss

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        mode = "train" if self.model.training else "eval"
        if count_tokens:
            logs = logs | {
                f"{mode}_{key}": sum(values) / len(values)
                for key, values in self._metrics[mode].items()
                if values
            }
            logs["num_tokens"] = self._total_train_tokens
        super().log(logs, start_time)
        self._metrics[mode].clear()

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        self.create_model_card(model_name=Path(self.args.output_dir).name)
        super()._save_checkpoint(model, trial)

    def create_model_card(self, language: Any = None, model_name: str | None = None, **kwargs: Any) -> None:
        if self.is_world_process_zero():
            Path(self.args.output_dir, "README.md").write_text(
                f"# {model_name}, {self.state.global_step} steps\n"
            )


temperature = Temperature()
args = bits.arguments(
    **({"load_best_model_at_end": True, "gradient_accumulation_steps": 2, "max_steps": 18} | case)
)
trainer = SFT(bits.model(), args, bits.Sentences(60), bits.Sentences(10, first=1000), temperature)
bits.train(trainer)
