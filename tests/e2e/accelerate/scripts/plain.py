"""A script that knows nothing of lastcall, with its own saves and its own resume: python plain.py OUT RESULT

SHAPE: flat | nested | main (only the main process saves) | helper (the step is taken in a function) | none
(no save in the loop)
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration
from torch.utils.data import DataLoader, TensorDataset

if os.environ.get("FORKED") == "1" and os.environ.get("LASTCALL_ENABLED") == "1":
    from lastcall.auto import bootstrap, imports  # what the .pth does in a process that was not forked

    imports.Finder(bootstrap.PATCHES).install()

OUT, RESULT = Path(sys.argv[1]), Path(sys.argv[2])
SHAPE, EPOCHS, EVERY = os.environ.get("SHAPE", "flat"), int(os.environ.get("EPOCHS", "3")), 100


def forward(accelerator: Any, model: Any, optimizer: Any, batch: Any) -> None:
    with accelerator.accumulate(model):
        loss = torch.nn.functional.mse_loss(model(batch[0]), batch[1])
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()


def main() -> None:
    torch.manual_seed(0)
    config = DataLoaderConfiguration(use_seedable_sampler=True)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2, dataloader_config=config)
    data = TensorDataset(torch.randn(96, 4), torch.randn(96, 2))
    model: Any = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2))
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=0.01)
    model, optimizer, loader = accelerator.prepare(
        model, optimizer, DataLoader(data, batch_size=4, shuffle=True)
    )

    step = 0
    OUT.mkdir(parents=True, exist_ok=True)
    saved = sorted(OUT.glob("step_*"), key=lambda path: int(path.name.split("_")[1]))
    if saved:
        accelerator.load_state(str(saved[-1]))
        step = int(saved[-1].name.split("_")[1])
    print("resumed", step, flush=True)
    first, skip = divmod(step, len(loader))

    for epoch in range(first, EPOCHS):
        loader.set_epoch(epoch)
        batches = accelerator.skip_first_batches(loader, skip) if epoch == first and skip else loader
        for batch in batches:
            print("at", step, flush=True)
            time.sleep(0.02)
            if SHAPE == "helper":
                forward(accelerator, model, optimizer, batch)
            else:
                with accelerator.accumulate(model):
                    loss = torch.nn.functional.mse_loss(model(batch[0]), batch[1])
                    accelerator.backward(loss)
                    optimizer.step()
                    optimizer.zero_grad()
            step += 1
            if SHAPE == "nested":
                if accelerator.sync_gradients:
                    folder = f"step_{step}"
                    if step % EVERY == 0:
                        if OUT is not None:
                            folder = str(OUT / folder)
                        accelerator.save_state(folder)
                        print("saved", folder, flush=True)
            elif SHAPE == "main":
                if accelerator.is_main_process and step % EVERY == 0:
                    accelerator.save_state(OUT / f"step_{step}")
            elif SHAPE != "none" and step % EVERY == 0:
                accelerator.save_state(OUT / f"step_{step}")
    weights = [value.tolist() for value in accelerator.unwrap_model(model).state_dict().values()]
    RESULT.write_text(repr(weights))


if __name__ == "__main__":
    main()
