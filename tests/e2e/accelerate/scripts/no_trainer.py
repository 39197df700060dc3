"""A loop in the way of Transformers' *_no_trainer.py: it resumes from a path that it is given, and from
nothing else.

no_trainer.py --output_dir OUT --result FILE [--resume_from_checkpoint PATH]
"""

from __future__ import annotations

import argparse
import os
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


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--output_dir", type=str, default=None)
    parser.add_argument("--result", type=str, default=None)
    parser.add_argument("--resume_from_checkpoint", type=str, default=None)
    parser.add_argument("--steps", type=int, default=60)
    return parser.parse_args()


def main() -> None:
    args = parsed()
    torch.manual_seed(0)
    accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True))
    data = TensorDataset(torch.randn(args.steps * 4, 4), torch.randn(args.steps * 4, 2))
    model: Any = torch.nn.Linear(4, 2)
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=0.01)
    model, optimizer, loader = accelerator.prepare(
        model, optimizer, DataLoader(data, batch_size=4, shuffle=True)
    )
    completed = 0
    if args.resume_from_checkpoint:
        if args.resume_from_checkpoint is not None or args.resume_from_checkpoint != "":
            path = args.resume_from_checkpoint
        accelerator.load_state(path)
        completed = int(Path(path).name.replace("step_", ""))
    print("resumed", completed, flush=True)
    batches = accelerator.skip_first_batches(loader, completed) if completed else loader
    for batch in batches:
        print("at", completed, flush=True)
        time.sleep(float(os.environ.get("PAUSE", "0.02")))
        accelerator.backward(torch.nn.functional.mse_loss(model(batch[0]), batch[1]))
        optimizer.step()
        optimizer.zero_grad()
        completed += 1
        if completed % 1000 == 0:
            output_dir = f"step_{completed}"
            if args.output_dir is not None:
                output_dir = os.path.join(args.output_dir, output_dir)
            accelerator.save_state(output_dir)
    if args.result:
        Path(args.result).write_text(
            repr([value.tolist() for value in accelerator.unwrap_model(model).state_dict().values()])
        )


if __name__ == "__main__":
    main()
