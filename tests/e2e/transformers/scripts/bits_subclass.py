"""A Trainer of the user's own: its loss, its loader, and a file of its own in each checkpoint."""

import json
import os
import random
from pathlib import Path
from typing import Any

import bits
import torch
from torch.utils.data import DataLoader, WeightedRandomSampler
from transformers import Trainer

case: dict[str, Any] = json.loads(os.environ.get("CASE", "{}"))


class Weighted(Trainer):  # type: ignore[misc]
    """Draws its rows by weight, with a generator of its own; punishes large logits; drops the loss of a few
    rows at random."""

    def get_train_dataloader(self) -> DataLoader[Any]:
        weights = [1.0 + index % 3 for index in range(len(self.train_dataset))]
        generator = torch.Generator().manual_seed(self.args.seed)
        sampler = WeightedRandomSampler(weights, len(weights), generator=generator)
        batch = self._train_batch_size
        return self.accelerator.prepare(
            DataLoader(self.train_dataset, batch, sampler=sampler, collate_fn=self.data_collator)
        )

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        outputs = model(**inputs)
        loss = outputs.loss + 1e-3 * outputs.logits.square().mean()
        if model.training and random.random() < 0.5:
            loss = loss * torch.rand(())
        return (loss, outputs) if return_outputs else loss

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        super()._save_checkpoint(model, trial)
        folder = Path(self.args.output_dir, f"checkpoint-{self.state.global_step}")
        if self.args.should_save:
            (folder / "notes.json").write_text(json.dumps({"step": self.state.global_step}))


trainer = Weighted(
    model=bits.model(),
    args=bits.arguments(**({"load_best_model_at_end": True} | case)),
    train_dataset=bits.Sentences(60),
    eval_dataset=bits.Sentences(10, first=1000),
    data_collator=bits.padded,
)
bits.train(trainer)
if bits.RANK == 0:
    notes = [
        json.loads(path.read_text())["step"]
        for path in Path(os.environ["OUTPUT"]).glob("checkpoint-*/notes.json")
    ]
    kept = [int(path.name.split("-")[1]) for path in Path(os.environ["OUTPUT"]).glob("checkpoint-*")]
    assert sorted(notes) == sorted(kept), (notes, kept)
