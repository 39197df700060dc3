"""A 1.5-billion-parameter model in bf16 with AdamW on one GPU: from SIGTERM to durable, memory, and whether a
resumed run is the same.

    PYTHONPATH=src:.device-site python -m bench.transformers.gpu [--rounds 2] [--tiny]

Every trial is a process of its own that trains, gets SIGTERM and is watched from outside, as in `python -m
bench trainer-save`. The first trial of each way is then resumed to the end, and its weights, moments and
losses are compared with those of a run that nobody stopped. Prints a table, and writes everything to
$OUT/trainer-gpu.json (or --json). Ends within --budget seconds, whatever is missing by then.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from bench import disk, raw
from bench.conditions import conditions
from bench.measure import Options, interleave, progress
from bench.table import lines
from bench.transformers import trial
from bench.transformers.job import Spec, Training

# the ones that matter most first, should the time run out
WAYS = (trial.OURS_AT_ONCE, trial.THEIRS, trial.OURS, trial.THEIRS_AT_ONCE)
_WARM_STEPS = 8
_STATE = 9.3e9  # bytes
_COPIES = 3


@dataclass
class Resumed:
    """A run that was stopped once, beside one that was not."""

    step: int
    first_step: float  # seconds from the start of train() to the end of the first step
    identical: bool
    losses: str  # "20 of 20"
    weights: bool
    moments: bool


@dataclass
class Row:
    name: str
    trials: list[trial.Preemption] = field(default_factory=list)
    memory: list[dict[str, int]] = field(default_factory=list)  # of torch's allocator, until the end
    resumed: Resumed | None = None
    failure: str | None = None


class Clock:
    """The time that is left, and how long a trial takes."""

    def __init__(self, budget: float) -> None:
        self._end = time.monotonic() + budget
        self._longest = 0.0

    def allows(self, share: float = 1.0) -> bool:
        return time.monotonic() + share * self._longest < self._end

    def timed(self, work: Callable[[], Any]) -> Any:
        start = time.monotonic()
        try:
            return work()
        finally:
            self._longest = max(self._longest, time.monotonic() - start)


def used() -> int:
    """Bytes of the device that anybody uses: pools and contexts included."""
    free, total = torch.cuda.mem_get_info()
    return total - free


def losses(said: list[dict[str, Any]]) -> dict[int, str]:
    """By step; where a step was computed twice, the one that counted."""
    return {line["of"]: line["loss"] for line in said if "loss" in line}


class Bench:
    def __init__(self, given: argparse.Namespace, folder: Path) -> None:
        self._spec = Spec("qwen2", tiny=given.tiny, length=given.length, rows=given.rows, exact=True)
        self._steps = given.steps
        self._pace = given.pace
        self._warm = given.warm
        self._folder = folder
        self._clock = Clock(given.budget)
        self._moments = random.Random(1)
        self._device = used if torch.cuda.is_available() else None
        self.parameters = 0
        self.whole: dict[str, Any] = {}
        self.whole_losses: dict[int, str] = {}
        self.whole_memory: dict[str, int] = {}

    def uninterrupted(self) -> None:
        """What every resumed run has to come out at."""
        self.whole, self.whole_losses, self.whole_memory = self._clock.timed(
            lambda: self._to_the_end(trial.BARE, None, "whole")
        )

    def has_time(self) -> bool:
        return self._clock.allows()

    def control(self) -> bool | None:
        """Whether a second uninterrupted run is the same as the first."""
        if not self._clock.allows():
            return None
        again, its_losses, _ = self._to_the_end(trial.BARE, None, "control")
        return its_losses == self.whole_losses and all(
            again[key] == self.whole[key] for key in ("weights", "moments")
        )

    def _to_the_end(
        self, way: trial.Way, resume: Path | None, name: str
    ) -> tuple[dict[str, Any], dict[int, str], dict[str, int]]:
        """Of a checkpoint that lastcall wrote only the folder is known: it finds it by itself."""
        folder = resume.parent if resume else self._folder / name
        given = str(resume) if resume and not way.environ else None
        with trial.Job(way, self._spec, self._folder / f"{name}.txt") as job:
            self.parameters = job.until("ready")
            job.tell(Training(str(folder), self._steps, pace=self._pace, tell=True, resume=given))
            begun = time.monotonic()
            first = job.until("at") - begun
            done = job.until("done")
            job.leave()
        if done["step"] != self._steps:
            raise RuntimeError(
                f"the training ended at step {done['step']}, not {self._steps}. {job.last_words()}"
            )
        return {**done, "first": first}, losses(job.said), _memory(job.said)

    def trials(self, row: Row, way: trial.Way) -> None:
        # the first one is resumed as well
        if row.failure or not self._clock.allows(1.0 if row.trials else 2.0):
            return
        try:
            with trial.emptied(self._folder / "training") as folder:
                self._clock.timed(lambda: self._stop(row, way, folder))
                progress(
                    f"{way.name}: complete after {row.trials[-1].complete:.2f} s, durable after "
                    f"{row.trials[-1].durable:.2f} s"
                )
                if row.resumed is None and way is not trial.THEIRS_AT_ONCE:
                    row.resumed = self._clock.timed(lambda: self._resume(way, row.trials[-1].checkpoint))
                    progress(
                        f"{way.name}: resumed at step {row.resumed.step}, identical: {row.resumed.identical}"
                    )
        except (OSError, RuntimeError, TimeoutError) as error:
            row.failure = f"{type(error).__name__}: {error}"
            progress(f"{way.name}: {row.failure}")

    def _stop(self, row: Row, way: trial.Way, folder: Path) -> None:
        with trial.Job(way, self._spec, self._folder / "training.txt") as job:
            job.until("ready")
            job.tell(Training(str(folder), self._steps, pace=self._pace, tell=True))
            begun = job.until("at")
            job.until("step", lambda step: step >= _WARM_STEPS)
            job.until("at", lambda at: at - begun >= self._warm)
            row.trials.append(trial.preempt(job, way, folder, self._moments.uniform(0, 0.5), self._device))
            row.memory.append(_memory(job.said))

    def _resume(self, way: trial.Way, checkpoint: Path) -> Resumed:
        step = int(checkpoint.name.rpartition("-")[2])
        done, found, _ = self._to_the_end(way, checkpoint, "resumed")
        after = range(step + 1, self._steps + 1)
        if min(found) != step + 1:
            raise RuntimeError(
                f"the resumed run began at step {min(found)}, and the checkpoint is of step {step}"
            )
        same = sum(found.get(number) == self.whole_losses[number] for number in after)
        weights, moments = (done[key] == self.whole[key] for key in ("weights", "moments"))
        identical = weights and moments and same == len(after)
        return Resumed(step, done["first"], identical, f"{same} of {len(after)}", weights, moments)


def _memory(said: list[dict[str, Any]]) -> dict[str, int]:
    return next(
        ({"allocated": one["allocated"], "reserved": one["reserved"]} for one in said if "allocated" in one),
        {},
    )


def _cells(row: Row) -> list[str]:
    if not row.trials:
        return [row.name, *["-"] * 9]

    def middle(of: Callable[[trial.Preemption], float]) -> float:
        return statistics.median(of(one) for one in row.trials)

    allocated = [one["allocated"] for one in row.memory if one]
    resumed = row.resumed
    return [
        row.name,
        f"{middle(lambda one: one.complete):.2f}",
        f"{middle(lambda one: one.durable):.2f}",
        f"{min(one.durable for one in row.trials):.2f}",
        f"{middle(lambda one: one.resident) / 1e9:.1f}",
        f"{max(one.peak for one in row.trials) / 1e9:.1f}",
        f"{max(allocated) / 1e9:.1f}" if allocated else "-",
        f"{max(one.device_peak - one.device for one in row.trials) / 1e9:.2f}",
        "-" if resumed is None else "yes" if resumed.identical else "no",
        "-" if resumed is None else resumed.losses,
    ]


_HEADER = (
    "way",
    "complete s",
    "durable s",
    "best s",
    "host GB before",
    "host GB peak",
    "GPU GB allocated",
    "GPU GB more",
    "same run",
    "losses",
)


def _limit(folder: Path, nbytes: int) -> tuple[str, float] | None:
    """The fastest raw durable write of the same bytes."""
    ways = (raw.Way.RECYCLED, raw.Way.NEW, raw.Way.BUFFERED)
    results = interleave("raw", [raw.RawWrite(way, folder, nbytes, 8) for way in ways], Options(1))
    measured = [(result.name, result.median) for result in results if result.samples]
    return min(measured, key=lambda one: one[1], default=None)


def _remarks(
    bench: Bench, rows: dict[str, Row], control: bool | None, limit: tuple[str, float] | None
) -> list[str]:
    word = {
        True: "identical to the first",
        False: "NOT identical to the first: this device does not repeat itself",
        None: "not run",
    }
    remarks = [
        f"{bench.parameters / 1e9:.2f} billion parameters. A second uninterrupted run: {word[control]}."
    ]
    every = [one for row in rows.values() for one in row.trials]
    if every:
        fewest = min(len(row.trials) for row in rows.values())
        files, step = (
            statistics.median(one.nbytes for one in every),
            statistics.median(one.step_seconds for one in every),
        )
        remarks.append(
            f"{files / 1e9:.2f} GB of files; a step takes {step:.2f} s. Medians of at least {fewest} trials."
        )
    if bench.whole_memory:
        remarks.append(
            f"Without any save torch allocates {bench.whole_memory['allocated'] / 1e9:.1f} GB on "
            "the GPU at its highest."
        )
    if limit:
        remarks.append(f"Raw limit for the same bytes: {limit[1]:.2f} s ({limit[0]}).")
    for mine, other in ((trial.OURS, trial.THEIRS), (trial.OURS_AT_ONCE, trial.THEIRS_AT_ONCE)):
        ours, theirs = (
            [one.durable for one in rows[way.name].trials] if way.name in rows else []
            for way in (mine, other)
        )
        if ours and theirs:
            times = statistics.median(theirs) / statistics.median(ours)
            remarks.append(f"{other.name} takes {times:.2f} times as long as {mine.name}.")
    remarks += [
        f"{row.name} resumed at step {row.resumed.step}: first step after {row.resumed.first_step:.2f} s."
        for row in rows.values()
        if row.resumed
    ]
    return [
        *remarks,
        *(
            f"not measured: {row.name}: {row.failure or 'no time was left'}"
            for row in rows.values()
            if row.failure or not row.trials
        ),
    ]


def _arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m bench.transformers.gpu",
        description="Trainer on a GPU: lastcall beside Transformers' callback.",
    )
    parser.add_argument("--tiny", action="store_true", help="a very small model, to try the script on a CPU")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--steps", type=int, default=60, help="of a whole run (60)")
    parser.add_argument("--rows", type=int, default=8, help="in a batch (8)")
    parser.add_argument("--length", type=int, default=1024, help="tokens of a row (1024)")
    parser.add_argument(
        "--pace",
        type=float,
        default=0.2,
        help="seconds that a step takes at least: a kill wait must not outlast the run",
    )
    parser.add_argument(
        "--warm",
        type=float,
        default=5.0,
        help="seconds of training before the signal: lastcall has prepared its space (5)",
    )
    parser.add_argument("--budget", type=float, default=540, help="seconds for all of it (540)")
    parser.add_argument(
        "--dir", type=Path, default=Path(tempfile.gettempdir()), help="on the disk to measure"
    )
    parser.add_argument("--json", type=Path, help="$OUT/trainer-gpu.json where OUT is set")
    parser.add_argument(
        "--without",
        action="append",
        default=[],
        metavar="NAME",
        help="leave out ways whose name contains this",
    )
    given = parser.parse_args(argv)
    if given.tiny:
        given.length, given.rows = 16, 1
    if given.json is None and os.environ.get("OUT"):
        given.json = Path(os.environ["OUT"]) / "trainer-gpu.json"
    return given


def _write(path: Path | None, written: dict[str, Any]) -> None:
    if path:
        path.write_text(json.dumps(written, indent=1, default=str) + "\n")


def main(argv: list[str] | None = None) -> int:
    given = _arguments(argv)
    if not (given.tiny or torch.cuda.is_available()):
        print("bench: this needs a CUDA device; --tiny tries the script without one", file=sys.stderr)
        return 2
    here = conditions(given.dir)
    print("\n".join(f"{name:8}{value}" for name, value in here.items()), flush=True)
    rows = {way.name: Row(way.name) for way in WAYS if Options(1, tuple(given.without)).keeps(way.name)}
    written: dict[str, Any] = {"conditions": here}
    with tempfile.TemporaryDirectory(prefix="lastcall-bench-", dir=given.dir) as name:
        folder = Path(name)
        disk.require(folder, 1e8 if given.tiny else _COPIES * _STATE)
        bench = Bench(given, folder)
        bench.uninterrupted()
        for number in range(given.rounds):
            for way in WAYS if number % 2 == 0 else WAYS[::-1]:
                if way.name in rows:
                    bench.trials(rows[way.name], way)
                    written["rows"] = [asdict(row) for row in rows.values()]
                    _write(given.json, written)  # each time: whoever runs this may be stopped, too
        written["control"] = control = bench.control()
        sizes = [one.nbytes for row in rows.values() for one in row.trials]
        written["limit"] = limit = (
            _limit(folder, int(statistics.median(sizes))) if sizes and bench.has_time() else None
        )
    rendered = lines(_HEADER, [_cells(row) for row in rows.values()], False)
    written["remarks"] = remarks = _remarks(bench, rows, control, limit)
    print("\n".join(["", "Trainer on a GPU: from SIGTERM to durable", "", *rendered, "", *remarks]))
    _write(given.json, written)
    mine = [row for way in WAYS if way.environ and (row := rows.get(way.name))]
    return 1 if any(row.failure or row.resumed is None or not row.resumed.identical for row in mine) else 0


if __name__ == "__main__":
    sys.exit(main())
