"""What tests/e2e/transformers/scripts/findings.py is told (JSON in TRAINER_PLAN), and the faults that it
makes for itself when asked.

The journal is the one of the rank scripts (helpers.ranks.plan). Its lines here: start, made (the Trainer is
there), at (a step begins), training (a micro-batch begins), micro (it is done: `data` names its samples,
`state` has the loss), did (a step is done), evaluation (one begins), evaluating (one batch of it), save
(Trainer._save_checkpoint is called), saving (the slow part of a write begins), on_save (the user's callback),
tail (train() has returned), done (`state` has the digest of the weights).
"""

from __future__ import annotations

import dataclasses
import errno
import json
import os
import re
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from helpers.ranks.plan import Journal

PLAN = "TRAINER_PLAN"


@dataclass(frozen=True)
class Plan:
    """The shape of a training. Seconds are of sleep."""

    steps: int = 24
    seconds: float = 0.05  # in every micro-batch
    samples: int = 96  # of the data set: with batches of 2, so many halves are an epoch
    accumulate: int = 1
    dropout: float = 0.1
    seed: int = 1
    rate: float = 1e-3
    save: str = "no"  # save_strategy
    save_steps: int = 4
    limit: int | None = None  # save_total_limit
    evaluate: str = "no"  # eval_strategy, every save_steps
    eval_batches: int = 2
    eval_seconds: float = 0.0  # in every batch of an evaluation
    best: int | None = None  # load_best_model_at_end; the evaluation at this step is the best one
    workers: int = 0
    thread: bool = False  # the Trainer is made and used in a thread
    first: int = 0  # a train() of so many steps before the one that counts
    import_seconds: float = 0.0  # before the Trainer is made
    make_seconds: float = 0.0  # between Trainer() and train()
    tail_seconds: float = 0.0  # after train(), before final/ is written
    save_seconds: float = 0.0  # between the first file of a checkpoint and the last
    slow_rank: int | None = None  # only this rank writes slowly; None: all
    eio: bool = False  # the first write of a checkpoint fails, once in the life of the run
    chatty: bool = False  # log lines all the time
    long: int | None = None  # a step that takes so long that it is not waited for
    raises: int | None = None  # a step that raises on one of the ranks, in the first life
    no_space: bool = False  # every write of a checkpoint fails

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self))


def read_plan() -> Plan:
    return Plan(**json.loads(os.environ.get(PLAN, "{}")))


class Disk:
    """A slow disk, or one that fails once, below whoever writes: below torch.save for Transformers, below our
    file operations for us. Both are hit in the middle of a checkpoint: after its first file and before it is
    complete."""

    def __init__(self, plan: Plan, journal: Journal) -> None:
        self._plan = plan
        self._journal = journal
        self._lock = threading.Lock()
        self._met: set[str] = set()

    def install(self, ours: bool) -> None:
        if not self._plan.save_seconds and not self._plan.eio and not self._plan.no_space:
            return
        if ours:
            self._below_lastcall()
        else:
            self._below_torch()

    def _below_torch(self) -> None:
        import torch

        real = torch.save

        def save(value: Any, path: Any, *args: Any, **options: Any) -> None:
            name = os.path.basename(str(path))
            if name == ("optimizer.pt" if self._journal.rank == 0 else f"rng_state_{self._journal.rank}.pth"):
                self._meet(int(Path(path).parent.name.rpartition("-")[2]))
            real(value, path, *args, **options)

        torch.save = save

    def _below_lastcall(self) -> None:
        from lastcall.storage import files

        real = files.Files.fsync

        def fsync(this: files.Files, fd: int) -> None:
            place = re.search(r"/staging/([a-z]+-(\d+)[^/]*)/(.+)$", os.readlink(f"/proc/self/fd/{fd}"))
            if place and "incomplete" not in place[3]:  # checkpoint-9; jit-9-TOKEN where there are many ranks
                with self._lock:
                    first = place[1] not in self._met
                    self._met.add(place[1])
                if first:
                    self._meet(int(place[2]))
            real(this, fd)

        files.Files.fsync = fsync  # type: ignore[method-assign]

    def _meet(self, step: int) -> None:
        if self._plan.no_space:
            self._met.clear()  # the next attempt meets it again
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        if self._plan.eio and self._journal.first_time("eio"):
            self._journal.say("eio", step=step)
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        if self._plan.save_seconds and self._plan.slow_rank in (None, self._journal.rank):
            self._journal.say("saving", step=step)
            time.sleep(self._plan.save_seconds)
