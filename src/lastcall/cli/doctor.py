"""`lastcall doctor`: what will happen here when this machine is preempted. The checks are in
lastcall.doctor."""

from __future__ import annotations

import argparse
import dataclasses
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lastcall.cli import ls, output, watch
from lastcall.core.checkpoint import catalog as catalogs
from lastcall.doctor import inspection
from lastcall.doctor.checks import rundir
from lastcall.doctor.finding import Case, Finding
from lastcall.storage import files as storage

_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*(?:([kMGT]?)i?B?)", re.IGNORECASE)
_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}

_REMEDY = f"{'':<8} -> "
_EXAMPLES = """examples:
  lastcall doctor
  lastcall doctor runs/exp1 -- bash train.sh
"""
_JSON = {
    "verdict": "ok or risk",
    "findings": "one entry for each check",
    "findings[].name": "the name of the check",
    "findings[].level": "ok, warning or risk",
    "findings[].says": "what was found",
    "findings[].remedy": "what to do, or empty",
    "findings[].facts": "the numbers behind it",
    "settings": "for each setting: value, origin, variable",
    "versions": "the version of each package, or null",
}


def add(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "doctor",
        description="Says what will happen here when this machine is preempted, with a remedy for each risk. "
        "Measures but changes nothing. Exits with 0, or with 1 when work would be lost.",
        usage="lastcall doctor [options] [DIR] [-- COMMAND ...]",
        epilog=_EXAMPLES,
    )
    parser.add_argument(
        "directory",
        metavar="DIR",
        nargs="?",
        type=Path,
        help="the directory of the run; it need not exist yet",
    )
    parser.add_argument(
        "--size",
        metavar="BYTES",
        type=_bytes,
        help="size of the state, for example 20GB (default: the size of the newest checkpoint)",
    )
    parser.add_argument("--guard", action="store_true", help="check as if with lastcall run --guard")
    parser.add_argument(
        "--termination-grace",
        metavar="SECONDS",
        type=_seconds,
        help="seconds between SIGTERM and SIGKILL on this platform (terminationGracePeriodSeconds); cannot "
        "be "
        "detected from inside a container",
    )
    parser.add_argument(
        "--no-write-test",
        action="store_true",
        help="do not write a test file (256 MB at most) to measure the disk",
    )
    parser.add_argument(
        "--settings", action="store_true", help="show every setting and its origin, defaults included"
    )
    output.add_json(parser, _JSON)
    parser.set_defaults(call=run, command=())
    whole = parser.parse_known_args

    def split(
        args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> tuple[argparse.Namespace, list[str]]:
        """argparse would assign the first word after -- to DIR."""
        words = list(sys.argv[1:] if args is None else args)
        at = words.index("--") if "--" in words else len(words)
        found, rest = whole(words[:at], namespace)
        found.command = tuple(words[at + 1 :])
        return found, rest

    parser.parse_known_args = split


def run(args: argparse.Namespace) -> int:
    case = Case(
        environ=dict(os.environ),
        directory=args.directory,
        command=args.command,
        size=args.size,
        termination_grace=args.termination_grace,
        write_test=not args.no_write_test,
        guard=args.guard,
    )
    report = inspection.inspect(case, _directory(args.directory))
    if args.json:
        output.document(
            {
                "verdict": report.verdict,
                "findings": [dataclasses.asdict(item) for item in report.findings],
                "settings": report.settings,
                "versions": report.versions,
            }
        )
    else:
        _print(report, everything=args.settings)
    return 1 if report.risks else 0


def _directory(path: Path | None) -> rundir.Directory | None:
    """What the reading commands know of it."""
    if path is None or not path.is_dir():
        return None
    watcher = watch.Watcher(path)
    status = watcher.look()
    failure = (status.failure or {}).get("because")
    return rundir.Directory(
        root=path,
        checkpoints=tuple(
            rundir.Checkpoint(item.path, item.status.value, item.problem, item.record)
            for item in ls.survey(path)
        ),
        active=status.active,
        pid=status.pid,
        paused=status.paused is not None,
        outcome=status.outcome,
        because=str(failure) if failure else "",
        periodic=bool((watcher.story.start or {}).get("periodic")),
        spare=sum(catalogs.Catalog(path, storage.Files()).spares.sizes()),
    )


def _print(report: inspection.DoctorReport, *, everything: bool) -> None:
    width = max(len(item.name) for item in report.findings)
    for item in report.findings:
        _line(item, width)
    shown = {name: row for name, row in report.settings.items() if everything or row["origin"] != "default"}
    if shown:
        output.write()
        rows = [(name, _value(row["value"]), str(row["origin"])) for name, row in shown.items()]
        output.table(("SETTING", "VALUE", "FROM"), rows, folded={"VALUE": 20})
    output.write()
    output.say(_summary(report))


def _line(item: Finding, width: int) -> None:
    """The remedy has nearly the whole width: it is there to be pasted."""
    column = len(f"{item.level:<8} {item.name:<{width}}  ")
    first, *others = output.wrapped(output.printable(item.says), output.width() - column)
    output.write(f"{output.state(f'{item.level:<8}')} {item.name:<{width}}  {first}")
    for line in others:
        output.write(" " * column + line)
    if item.remedy:
        output.say(f"{_REMEDY}{output.printable(item.remedy)}", hang=" " * len(_REMEDY))


def _value(value: object) -> str:
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)


def _summary(report: inspection.DoctorReport) -> str:
    warnings = output.plural(report.warnings, "warning")
    if report.risks:
        return (
            f"{output.plural(report.risks, 'risk')}, {warnings}: work would be lost here. See the remedies "
            "above."
        )
    if report.warnings:
        return f"No risks found, but {warnings}."
    return "No risks found: a preemption here would lose no work."


def _bytes(text: str) -> int:
    found = _SIZE.fullmatch(text.strip())
    if found is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size. For example: 20GB")
    return int(float(found[1]) * _UNITS[found[2].lower()])


def _seconds(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = -1.0
    if not 0 < number < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds. For example: 120")
    return number
