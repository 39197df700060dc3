"""A small real training run for the launcher, with DataLoader workers if asked for.

python launch_train.py DIRECTORY RESULT STEPS [WORKERS]
"""

from __future__ import annotations

import os
import sys

from torch.utils.data import DataLoader

import lastcall
from helpers.models import training

if __name__ == "__main__":
    model, optimizer = training.parts()
    workers = int(sys.argv[4]) if len(sys.argv) > 4 else 0
    loader = DataLoader(
        training.Sentences(96), batch_size=4, num_workers=workers, persistent_workers=workers > 0
    )
    batches = training.cycle(loader)
    with lastcall.protect(training.DIRECTORY, model=model, optimizer=optimizer) as run:
        print("resumed", run.resumed, flush=True)
        print("pid", os.getpid(), flush=True)
        for step in run.steps(int(sys.argv[3])):
            training.say(step)
            if workers:
                next(batches)
            training.step(model, optimizer)
    training.finish(model=model, optimizer=optimizer)
