"""How long the ranks take to agree, and what that asks of the store.

Measured: real processes without a model over our own store, from the moment one of them announces a notice to
the moment the last of them knows the decision. Simulated: the same code on a store in memory that counts, up
to 16,384 ranks, with the exponent with which the traffic grows. "all-to-all" is the peer: everybody reads
what everybody said, and computes the same answer from it.
"""

from __future__ import annotations

import json
import math
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from bench import measure, table
from lastcall import clock
from lastcall.core.ranks import agreement, election
from lastcall.core.store import client, memory, server

_PROCESSES = (2, 4, 8, 16, 32, 64)
_FEW = 8  # ... of which a single round, which is no measurement, takes no more than these
_SIMULATED = (64, 256, 1024, 4096, 16384)
_ALL_TO_ALL_MOST = 2048  # beyond, it takes minutes: the fitted law says what it would be
_PATIENCE = 60.0
_WAYS = ("lastcall", "all-to-all")


@dataclass
class Report:
    """A table with a sentence or two below, as bench.table has them."""

    name: str
    title: str
    header: tuple[str, ...]
    rows: list[tuple[str, ...]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    samples: dict[str, list[float]] = field(default_factory=dict)
    failure: str | None = None

    @property
    def failed(self) -> bool:
        return self.failure is not None

    def render(self, markdown: bool) -> str:
        heading = f"### {self.title}" if markdown else self.title
        missing = [f"not measured: lastcall: {self.failure}"] if self.failure else []
        return "\n".join(
            [heading, "", *table.lines(self.header, self.rows, markdown), "", *self.notes, *missing]
        )

    def as_json(self) -> dict[str, object]:
        return {name: value for name, value in vars(self).items() if name != "header"} | {
            "header": list(self.header)
        }


# ---- one rank ----------------------------------------------------------------------------------------------


def _decided(one: agreement.Agreement, way: str, store: client.StoreClient) -> None:
    position = election.Position(one.rank, 7, entered=7)
    if way == "lastcall":
        one.agree(
            "boundary",
            position,
            lambda found: election.boundary(found, one.size),
            time.monotonic() + _PATIENCE,
        )
        return
    place = f"all/{one.number}"
    store.set(f"{place}/{one.rank}", position.to_bytes())
    if store.add(f"{place}/count", 1) == one.size:
        store.set(f"{place}/complete", b"1")
    store.get(f"{place}/complete", _PATIENCE)
    said = store.get_many([f"{place}/{rank}" for rank in range(one.size)])
    found = {rank: at for rank, at in enumerate(map(election.Position.from_bytes, said)) if at is not None}
    election.boundary(found, one.size)


def rank_main(port: int, secret: str, rank: int, size: int, rounds: int) -> None:
    """Prints, for every way and round, when it announced (None where another did) and when it knew. The
    processes share that clock."""
    store = client.StoreClient("127.0.0.1", port, secret)
    times: dict[str, list[tuple[float | None, float]]] = {way: [] for way in _WAYS}
    for number in range(1, len(_WAYS) * rounds + 1):
        way = _WAYS[number % len(_WAYS)]
        one = agreement.Agreement(store, rank, size, clock.Clock(), number)
        if not one.vote("ready", True, "", time.monotonic() + _PATIENCE).ok:
            sys.exit("a rank did not come")
        time.sleep(0.05)  # until all of them listen, as in a run
        announced = None
        if number % size == rank:
            announced = time.monotonic()
            one.announce({"reason": "SIGTERM"})
        if one.heard(_PATIENCE) is None:
            sys.exit("the announcement was not heard")
        _decided(one, way, store)
        times[way].append((announced, time.monotonic()))
    agreement.Agreement(store, rank, size, clock.Clock()).vote("done", True, "", time.monotonic() + _PATIENCE)
    # after all of them: a Python process that ends takes the processor from those that are measured
    print(json.dumps(times))


def _processes(size: int, rounds: int) -> dict[str, list[float]]:
    """Seconds from the announcement to the last rank's knowing, for each way and round."""
    store = server.StoreServer("127.0.0.1", secret="bench")
    store.start()
    code = (
        "import sys; from bench import agreement; agreement.rank_main(int(sys.argv[1]), 'bench', *map(int, "
        "sys.argv[2:]))"
    )
    started: list[subprocess.Popen[str]] = []
    try:
        for rank in range(size):
            command = [sys.executable, "-c", code, *map(str, (store.address[1], rank, size, rounds))]
            started.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
        said = [json.loads(process.communicate(timeout=4 * _PATIENCE)[0]) for process in started]
    finally:
        for process in started:
            process.kill()
            process.wait()
        store.stop()
    taken: dict[str, list[float]] = {}
    for way in _WAYS:
        for of_ranks in zip(*(one[way] for one in said), strict=True):
            begun = next(announced for announced, _ in of_ranks if announced is not None)
            taken.setdefault(way, []).append(max(known for _, known in of_ranks) - begun)
    return taken


def processes(folder: Path, options: measure.Options, sizes: Sequence[int] = _PROCESSES) -> Report:
    header = ("ranks", *(f"{way}, ms" for way in _WAYS), "lastcall's worst, ms")
    report = Report("agreement", "From a notice to a decision that all ranks know", header)
    rounds = 4 * options.rounds
    for size in sizes:
        if options.rounds == 1 and size > _FEW:
            report.notes.append(f"More than {_FEW} ranks are measured with --rounds 2 or more.")
            break
        try:
            taken = _processes(size, rounds)
        except (OSError, ValueError, subprocess.SubprocessError) as error:
            report.failure = f"{size} ranks: {type(error).__name__}: {error}"
            break
        medians = [f"{statistics.median(taken[way]) * 1e3:.1f}" for way in _WAYS]
        report.rows.append((str(size), *medians, f"{max(taken['lastcall']) * 1e3:.1f}"))
        report.samples |= {f"{way}, {size} ranks": taken[way] for way in _WAYS}
        measure.progress(f"agreement: {size} ranks: {', '.join(medians)} ms")
    report.notes.append(
        f"Processes without a model over lastcall's store; medians of {rounds} rounds each, interleaved."
    )
    return report


# ---- the simulation ----------------------------------------------------------------------------------------


class Counting(memory.MemoryStore):
    """Also remembers the largest answer."""

    largest = 0

    def get_many(self, keys: Sequence[str]) -> list[bytes | None]:
        found = super().get_many(keys)
        self.largest = max(self.largest, sum(len(value or b"") for value in found))
        return found


def _simulated(size: int) -> Counting:
    """Every rank hears the notice and publishes; the last decides; every rank learns of it: the code of
    agree() in the order of a run in which nobody has to wait longer than a second."""
    store = Counting()
    crew = [agreement.Agreement(store, rank, size, clock.Clock()) for rank in range(size)]
    crew[0].announce({"reason": "SIGTERM"})
    place = crew[0]._key("boundary")
    for one in crew[:-1]:
        one.heard(0)
        one._publish(place, election.Position(one.rank, 7, entered=7).to_bytes())
    last = crew[-1]
    last.heard(0)
    at = election.Position(last.rank, 7, entered=7)
    last.agree("boundary", at, lambda found: election.boundary(found, size), time.monotonic() + _PATIENCE)
    for _ in crew[:-1]:  # each of them waits in one get, which the decision ends
        assert store.get(f"{place}/decision", 0)
    return store


def _simulated_all_to_all(size: int) -> Counting:
    store = Counting()
    keys = [f"all/1/{rank}" for rank in range(size)]
    for rank, key in enumerate(keys):
        store.get("news", 0)
        store.set(key, election.Position(rank, 7, entered=7).to_bytes())
        store.add("all/1/count", 1)
    for _ in keys:
        store.get("all/1/count", 0)
        store.get_many(keys)
    return store


def exponent(points: Sequence[tuple[int, float]]) -> float:
    """Of the power law through these points, by least squares on the logarithms."""
    logs = [(math.log(size), math.log(value)) for size, value in points]
    middle_x, middle_y = (statistics.fmean(axis) for axis in zip(*logs, strict=True))
    return sum((x - middle_x) * (y - middle_y) for x, y in logs) / sum((x - middle_x) ** 2 for x, _ in logs)


def simulation(folder: Path, options: measure.Options, sizes: Sequence[int] = _SIMULATED) -> Report:
    header = ("ranks, protocol", "operations", "a rank", "MB in all", "bytes a rank", "largest answer, kB")
    report = Report("traffic", "What one agreement asks of the store (simulated)", header)
    simulations: dict[str, tuple[Callable[[int], Counting], int]] = {
        "lastcall": (_simulated, max(sizes)),
        "all-to-all": (_simulated_all_to_all, _ALL_TO_ALL_MOST),
    }
    for way, (simulate, most) in simulations.items():
        points = []
        for size in (size for size in sizes if size <= most):
            measure.progress(f"traffic: {way}, {size} ranks")
            store = simulate(size)
            count, nbytes = (
                sum(store.traffic.operations.values()),
                store.traffic.bytes_in + store.traffic.bytes_out,
            )
            points.append((size, float(nbytes)))
            cells = (
                f"{count}",
                f"{count / size:.2f}",
                f"{nbytes / 1e6:.2f}",
                f"{nbytes / size:.0f}",
                f"{store.largest / 1e3:.1f}",
            )
            report.rows.append((f"{size}, {way}", *cells))
        law = exponent(points)
        beyond = points[-1][1] * (max(sizes) / points[-1][0]) ** law
        report.samples[f"{way}, exponent"] = [law]
        more = f"; {max(sizes)} ranks would move {beyond / 1e9:.1f} GB" if points[-1][0] < max(sizes) else ""
        report.notes.append(
            f"{way}: the bytes grow with the number of ranks to the power of {law:.2f}{more}."
        )
    return report
