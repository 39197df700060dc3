"""Methods that do the same job, run in turn in one process, in a new random order each round.

Interleaving is what makes the ratios hold: a machine's mood (writeback, host caches, neighbours) changes over
minutes, and then it changes for all of them. A method that cannot run here (no O_DIRECT on this file system)
is dropped and named with its reason, never silently.
"""

from __future__ import annotations

import enum
import os
import random
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from bench import disk, meters


class Kind(enum.Enum):
    """What a row stands for in the ratios."""

    LIMIT = "limit"  # what the hardware gives; the fastest of these is the limit
    OURS = "lastcall"
    PEER = "peer"  # the fastest of these is the one to beat
    ASIDE = "aside"  # worth seeing, in no ratio


@dataclass(frozen=True)
class Timing:
    """What a method says of its own run where the wall time around it is not the answer."""

    seconds: float
    returned: float | None = None  # when the caller could go on, where that is before the end
    cpu: float | None = None  # where other processes do the work
    peak: int | None = None


@dataclass(frozen=True)
class Sample:
    seconds: float
    cpu: float
    peak: int
    returned: float | None = None


class Method:
    """One way to do the job. Only `run` is timed; what it leaves running is waited for inside it, so that its
    cost is counted."""

    def __init__(self, name: str, kind: Kind, family: str | None = None) -> None:
        self.name = name
        self.kind = kind
        self.family = family or name  # variants of one thing: the table shows the fastest

    def setup(self) -> None:
        """Once, before the first round."""

    def before(self) -> None:
        """Before each run."""

    def run(self) -> Timing | None:
        raise NotImplementedError

    def after(self) -> None:
        """After each run: check and remove what it left."""

    def close(self) -> None:
        """Once, at the end, also after a failure."""


@dataclass
class Result:
    name: str
    kind: Kind
    family: str
    samples: list[Sample] = field(default_factory=list)
    failure: str | None = None

    @property
    def median(self) -> float:
        return statistics.median(sample.seconds for sample in self.samples)

    @property
    def best(self) -> float:
        return min(sample.seconds for sample in self.samples)

    @property
    def cpu(self) -> float:
        return statistics.median(sample.cpu for sample in self.samples)

    @property
    def peak(self) -> int:
        return max(sample.peak for sample in self.samples)

    @property
    def returned(self) -> float | None:
        times = [sample.returned for sample in self.samples if sample.returned is not None]
        return statistics.median(times) if times else None


@dataclass(frozen=True)
class Options:
    rounds: int
    without: tuple[str, ...] = ()
    drop_caches: bool = False
    seed: int = 0
    ranks: int = 2

    def keeps(self, name: str) -> bool:
        """`--without dcp` leaves out every method whose name contains "dcp"."""
        return not any(part.lower() in name.lower() for part in self.without)


def settle(options: Options) -> None:
    """End what the previous method left behind: its garbage, its dirty pages, its journal."""
    meters.trim()
    os.sync()
    if options.drop_caches:
        disk.drop_caches()
    time.sleep(0.1)


def progress(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def interleave(
    label: str, methods: Sequence[Method], options: Options, *, before_each: Callable[[], None] = lambda: None
) -> list[Result]:
    """Run every method once a round. `before_each` brings the state into the same condition for all (hot, and
    changed since the last save)."""
    kept = [method for method in methods if options.keeps(method.name)]
    results = {method.name: Result(method.name, method.kind, method.family) for method in kept}
    order = random.Random(options.seed)
    try:
        for method in kept:
            _guarded(label, method.setup, results[method.name])
        for number in range(1, options.rounds + 1):
            alive = [method for method in kept if results[method.name].failure is None]
            order.shuffle(alive)
            for position, method in enumerate(alive, 1):
                settle(options)
                where = f"{label}: round {number}/{options.rounds}, {position}/{len(alive)}"
                _guarded(
                    where, lambda m=method: _measure(m, results[m.name], before_each), results[method.name]
                )
                if results[method.name].failure is None:
                    progress(f"{where}, {method.name}: {results[method.name].samples[-1].seconds:.3f} s")
    finally:
        for method in kept:
            _guarded(label, method.close, results[method.name])
    return list(results.values())


def _measure(method: Method, result: Result, before_each: Callable[[], None]) -> None:
    before_each()
    method.before()
    try:
        with meters.Meter() as meter:
            timing = method.run()
        timing = timing or Timing(meter.seconds)
    finally:
        method.after()
    cpu = meter.cpu if timing.cpu is None else timing.cpu
    peak = meter.peak if timing.peak is None else timing.peak
    result.samples.append(Sample(timing.seconds, cpu, peak, timing.returned))


def _guarded(where: str, work: Callable[[], None], result: Result) -> None:
    """Whatever a method dies of, the others go on, and the table names it."""
    try:
        work()
    except BaseException as error:  # DCP's CheckpointException is no Exception
        if isinstance(error, KeyboardInterrupt | SystemExit) and not isinstance(error, Exception):
            raise
        # DCP puts its whole traceback there
        result.failure = f"{type(error).__name__}: {error}".partition("\n")[0]
        progress(f"{where}, {result.name}: not measured, {result.failure}")
