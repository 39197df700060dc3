"""What protection adds to a step of Trainer while nothing happens.

One process for each way, all of them alive; they train in turn, a few hundred steps of a very small model at
a time, in a new order each time, and never at once. "control" is a second unprotected process and shows what
the method itself cannot tell apart: two processes never have quite the same step, so the control's distance
from zero is the error of all the rows.

Every training begins with boundary copies at each step, until their 50 ms of credit are used up
(docs/internals.md): what they cost is a row of its own, and the steps that count come after them.
"""

from __future__ import annotations

import contextlib
import itertools
import random
import statistics
from dataclasses import replace
from pathlib import Path

from bench import measure
from bench.table import Listing
from bench.transformers import trial
from bench.transformers.job import Spec, Training

_TURNS_A_ROUND = 4
_EARLY = slice(50, 100)  # steps that copy at each boundary
# steps that do not count: lastcall's hooks learn what kind of loop it is, and the credit for copies is used
# up
_LEARNING = 500
_STEPS = 200
_NAMES = {"bare": trial.BARE, "control": trial.BARE, "theirs": trial.THEIRS, "lastcall": trial.QUIET}


def _turn(job: trial.Job, folder: Path) -> tuple[list[float], float]:
    """Microseconds of each step that counts, and of a step among the first."""
    with trial.emptied(folder) as own:
        job.tell(Training(str(own), _LEARNING + _STEPS))
        ends = job.until("done")["ends"]
    times = [ends[str(number)] for number in range(1, _LEARNING + _STEPS + 1)]
    steps = [(after - before) * 1e6 for before, after in itertools.pairwise(times)]
    return steps[-_STEPS:], statistics.median(steps[_EARLY])


def step(folder: Path, options: measure.Options) -> Listing:
    report = Listing("trainer-step", "Cost of a Trainer step, quiet", ("what", "µs", ""))
    ways = {
        name: way for name, way in _NAMES.items() if options.keeps(way.name) or name in ("bare", "control")
    }
    if set(ways) == {"bare", "control"}:
        report.notes.append("every method was left out")
        return report
    means: dict[str, list[float]] = {name: [] for name in ways}
    middles: dict[str, list[float]] = {name: [] for name in ways}
    firsts: dict[str, list[float]] = {name: [] for name in ways}
    with contextlib.ExitStack() as stack:
        try:
            jobs = {
                name: stack.enter_context(
                    trial.Job(
                        replace(way, code=0), Spec("linear", length=8), folder / f"trainer-step-{name}.txt"
                    )
                )
                for name, way in ways.items()
            }
            for name, job in jobs.items():
                job.until("ready")
                _turn(job, folder / f"trainer-step-{name}")
            order = random.Random(options.seed)
            for number in range(1, _TURNS_A_ROUND * options.rounds + 1):
                for name in order.sample(sorted(jobs), len(jobs)):
                    times, first = _turn(jobs[name], folder / f"trainer-step-{name}")
                    firsts[name].append(first)
                    means[name].append(statistics.fmean(times))
                    middles[name].append(statistics.median(times))
                latest = ", ".join(f"{name} {values[-1]:.0f}" for name, values in middles.items())
                measure.progress(
                    f"trainer-step: turn {number}/{_TURNS_A_ROUND * options.rounds}: {latest} µs"
                )
        except (OSError, RuntimeError, TimeoutError) as error:
            report.failure = f"{type(error).__name__}: {error}"
            return report
    _fill(report, means, middles)
    if "lastcall" in firsts:
        report.add(
            "lastcall, in the first steps",
            _added(firsts, "lastcall"),
            "added, while each boundary is copied on credit",
        )
    return report


def _fill(report: Listing, means: dict[str, list[float]], middles: dict[str, list[float]]) -> None:
    bare = statistics.median(middles["bare"])
    report.add("bare step of Trainer, very small model", bare)
    titles = {
        "control": "control: bare against bare",
        "theirs": "Transformers enable_jit_checkpoint",
        "lastcall": "lastcall",
    }
    for name, title in titles.items():
        if name in middles:
            added = _added(middles, name)
            whole = _added(means, name)
            remark = (
                f"added, {added / bare * 100:.2f} %; by the mean of all steps {whole:.1f} µs, "
                f"{whole / bare * 100:.2f} %"
            )
            report.add(title, added, remark)
    report.notes.append(
        f"{len(middles['bare'])} turns of {_STEPS} steps each, one process a row; medians of the differences "
        "within a turn, of the"
        " turns' median steps (and of their means, which hold what lastcall does at some steps only)."
    )


def _added(times: dict[str, list[float]], name: str) -> float:
    return statistics.median(one - bare for one, bare in zip(times[name], times["bare"], strict=True))
