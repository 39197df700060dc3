"""A small real training run as a Slurm job: slow in its first life, so that there is time to stop it, and
fast after that.

python train.py DIRECTORY RESULT STEPS
"""

from __future__ import annotations

import os
import sys

import lastcall
from helpers.models import training

if __name__ == "__main__":
    life = os.environ.get("SLURM_RESTART_COUNT", "0")
    training.PAUSE = 0.2 if "SLURM_JOB_ID" in os.environ and life == "0" else 0.0
    model, optimizer = training.parts()
    with lastcall.protect(training.DIRECTORY, model=model, optimizer=optimizer) as run:
        print("life", life, "resumed", run.resumed, flush=True)
        for step in run.steps(int(sys.argv[3])):
            training.say(step)
            training.step(model, optimizer)
    training.finish(model=model, optimizer=optimizer)
    print("finished", flush=True)
