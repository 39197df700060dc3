"""A loop of one's own around an Accelerator: accumulation, a scheduler, a registered object, data that is
changed at random.

LOOP: epochs | steps | tick      LOADER: plain | workers | stateful | stream | dispatched      STUCK: the pass
that does not end
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration
from torch.utils.data import DataLoader, IterableDataset

import lastcall
from helpers.models import training

EPOCHS, STEPS = int(os.environ.get("EPOCHS", "3")), int(os.environ.get("STEPS", "48"))
LOOP, LOADER = os.environ.get("LOOP", "epochs"), os.environ.get("LOADER", "plain")
STUCK = int(os.environ.get("STUCK", "-1"))


class Stream(IterableDataset[torch.Tensor]):
    """The same sentences, of which nobody knows how many there are."""

    def __init__(self, sentences: training.Sentences) -> None:
        self.sentences = sentences

    def __iter__(self) -> Iterator[torch.Tensor]:
        # Where one rank reads for all, batches are read again on resume: what reading draws at random is then
        # drawn twice.
        read = self.sentences.tokens.__getitem__ if LOADER == "dispatched" else self.sentences.__getitem__
        return map(read, range(len(self.sentences)))


class Seen:
    """Registered with the accelerator: how many sentences there were."""

    def __init__(self) -> None:
        self.count = 0
        self.last = torch.zeros(8)

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count, "last": self.last}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.count, self.last = state["count"], state["last"]


def main() -> None:
    training.seed()
    dispatched = LOADER == "dispatched" if LOADER in ("stream", "dispatched") else None
    data = DataLoaderConfiguration(use_stateful_dataloader=LOADER == "stateful", dispatch_batches=dispatched)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2, dataloader_config=data)
    sentences: Any = training.Sentences(44)
    if LOADER in ("stream", "dispatched"):
        loader: Any = DataLoader(Stream(sentences), batch_size=4)
    else:
        loader = DataLoader(sentences, batch_size=4, shuffle=True, num_workers=2 * (LOADER == "workers"))
    model: Any = training.Block()
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler: Any = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=30)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    seen = Seen()
    accelerator.register_for_checkpointing(seen)
    counters = {"passes": 0}

    def train(tokens: torch.Tensor) -> None:
        training.say(counters["passes"])
        seen.count += len(tokens)
        seen.last = tokens[0].float()
        if counters["passes"] == STUCK:
            print("stuck", flush=True)
            time.sleep(60)
        with accelerator.accumulate(model):
            logits = model(tokens[:, :-1])
            accelerator.backward(
                torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
            )
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        counters["passes"] += 1

    with lastcall.protect(training.DIRECTORY, accelerator=accelerator, counters=counters) as run:
        if LOOP == "epochs":
            for _ in run.epochs(EPOCHS):
                for tokens in run.batches(loader):
                    training.interrupt_first_pass(run)
                    train(tokens)
        elif LOOP == "steps":
            batches = training.cycle(loader)
            for _ in run.steps(STEPS):
                training.interrupt_first_pass(run)
                train(next(batches))
        else:
            batches = training.cycle(loader)
            while run.step < STEPS:
                training.interrupt_first_pass(run)
                train(next(batches))
                run.tick()

    training.finish(
        model=accelerator.unwrap_model(model),
        optimizer=optimizer.optimizer,
        scheduler=scheduler.scheduler,
        seen=seen,
        counters=counters,
    )


if __name__ == "__main__":
    main()
