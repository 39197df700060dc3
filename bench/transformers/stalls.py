"""How long a periodic save of Trainer keeps training from going on: Transformers' own, which waits for its
files, against lastcall's, which copies and writes in the background.

The stall is the time from the end of the step that is saved to the end of the next one, less that of an
ordinary step: a saver could return at once and hold the next step back instead. What the writing in the
background takes from later steps is told under the table.
"""

from __future__ import annotations

import itertools
import statistics
from dataclasses import replace
from pathlib import Path
from typing import Any

from bench import disk, stall, state
from bench.measure import Kind, Method, Options, Timing, interleave
from bench.table import Comparison
from bench.transformers import trial
from bench.transformers.job import Spec, Training, nbytes

_EVERY = 12  # steps between two saves
_SAVES = 3  # the first one of a training allocates what the others use, and does not count
_LAST = 5  # steps before the next save, when the last one has long been written: ordinary ones
_COPIES = 5


class Periodic(Method):
    """A process that trains with `save_steps`; its trainings share the imports."""

    def __init__(self, name: str, way: trial.Way, spec: Spec, folder: Path) -> None:
        super().__init__(name, Kind.OURS if way.kind is Kind.OURS else Kind.PEER)
        self._way = replace(way, code=0)
        self._spec = spec
        self._folder = folder
        self._job: trial.Job | None = None
        self.lost: list[float] = []

    def setup(self) -> None:
        self._job = trial.Job(self._way, self._spec, self._folder / f"stall-{self._way.kind.value}.txt")
        self._job.until("ready")

    def run(self) -> Timing:
        assert self._job is not None
        with trial.emptied(self._folder / "stall") as own:
            self._job.tell(
                Training(str(own), _EVERY * (_SAVES + 1) - 1, save_steps=_EVERY, meter_from=_EVERY + 1)
            )
            done = self._job.until("done")
            self._check(own)
        stalls, lost = _stalls(done)
        self.lost.append(lost)
        return Timing(stalls, cpu=done["cpu"] / (_SAVES - 1), peak=done["peak"])

    def _check(self, folder: Path) -> None:
        last = folder / f"checkpoint-{_EVERY * _SAVES}"
        if not (last / self._way.record).exists():
            raise RuntimeError(f"there is no {last.name}/{self._way.record} at the end of the training")

    def close(self) -> None:
        if self._job:
            self._job.__exit__(None, None, None)
            self._job = None


def _stalls(done: dict[str, Any]) -> tuple[float, float]:
    """The median stall, and what a save costs in all: the time of the steps until the next save, less that of
    undisturbed ones."""
    ends = {int(step): at for step, at in done["ends"].items()}
    taken = {after: ends[after] - ends[before] for before, after in itertools.pairwise(sorted(ends))}
    ends_of_windows = (range(_EVERY * number - _LAST, _EVERY * number) for number in range(1, _SAVES + 2))
    ordinary = statistics.median(taken[step] for window in ends_of_windows for step in window)
    saved = [_EVERY * number for number in range(2, _SAVES + 1)]
    stalls = [taken[step + 1] - ordinary for step in saved]
    lost = [sum(taken[s] - ordinary for s in range(step + 1, step + _EVERY)) for step in saved]
    return statistics.median(stalls), statistics.median(lost)


def periodic(folder: Path, gigabytes: float, options: Options) -> Comparison:
    spec = Spec(parameters=gigabytes * 1e9 / 12)
    size = nbytes(spec)
    disk.require(folder, _COPIES * size)
    saved = state.gpt(size / 1e9)
    methods = [
        Periodic("lastcall, save_steps", trial.QUIET, spec, folder),
        Periodic("Transformers, save_steps (not durable)", trial.BARE, spec, folder),
    ]
    copies = [stall.Memcpy(saved, by_torch=False), stall.Memcpy(saved, by_torch=True)]
    results = interleave("trainer-stall", [*copies, *methods], options, before_each=saved.touch)
    title = f"Stall of a periodic save in a Trainer loop: {size / 1e9:.2f} GB (GPT-2 and AdamW, fp32)"
    report = Comparison("trainer-stall", title, size, results, limit="plain memcpy")
    report.notes += [
        f"{method.name}: {statistics.median(method.lost):.2f} s of training lost in all to a save and what "
        "goes on after it."
        for method in methods
        if method.lost
    ]
    report.notes.append(
        "CPU is that of the whole training process for a save and the steps until the next one."
    )
    return report
