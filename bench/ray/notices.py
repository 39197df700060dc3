"""From SIGTERM to a checkpoint in Ray's own list, and to the next step of the restarted run; and how many
steps were done for nothing.

One script (tests/ray/scripts/steps.py), two workers on two nodes, steps of 50 ms, with Ray's own intervals:
the controller polls every 2 s, and looks for drained nodes every 5 s, or every second with lastcall, which
asks for that. Its peer is the same script with get_preemption_info() in its loop, as Ray's documentation has
it: it hears of nodes, and not of signals to a worker.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from bench import measure
from bench.agreement import Report
from bench.measure import Options
from helpers.ray.cluster import Cluster, until
from helpers.ray.runs import Run, node, one_worker

_STEPS = 100_000  # never reached: the run is killed when all rounds are done
_WARM_UP = 10  # steps of a life before it is told
_PAUSE = 0.05
_MOST = 3  # rounds: one of the peer takes a minute
# as lastcall leaves them
_DEFAULTS = {"RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "2", "RAY_TRAIN_PREEMPTION_POLL_INTERVAL_S": "1"}
_PLAIN = {"RAY_TRAIN_JIT_CHECKPOINT_ENABLED": "0", "RAY_TRAIN_PREEMPTION_POLL_INTERVAL_S": "5"}
_NODES = 3  # one for each rank, and one that takes the place of the one that goes


@dataclass(frozen=True)
class Way:
    name: str
    script: str
    notice: Callable[[Run], None]
    env: dict[str, str]


WAYS = (
    Way("lastcall, SIGTERM to a train worker", "steps", one_worker, {}),
    Way("lastcall, SIGTERM to a node", "steps", node, {}),
    Way("Ray's get_preemption_info(), SIGTERM to a node", "native", node, _PLAIN),
)


@dataclass(frozen=True)
class Sample:
    committed: float  # seconds from the signal
    again: float  # until the first step of the next life
    lost: int  # steps that the first life did after those that it saved
    ended: bool  # the run failed, and had to be started again by hand


def notices(folder: Path, options: Options) -> Report:
    header = (
        "what",
        "SIGTERM to committed, s",
        "worst, s",
        "to the next step, s",
        "steps lost after it",
        "runs that failed",
    )
    report = Report("ray-notice", "Ray Train: from SIGTERM to a checkpoint that the controller knows", header)
    rounds = min(options.rounds, _MOST)
    with Cluster(cpus=4) as cluster:
        for number, way in enumerate(WAYS):
            if options.keeps(way.name):
                own = folder / str(number)
                own.mkdir()
                _add(report, way, _samples(cluster, own, way, rounds))
    report.notes.append(
        f"Medians of {rounds} rounds in one run; two workers, steps of {_PAUSE * 1e3:.0f} ms, a state of a "
        "few kB: what is measured is"
        " the way. Ray's own intervals (polls of 2 s); kill wait 0, which is 3 s by default. A signal to a "
        "train worker ends a run"
        " without lastcall."
    )
    return report


def _samples(cluster: Cluster, folder: Path, way: Way, rounds: int) -> list[Sample]:
    options = ("--steps", _STEPS, "--save_every", _STEPS, "--pause", _PAUSE, "--resource", "pool")
    run = Run(
        folder, way.script, *options, RAY_TRAIN_JIT_CHECKPOINT_KILL_WAIT="0", **{**_DEFAULTS, **way.env}
    )
    found = []
    _nodes(cluster)
    run.start(cluster)
    for life in range(1, rounds + 1):
        run.until_life(life)
        run.until_step(run.lives()[-1].began_at + _WARM_UP, life=life)
        _nodes(cluster)
        found.append(_sample(run, way, life))
        measure.progress(f"ray-notice: {way.name}: {found[-1]}")
    run.driver.process.kill()
    run.driver.wait()
    return found


def _nodes(cluster: Cluster) -> None:
    while len(cluster.free("pool")) < _NODES:
        cluster.add(1, pool=1)


def _sample(run: Run, way: Way, life: int) -> Sample:
    before = len(run.checkpoints())
    told = time.time()
    way.notice(run)
    run.driver.until(lambda: len(run.checkpoints()) > before, "a committed checkpoint")
    committed = time.time() - told
    until(
        lambda: len(run.lives()) > life or run.driver.process.poll() is not None,
        lambda: "a restart, or the end of the run",
    )
    ended = len(run.lives()) == life
    if ended:
        run.start(run.cluster)
    run.until_life(life + 1)
    run.driver.until(lambda: bool(run.lives()[-1].steps), "a step of the next life")
    first, second = run.lives()[life - 1 : life + 1]
    return Sample(committed, second.steps[0]["time"] - told, first.reached - second.began_at, ended)


def _add(report: Report, way: Way, found: list[Sample]) -> None:
    committed = [sample.committed for sample in found]
    again = statistics.median(sample.again for sample in found)
    lost = statistics.median(sample.lost for sample in found)
    ended = f"{sum(sample.ended for sample in found)} of {len(found)}"
    times = (f"{seconds:.1f}" for seconds in (statistics.median(committed), max(committed), again))
    report.rows.append((way.name, *times, f"{lost:.0f}", ended))
    report.samples[way.name] = committed
    report.samples[f"{way.name}, steps lost"] = [float(sample.lost) for sample in found]
