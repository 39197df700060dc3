"""Many ranks: what they save and load together, what a step costs more, and how long a notice takes to become
a checkpoint of all."""

from __future__ import annotations

import contextlib
import json
import statistics
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from bench import disk, measure, raw
from bench.agreement import Report
from bench.measure import Options
from bench.ranks.crew import Crew, methods
from bench.save import ON_DISK
from bench.table import Comparison, Listing

_PAIRS_A_ROUND = 20  # of blocks of DDP steps
_SMALL_PAIRS_A_ROUND = 100
_LEDGER_S = 2.0  # a round, of steps in which the copies are counted
_NOTICES = (2, 4, 8, 16, 32, 64)
_FEW = 8  # ... of which a single round, which is no measurement, takes no more than these
_LIMIT = 300.0  # seconds for all rounds of one number of ranks


@contextlib.contextmanager
def _within(folder: Path, name: str) -> Iterator[Path]:
    """A folder for one benchmark: its ranks may leave something behind, and the next one starts with the same
    names."""
    own = folder / name
    own.mkdir()
    try:
        yield own
    finally:
        disk.clear(own)


# ---- sharded saves and loads -------------------------------------------------------------------------------


def _nothing_left(options: Options) -> bool:
    """The name of every method has one of these words: where all are left out, no process need be started."""
    return not any(options.keeps(word) for word in ("lastcall", "dcp", "raw"))


def save(folder: Path, gigabytes: float, options: Options) -> Comparison:
    if _nothing_left(options):
        return Comparison("ranks-save", "Sharded save: every method was left out", 0, [])
    disk.require(folder, (raw.RECYCLED_FILES + 2 + ON_DISK) * gigabytes * 1e9)
    with (
        _within(folder, "ranks-save") as own,
        Crew(options.ranks, "save", folder=str(own), gigabytes=gigabytes) as crew,
    ):
        report = _compared("ranks-save", "Sharded save", crew)
        report.results = measure.interleave(
            "ranks-save", methods(crew), options, before_each=lambda: crew.tell("touch")
        )
    report.notes.append(
        f"All durable. The time is that of the slowest of {options.ranks} ranks; CPU and memory are those of "
        "all of them. lastcall is"
        " run.save() on every rank, from the call until all know of the commit; lastcall's rows digest every "
        "byte."
    )
    return _through_dcp(report, "lastcall.dcp.Writer", "FileSystemWriter")


def load(folder: Path, gigabytes: float, options: Options, *, warm: bool = False) -> Comparison:
    name = "ranks-load-warm" if warm else "ranks-load"
    if _nothing_left(options):
        return Comparison(name, "Sharded load: every method was left out", 0, [])
    disk.require(folder, (4 + ON_DISK) * gigabytes * 1e9)
    with (
        _within(folder, name) as own,
        Crew(options.ranks, "load", folder=str(own), gigabytes=gigabytes, warm=warm) as crew,
    ):
        report = _compared(name, f"Sharded load, {'warm' if warm else 'cold'}", crew)
        report.results = measure.interleave(name, methods(crew), options)
    report.notes.append(
        "Every rank has checked that every byte of its shards came back. lastcall's rows check digests; its "
        "own is from protect() until"
        " the first step could begin."
    )
    return _through_dcp(report, "lastcall.dcp.Reader", "FileSystemReader")


def _compared(name: str, title: str, crew: Crew) -> Comparison:
    return Comparison(name, f"{title}: {crew.ask('described')[0]}", crew.ask("bytes")[0], [])


def _through_dcp(report: Comparison, mine: str, theirs: str) -> Comparison:
    """How the two storage layers below one and the same DCP compare."""
    measured = [result for result in report.results if result.failure is None]
    ours = [result for result in measured if mine in result.name]
    peers = [result for result in measured if theirs in result.name]
    if ours and peers:
        peer = min(peers, key=lambda result: result.median)
        report.notes.append(
            f"Through DCP, {mine} is {peer.median / ours[0].median:.1f} times as fast as "
            f"{theirs} ({peer.name})."
        )
    return report


# ---- steps -------------------------------------------------------------------------------------------------


def step(folder: Path, options: Options) -> Listing:
    report = Listing("ranks-step", f"Cost of a step on {options.ranks} ranks, quiet", ("what", "µs", ""))
    if not options.keeps("lastcall"):
        report.notes.append("lastcall was left out, and without it there is nothing to list.")
        return report
    try:
        with _within(folder, "ranks-step") as own, Crew(options.ranks, "steps", folder=str(own)) as crew:
            seconds = _LEDGER_S * options.rounds
            _list_ddp(report, crew.ask("ddp", pairs=_PAIRS_A_ROUND * options.rounds, seconds=seconds))
            _list_small(
                report, crew.ask("small", pairs=_SMALL_PAIRS_A_ROUND * options.rounds, seconds=seconds)
            )
    except RuntimeError as error:
        report.failure = str(error).partition("\n")[0]
    report.notes.append(
        "Medians of paired differences of blocks of steps, on the rank where they are "
        f"largest of {options.ranks}."
    )
    return report


