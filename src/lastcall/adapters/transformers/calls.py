"""The train() calls that a directory has seen: for each (the first of a script, the second) what was trained,
as which run, in which job, and how its last incarnation ended. It distinguishes a restart from a new
training: `.lastcall/calls.json`, kept by rank 0.

What is read here may be damaged or missing: then nothing is known, and the run is known by what it trains.
"""

from __future__ import annotations

import collections
import dataclasses
import json
import logging
import os
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lastcall.core import timing
from lastcall.core.checkpoint import record as records
from lastcall.core.checkpoint.catalog import PRIVATE
from lastcall.core.engine import digest
from lastcall.core.process import job_identity
from lastcall.storage import files as storage

log = logging.getLogger("lastcall")
_FILE = "calls.json"
_LARGEST = 1024 * 1024
# how an incarnation ended; anything else: it was lost, or failed
FINISHED, SAVED, INTERRUPTED = "finished", "saved", "interrupted"
_SAME = (
    "seed",
    "data_seed",
    "learning_rate",
    "optim",
    "lr_scheduler_type",
    "warmup_steps",
    "weight_decay",
    "adam_beta1",
    "adam_beta2",
    "per_device_train_batch_size",
    "gradient_accumulation_steps",
    "num_train_epochs",
    "max_steps",
)


@dataclass(frozen=True)
class Traits:
    """What is trained, and what changes its way: content and configuration, never where a file lies or when
    it was written."""

    said: dict[str, str] = field(default_factory=dict)
    model: str = ""  # digest of names, shapes and dtypes
    length: int | None = None  # of the data

    @classmethod
    def of(cls, trainer: Any) -> Traits:
        said = {name: str(getattr(trainer.args, name, None)) for name in _SAME}
        try:
            length = len(trainer.train_dataset) if trainer.train_dataset is not None else None
        except TypeError:
            length = None
        return cls(said, digest.of(json.dumps(parameters(trainer)).encode()), length)

    def against(self, other: Traits) -> list[str]:
        """Where the other one, of before, differs: a few words each."""
        names = [name for name in _SAME if self.said.get(name) != other.said.get(name)]
        found = [f"{name} is {self.said.get(name)}, was {other.said.get(name)}" for name in names]
        if self.length != other.length:
            found.append(f"the data has {self.length} samples, had {other.length}")
        return found + (["the model is another"] if self.model != other.model else [])


def parameters(trainer: Any) -> list[tuple[str, list[int], str]]:
    if not trainer.model:
        return []
    return [(name, list(value.shape), str(value.dtype)) for name, value in trainer.model.named_parameters()]


@dataclass(frozen=True)
class Call:
    """The latest incarnation of one train() call."""

    run: str
    job: str = ""
    traits: Traits = field(default_factory=Traits)
    ended: str = ""
    at: float = 0.0  # when it ended
    script: str = ""  # a job may run several, one after the other

    def restarted_as(self, job: str) -> bool:
        """Whether this job has the unfinished call in hand: then it continues it, whatever has changed."""
        return (
            bool(job)
            and self.job == job
            and self.script == script()
            and self.ended not in (FINISHED, INTERRUPTED)
        )

    def just_left(self, job: str, now: float) -> bool:
        """Whether somebody was asked to run it again a moment ago, and this may be what came of it."""
        elsewhere = bool(job and self.job and job != self.job)
        return self.ended == SAVED and not elsewhere and 0 <= now - self.at < timing.RESTART


def script() -> str:
    return os.path.basename(sys.argv[0]) if sys.argv else ""


class Calls:
    """Of one directory."""

    def __init__(self, root: Path) -> None:
        self._path = root / PRIVATE / _FILE
        self.job = job_identity.identity()
        self._calls = _read(self._path)

    def before(self, number: int) -> Call | None:
        """What the call of this number was in the former incarnation."""
        return self._calls.get(str(number))

    def runs(self, number: int) -> set[str]:
        """The runs of this script's other calls."""
        return {call.run for name, call in self._calls.items() if name != str(number)}

    def note(self, number: int, call: Call) -> None:
        """Rank 0. A full disk must not keep a run from training."""
        self._calls = {**_read(self._path), str(number): call}
        body = {name: dataclasses.asdict(one) for name, one in self._calls.items()}
        try:
            storage.replace_small(self._path, json.dumps(body).encode())
        except OSError as error:
            log.warning("Could not write %s: %s", self._path, error)


def _read(path: Path) -> dict[str, Call]:
    try:
        body = json.loads(records.read_regular(path, _LARGEST))
        return {str(name): _call(found) for name, found in body.items()}
    except Exception:  # it may hold anything
        return {}


def _call(body: dict[str, Any]) -> Call:
    traits = body["traits"]
    said = {str(name): str(value) for name, value in traits["said"].items()}
    length = None if traits["length"] is None else int(traits["length"])
    told = Traits(said, str(traits["model"]), length)
    return Call(
        str(body["run"]), str(body["job"]), told, str(body["ended"]), float(body["at"]), str(body["script"])
    )


_counted: collections.Counter[Path] = collections.Counter()


def next_call(root: Path) -> int:
    """The number of this train() call among those of this process that save into the same folder."""
    _counted[root.resolve()] += 1
    return _counted[root.resolve()]


def not_over(root: Path) -> None:
    """The latest call was stopped and saved: another one in this process continues it."""
    _counted[root.resolve()] -= 1
