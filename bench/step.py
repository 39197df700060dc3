"""What protection costs a step while nothing happens: short blocks of steps, bare and protected, in pairs,
and the median of their differences.

A step is a call of a very small optimizer, so that microseconds show. The bare blocks run in the same process
with torch's step hooks taken out for their time; "control" is a second bare block and shows what the method
itself cannot tell apart.
"""

from __future__ import annotations

import contextlib
import itertools
import random
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import torch
from torch.optim import optimizer as hooks

from bench import measure, ours
from bench.table import Listing

_BLOCK = 50
_PAIRS_A_ROUND = 400
_LONG_STEP_S = 0.2
_FIRST = 10  # boundaries of the long steps that are counted apart
_LONG_STEPS = 40


def _small() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    model = torch.nn.Linear(4, 1, bias=False)
    model.weight.grad = torch.zeros_like(model.weight)
    return model, torch.optim.SGD(model.parameters(), lr=1e-9)


@contextlib.contextmanager
def _without_hooks(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Torch has no public way to set its global step hooks aside, and removing them is not ours to do: they
    belong to the session."""
    tables = [
        hooks._global_optimizer_pre_hooks,
        hooks._global_optimizer_post_hooks,
        optimizer._optimizer_step_pre_hooks,
        optimizer._optimizer_step_post_hooks,
    ]
    kept = [dict(table) for table in tables]
    for table in tables:
        table.clear()
    try:
        yield
    finally:
        for table, items in zip(tables, kept, strict=True):
            table.update(items)


def _block(passes: Iterator[object], optimizer: torch.optim.Optimizer) -> float:
    start = time.perf_counter()
    for _ in itertools.islice(passes, _BLOCK):
        optimizer.step()
    return (time.perf_counter() - start) / _BLOCK * 1e6


def _paired(
    optimizer: torch.optim.Optimizer, protected: Iterator[object] | None, pairs: int
) -> dict[str, list[float]]:
    """Microseconds a step for each kind of block, `pairs` of each, in a new order each time."""

    def bare() -> float:
        with _without_hooks(optimizer):
            return _block(itertools.repeat(None), optimizer)

    blocks: dict[str, Callable[[], float]] = {"bare": bare, "control": bare}
    if protected is not None:
        blocks["hooks"] = lambda: _block(itertools.repeat(None), optimizer)
        blocks["steps"] = lambda: _block(protected, optimizer)
    times: dict[str, list[float]] = {name: [] for name in blocks}
    order = random.Random(0)
    for _ in range(pairs):
        for name in order.sample(sorted(blocks), len(blocks)):
            times[name].append(blocks[name]())
    return times


def _added(times: dict[str, list[float]], name: str) -> float:
    return statistics.median(one - bare for one, bare in zip(times[name], times["bare"], strict=True))


def _boundaries(protected: Iterator[object]) -> list[float]:
    """Microseconds of each boundary where steps are long enough to carry the copy of small state at every one
    of them."""
    matrix = torch.ones(128, 128)
    times = []
    for _ in range(_LONG_STEPS):
        end = time.perf_counter() + _LONG_STEP_S
        while time.perf_counter() < end:
            torch.mm(matrix, matrix)
        start = time.thread_time()  # on a busy machine the clock would count what other processes do
        next(protected)
        times.append((time.thread_time() - start) * 1e6)
    return times


def _remark(boundaries: list[float]) -> str:
    first, usual = boundaries[:_FIRST], boundaries[_FIRST:]
    share = statistics.fmean(usual) / (_LONG_STEP_S * 1e6) * 100
    return (
        f"{share:.3f} % of a step of {_LONG_STEP_S * 1e3:.0f} ms on average; the promise is 0.1 % at most. "
        f"The first {_FIRST} together, once: {sum(first) / 1e3:.1f} ms"
    )


def _each(call: Callable[[], object], times: int = 200) -> float:
    taken = []
    for _ in range(times):
        start = time.perf_counter()
        call()
        taken.append((time.perf_counter() - start) * 1e6)
    return statistics.median(taken)


def step(folder: Path, options: measure.Options) -> Listing:
    pairs = _PAIRS_A_ROUND * options.rounds
    report = Listing("step", "Cost of a step, quiet", ("what", "µs", ""))
    model, optimizer = _small()
    with contextlib.ExitStack() as stack:
        protected = None
        if options.keeps("lastcall"):
            try:
                session = ours.Steps(folder / "lastcall-steps", model, optimizer)
                stack.callback(session.close)
                protected = session.iterate()
            except Exception as error:
                report.failure = f"{type(error).__name__}: {error}"
                measure.progress(f"step, lastcall: not measured, {report.failure}")
        _fill(report, _paired(optimizer, protected, pairs), protected)
    return report


def _fill(report: Listing, times: dict[str, list[float]], protected: Iterator[object] | None) -> None:
    report.add("bare step of the small optimizer", statistics.median(times["bare"]))
    report.add("control: bare against bare", _added(times, "control"), "added")
    if protected is not None:
        report.add("lastcall: hooks alone", _added(times, "hooks"), "added")
        report.add("lastcall: run.steps and hooks", _added(times, "steps"), "added; the promise is 2 at most")
        boundaries = _boundaries(protected)
        report.add(
            "lastcall: one boundary with its copy of small state",
            statistics.median(boundaries[_FIRST:]),
            _remark(boundaries),
        )
    report.add("torch.get_rng_state()", _each(torch.get_rng_state), "for comparison")
    report.add("random.getstate()", _each(random.getstate), "for comparison")
    report.add("np.random.get_state()", _each(np.random.get_state), "for comparison")
    report.notes.append(
        f"{len(times['bare'])} pairs of blocks of {_BLOCK} steps; medians of paired differences."
    )