def _added(found: Sequence[dict[str, Any]], name: str) -> float:
    """On the rank that has it worst."""
    return max(
        float(
            statistics.median(
                one - bare for one, bare in zip(rank["times"][name], rank["times"]["bare"], strict=True)
            )
        )
        for rank in found
    )


def _bare(found: Sequence[dict[str, Any]]) -> float:
    return max(float(statistics.median(rank["times"]["bare"])) for rank in found)


def _list_ddp(report: Listing, found: list[dict[str, Any]]) -> None:
    report.add("bare DDP step", _bare(found))
    report.add("control: bare against bare", _added(found, "control"), "added")
    report.add(
        "lastcall: run.steps, hooks and mail, in a DDP step",
        _added(found, "lastcall"),
        f"added; {_shares(found)}",
    )
    report.add("all-reduce of one flag in every step", _added(found, "flag"), "added")
    missing = found[0]["ray"]
    report.add("Ray's barrier in every step", None if missing else _added(found, "ray"), missing or "added")


def _list_small(report: Listing, found: list[dict[str, Any]]) -> None:
    report.add("bare step of a small optimizer, no collective", _bare(found))
    report.add("control: bare against bare, small", _added(found, "control"), "added")
    report.add("lastcall: hooks alone, small", _added(found, "hooks"), "added")
    report.add(
        "lastcall: run.steps and hooks, small", _added(found, "steps"), "added; the promise is 2 at most"
    )
    copy = max(rank["copy"] for rank in found) * 1e6
    report.add("lastcall: one copy of small state with its mail", copy, _shares(found))


def _shares(found: Sequence[dict[str, Any]]) -> str:
    worst = max(found, key=lambda rank: float(rank["share"]))
    return (
        f"copies and mail take {worst['share'] * 100:.3f} % of the time ({worst['copies']} copies); the "
        "promise is 0.1 % at most"
    )


# ---- notices -----------------------------------------------------------------------------------------------


def notices(folder: Path, options: Options, sizes: Sequence[int] = _NOTICES) -> Report:
    from lastcall.core.store import server

    header = ("ranks", "SIGTERM to all saved, ms", "the save itself, ms", "the rest, ms", "worst rest, ms")
    report = Report("notice-ranks", "From SIGTERM at one rank to a checkpoint of all", header)
    store = server.StoreServer("127.0.0.1", secret="bench")
    store.start()
    try:
        for size in sizes:
            if options.rounds == 1 and size > _FEW:
                report.notes.append(f"More than {_FEW} ranks are measured with --rounds 2 or more.")
                break
            with _within(folder, "notice-ranks") as own:
                _add_notices(report, size, _lives(size, options.rounds, store.address[1], own))
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        report.failure = f"{size} ranks: {type(error).__name__}: {error}"
    finally:
        store.stop()
    report.notes.append(
        "Processes without a model, each with a real session, over lastcall's store; medians. The save "
        "begins when the last rank begins"
        " to write. The rest holds up to two steps of 20 ms on the way to the boundary; the kill wait is 0."
    )
    return report


def _lives(size: int, rounds: int, port: int, folder: Path) -> list[tuple[float, float]]:
    command = [sys.executable, "-m", "bench.ranks.notices", *map(str, (size, rounds, port, "bench", folder))]
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run(command, cwd=root, stdout=subprocess.PIPE, text=True, timeout=_LIMIT, check=True)
    return [(began, ended) for began, ended in json.loads(done.stdout)]


def _add_notices(report: Report, size: int, lives: list[tuple[float, float]]) -> None:
    rests = [began for began, _ in lives]
    whole = statistics.median(ended for _, ended in lives)
    saves = statistics.median(ended - began for began, ended in lives)
    cells = (whole, saves, statistics.median(rests), max(rests))
    report.rows.append((str(size), *(f"{seconds * 1e3:.0f}" for seconds in cells)))
    report.samples[f"{size} ranks, the rest"] = rests
    measure.progress(
        f"notice-ranks: {size} ranks: the rest {statistics.median(rests) * 1e3:.0f} ms, the "
        f"save {saves * 1e3:.0f} ms"
    )
