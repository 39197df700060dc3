"""From SIGTERM to durable in the middle of a training: lastcall, Transformers' own callback, and the raw
limit for the same bytes.

Every sample is a process of its own, which trains, gets SIGTERM at a random moment of a step, and is watched
from outside. What its maker calls complete is then fsynced by us, the same way for all: what is durable
already costs nothing there.
"""

from __future__ import annotations

import random
import statistics
from pathlib import Path

from bench import disk, raw
from bench.measure import Kind, Method, Options, Result, Sample, Timing, interleave
from bench.table import Comparison
from bench.transformers import trial
from bench.transformers.job import Spec, Training, nbytes

_STEPS = 100_000  # it is stopped long before
_WARM_STEPS = 5
_WARM_S = 3.0  # a run that has been going for a while: lastcall has prepared its space by then
_RANDOM_S = 1.0
_WAIT = 3.0  # seconds, Transformers' fixed kill wait and lastcall's default
_COPIES = 3  # on the disk of one training: the checkpoint, lastcall's spare space


class Preempted(Method):
    """One way to protect a training."""

    def __init__(self, way: trial.Way, spec: Spec, folder: Path, moments: random.Random) -> None:
        super().__init__(way.name, way.kind)
        self._way = way
        self._spec = spec
        self._folder = folder
        self._moments = moments
        self.found: list[trial.Preemption] = []

    def run(self) -> Timing:
        with trial.emptied(self._folder / "training") as folder:
            with trial.Job(self._way, self._spec, self._folder / "training" / "said.txt") as job:
                job.until("ready")
                job.tell(Training(str(folder / "out"), _STEPS, tell=True))
                begun = job.until("at")
                job.until("step", lambda step: step >= _WARM_STEPS)
                job.until("at", lambda at: at - begun >= _WARM_S)
                one = trial.preempt(job, self._way, folder / "out", self._moments.uniform(0, _RANDOM_S))
        self.found.append(one)
        return Timing(one.durable, returned=one.complete, cpu=one.cpu, peak=max(0, one.peak - one.resident))


def _undurable(theirs: Result) -> Result:
    """The same samples, up to where Transformers calls its checkpoint complete."""
    result = Result(
        f"{theirs.name}, no fsync", Kind.ASIDE, f"{theirs.family}, no fsync", failure=theirs.failure
    )
    result.samples = [Sample(s.returned, s.cpu, s.peak) for s in theirs.samples if s.returned is not None]
    return result


def _without_return(result: Result) -> None:
    result.samples = [Sample(s.seconds, s.cpu, s.peak) for s in result.samples]


def save(folder: Path, gigabytes: float, options: Options) -> Comparison:
    spec = Spec(parameters=gigabytes * 1e9 / 12)
    size = nbytes(spec)
    disk.require(folder, (raw.RECYCLED_FILES + 3 + _COPIES) * size)
    moments = random.Random(options.seed + 1)
    ways = (trial.OURS_AT_ONCE, trial.OURS, trial.THEIRS, trial.THEIRS_AT_ONCE)
    trained = [Preempted(way, spec, folder, moments) for way in ways]
    results = interleave("trainer-save", [*raw.writes(folder, size), *trained], options)
    for result in [one for one in results if one.kind in (Kind.OURS, Kind.PEER)]:
        if result.kind is Kind.PEER and result.samples:
            results.append(_undurable(result))
        _without_return(result)
    title = f"SIGTERM to durable in a Trainer loop: {size / 1e9:.2f} GB (GPT-2 and AdamW, fp32)"
    report = Comparison("trainer-save", title, size, results)
    report.notes += _notes({method.name: method.found for method in trained if method.found})
    return report


def _notes(found: dict[str, list[trial.Preemption]]) -> list[str]:
    notes = []
    every = [one for ones in found.values() for one in ones]
    if every:
        step = statistics.median(one.step_seconds for one in every)
        notes.append(
            f"A step takes {step:.2f} s; the signal comes anywhere in it. CPU and memory are those of the "
            "whole process from the signal"
            " on, training included, memory above what was resident then."
        )
    for name, ones in found.items():
        files = statistics.median(one.nbytes for one in ones) / 1e9
        before, peak = (
            statistics.median(values) / 1e9 for values in ([o.resident for o in ones], [o.peak for o in ones])
        )
        ended = statistics.median(one.ended for one in ones)
        notes.append(
            f"{name}: {files:.2f} GB of files; resident {before:.2f} GB before, {peak:.2f} GB at its "
            f"highest; gone after {ended:.2f} s."
        )
    ours, theirs = found.get(trial.OURS.name), found.get(trial.THEIRS.name)
    if ours and theirs:
        mine, other = (statistics.median(one.durable for one in ones) for ones in (ours, theirs))
        times = (other - _WAIT) / max(1e-9, mine - _WAIT)
        notes.append(
            f"With the same kill wait of {_WAIT:.0f} s Transformers takes {other / mine:.2f} times as long;"
            f" beyond the wait {other - _WAIT:.2f} s against {mine - _WAIT:.2f} s, {times:.1f} times as long."
        )
    return notes
