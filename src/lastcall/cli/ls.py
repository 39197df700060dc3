"""`lastcall ls`, and the directory scan that the other reading commands share: read-only, without the
catalog's lock.

The catalog lists what a run may resume from; a user also wants to see what is damaged, half written, set
aside or written by another program. A run may be active in the directory at the same time: a checkpoint that
vanishes during the scan is not listed.
"""

from __future__ import annotations

import argparse
import enum
import json
import os
import re
import stat
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lastcall import errors
from lastcall.cli import output
from lastcall.core.checkpoint import catalog as catalogs
from lastcall.core.checkpoint import record as records
from lastcall.core.checkpoint.record import Record

_NAME = re.compile(r"checkpoint-\d+(\.replaced-\d+)?(?P<aside>\.damaged-\d+)?")
_DEPTH = 4  # how deep below a directory to search for runs
_EXAMPLES = """examples:
  lastcall ls runs/exp1
  lastcall ls runs --json
"""
CHECKPOINT = {  # the fields of a checkpoint in JSON
    "name": "the name of its folder",
    "path": "the absolute path of its folder",
    "status": "valid, damaged, unchecked, incomplete, set aside or foreign",
    "valid": "whether a run may resume from it",
    "problem": "what is wrong with it, or null",
    "step": "the step that it was saved at",
    "kind": "periodic, jit, rescue, manual, final or guard",
    "reason": "what it was saved for, SIGTERM for example",
    "exact": "whether a run resumes from it bit for bit",
    "because": "why it is not exact, or empty",
    "complete": "false where there was no time for all files",
    "size": "its bytes",
    "written": "bytes that were written; the others are shared with the checkpoint before",
    "seconds": "how long the save took",
    "created": "when it was committed",
    "sequence": "its number among the commits of its incarnation",
    "incarnation": "the incarnation that saved it",
    "world": "the number of ranks",
    "metrics": "the metrics at its step",
}
_JSON = {
    "runs": "one entry for each run",
    "runs[].directory": "its absolute path",
    "runs[].run": "its name for itself, or null",
    "runs[].incarnations": "how many incarnations it has had, or null",
    "runs[].checkpoints": "committed checkpoints, newest first, then the rest",
    **{f"runs[].checkpoints[].{name}": text for name, text in CHECKPOINT.items()},
}


class FolderStatus(enum.Enum):
    """What a folder that is named like a checkpoint is."""

    VALID = "valid"  # committed: the record is whole, and the files that it names are there with their sizes
    DAMAGED = "damaged"  # committed once, but the record or a file is not what it was
    UNCHECKED = "unchecked"  # unknown: another version wrote it, or it cannot be read at the moment
    INCOMPLETE = "incomplete"  # never committed: being written, or left behind by a process that was killed
    SET_ASIDE = "set aside"  # damaged, and moved out of the way by a run
    FOREIGN = "foreign"  # without a record: written by another program


@dataclass(frozen=True)
class Found:
    """A folder as it was found."""

    path: Path
    status: FolderStatus
    problem: str  # what is wrong; empty if nothing is
    record: Record | None
    size: int  # bytes: as recorded, or as found where there is no record
    created: float

    @property
    def committed(self) -> bool:
        return self.status in (FolderStatus.VALID, FolderStatus.DAMAGED, FolderStatus.UNCHECKED)


def add(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "ls",
        description="Lists the checkpoints of runs, newest first. On a wide terminal it shows more columns.",
        epilog=_EXAMPLES,
    )
    parser.add_argument(
        "directories",
        metavar="DIR",
        nargs="+",
        type=Path,
        help="the directory of a run, or one that holds several",
    )
    output.add_json(parser, _JSON)
    parser.set_defaults(call=run)


def run(args: argparse.Namespace) -> int:
    roots = list(dict.fromkeys(root for directory in args.directories for root in runs(directory)))
    surveyed = [(root, survey(root)) for root in roots]
    if args.json:
        output.document({"runs": [_run_json(root, found) for root, found in surveyed]})
        return 0
    now = time.time()
    for position, (root, found) in enumerate(surveyed):
        if position:
            output.write()
        if len(surveyed) > 1:
            output.write(f"{output.printable(str(root))}:")
        _print(found, now)
    return 0


def _print(found: list[Found], now: float) -> None:
    if not found:
        output.write("no checkpoints yet")
        return
    head = ("CHECKPOINT", "STEP", "KIND", "REASON", "SIZE", "TOOK", "EXACT", "VALID", "CREATED", "AGE")
    output.table(
        head,
        [_row(item, now) for item in found],
        right=("STEP", "SIZE", "TOOK"),
        states=("EXACT", "VALID"),
        spared=("CREATED", "TOOK", "KIND", "STEP", "REASON", "AGE"),
        shortened={"REASON": 12},
    )
    for item in found:
        if item.problem and item.status is not FolderStatus.FOREIGN:
            output.say(f"{item.path.name}: {output.printable(item.problem)}", hang="  ")
        elif item.record is not None and item.record.because:
            output.say(f"{item.path.name} is not exact: {output.printable(item.record.because)}", hang="  ")


def _row(found: Found, now: float) -> tuple[str, ...]:
    record = found.record
    known = ("-", "-", "-")
    exact = took = "-"
    if record is not None:
        known = (str(record.step), record.kind.value, record.reason or "-")
        exact, took = "yes" if record.exact else "no", output.duration(record.seconds)
    if found.status is FolderStatus.VALID:
        valid = "yes" if record is None or record.complete else "partial"
    else:
        valid = found.status.value
    created = (output.moment(found.created), output.age(found.created, now))
    return (found.path.name, *known, output.size(found.size), took, exact, valid, *created)


def _run_json(root: Path, found: list[Found]) -> dict[str, object]:
    identity = identify(root)
    return {
        "directory": os.path.abspath(root),
        "run": identity.get("run"),
        "incarnations": identity.get("incarnations"),
        "checkpoints": [describe(item) for item in found],
    }


def describe(found: Found) -> dict[str, object]:
    """A checkpoint as JSON; what is only known from the record is null without one."""
    record = found.record
    return {
        "name": found.path.name,
        "path": os.path.abspath(found.path),
        "status": found.status.value,
        "valid": found.status is FolderStatus.VALID,
        "problem": found.problem or None,
        "step": record.step if record else None,
        "kind": record.kind.value if record else None,
        "reason": record.reason if record else None,
        "exact": record.exact if record else None,
        "because": record.because if record else None,
        "complete": record.complete if record else None,
        "size": found.size,
        "written": record.written if record else None,
        "seconds": record.seconds if record else None,
        "created": found.created,
        "sequence": record.sequence if record else None,
        "incarnation": record.incarnation if record else None,
        "world": record.world if record else None,
        "metrics": record.metrics if record else None,
    }


# ---- the look at a directory -------------------------------------------------------------------------------


def runs(directory: Path) -> list[Path]:
    """The runs in a directory: itself, or what is below it. LastcallError where there is none."""
    if not directory.exists():
        raise errors.LastcallError(
            f"{directory} does not exist. Give the directory that was passed to protect()."
        )
    if not directory.is_dir():
        raise errors.LastcallError(f"{directory} is a file. Give the directory that was passed to protect().")
    if checkpoint(directory) is not None:
        raise errors.LastcallError(
            f"{directory} is a checkpoint, not the directory of a run. Show it with: "
            f"lastcall show {directory}"
        )
    found = list(_below(directory, _DEPTH))
    if not found:
        raise errors.LastcallError(
            f"{directory} contains no run: there is no {catalogs.PRIVATE} folder and no checkpoint in or "
            "below it. Give the directory that was passed to protect()."
        )
    return found


def single(directory: Path) -> Path:
    """The one run of a directory."""
    found = runs(directory)
    if len(found) > 1:
        some = ", ".join(map(str, found[:3])) + (", ..." if len(found) > 3 else "")
        raise errors.LastcallError(f"{directory} holds {len(found)} runs. Name one of them: {some}")
    return found[0]


def _below(directory: Path, depth: int) -> Iterator[Path]:
    try:
        with os.scandir(directory) as entries:
            folders = sorted(entry.name for entry in entries if entry.is_dir(follow_symlinks=False))
    except PermissionError:
        if depth == _DEPTH:  # the directory that the user named
            raise
        return
    if catalogs.PRIVATE in folders or any(_is_named(directory / name) for name in folders):
        yield directory
    elif depth > 0:
        for name in folders:
            if not name.startswith("."):
                yield from _below(directory / name, depth - 1)


def _is_named(path: Path) -> bool:
    """Whether a folder is named like a checkpoint. One with a commit record may have any name: a script's own
    save after a notice, or one of lastcall.dcp."""
    return _NAME.fullmatch(path.name) is not None or (
        path.name != catalogs.PRIVATE and os.path.lexists(path / records.NAME)
    )


def checkpoint(path: Path) -> Path | None:
    """The path, if it names a checkpoint rather than a run; spelt with its name where it was "."."""
    named = path if _NAME.fullmatch(path.name) else Path(os.path.abspath(path))
    return named if _is_named(named) and not (named / catalogs.PRIVATE).exists() else None


def identify(root: Path) -> dict[str, object]:
    """What the run calls itself, and how many incarnations it has had."""
    try:
        body = json.loads((root / catalogs.PRIVATE / "run.json").read_bytes())
    except (OSError, ValueError):
        return {}
    return body if isinstance(body, dict) else {}


def survey(root: Path, *, others: bool = True) -> list[Found]:
    """Everything that is named like a checkpoint: the committed ones in the order of the catalog, newest
    first, then the rest. `others`: those too whose names are a script's own."""
    found = []
    for parent in (root, root / catalogs.PRIVATE / "staging"):
        try:
            with os.scandir(parent) as entries:
                names = [
                    entry.name
                    for entry in entries
                    if entry.is_dir(follow_symlinks=False) and _is_named(parent / entry.name)
                ]
                names = [name for name in names if others or _NAME.fullmatch(name)]
        except FileNotFoundError:
            continue
        found += [item for name in names if (item := look(parent / name)) is not None]
    return sorted(found, key=_order, reverse=True)


def _order(found: Found) -> tuple[bool, tuple[int, int, int], float]:
    record = found.record if found.committed else None
    return (record is not None, record.recency if record else (0, 0, 0), found.created)


def look(path: Path) -> Found | None:
    """What a folder is. None if it has gone away."""
    try:
        modified = path.stat().st_mtime
        status, problem, record = _judge(path)
        size = record.size if record else _bytes_in(path)
    except FileNotFoundError:
        return None
    return Found(path, status, problem, record, size, record.created if record else modified)


def _judge(path: Path) -> tuple[FolderStatus, str, Record | None]:
    match = _NAME.fullmatch(path.name)
    aside = match is not None and match["aside"] is not None
    if os.path.lexists(path / records.SENTINEL) or path.parent.parts[-2:] == (catalogs.PRIVATE, "staging"):
        return FolderStatus.INCOMPLETE, "never committed: it is being written, or its writer was killed", None
    if not os.path.lexists(path / records.NAME):
        path.stat()  # gone meanwhile?
        if aside:
            return FolderStatus.SET_ASIDE, f"it has no {records.NAME}", None
        return FolderStatus.FOREIGN, f"it has no {records.NAME}: another program wrote it", None
    try:
        record = records.read(path)
    except errors.UncheckedError as error:
        return (FolderStatus.SET_ASIDE if aside else FolderStatus.UNCHECKED), str(error), None
    except errors.CheckpointError as error:
        path.stat()
        return (FolderStatus.SET_ASIDE if aside else FolderStatus.DAMAGED), str(error), None
    problem = "; ".join(_faults(path, record))
    if aside:
        return (
            FolderStatus.SET_ASIDE,
            problem or "found damaged by a run; see where with lastcall verify",
            record,
        )
    if problem:
        path.stat()
        return FolderStatus.DAMAGED, problem, record
    return FolderStatus.VALID, "", record


def _faults(path: Path, record: Record) -> Iterator[str]:
    for file in record.files:
        try:
            info = os.lstat(path / file.name)
        except OSError as error:
            yield (
                f"{file.name} is missing"
                if isinstance(error, FileNotFoundError)
                else f"{file.name}: {error.strerror}"
            )
            continue
        if not stat.S_ISREG(info.st_mode):
            yield f"{file.name} is not a plain file"
        elif info.st_size != file.size:
            yield f"{file.name} has {info.st_size} bytes, {file.size} were recorded"


def _bytes_in(folder: Path) -> int:
    total = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            try:
                total += os.lstat(os.path.join(parent, name)).st_size
            except FileNotFoundError:
                continue
    return total


def resumes(found: list[Found]) -> Found | None:
    """The checkpoint that a run started now would resume from, as far as can be known without reading every
    byte."""
    valid = [item for item in found if item.status is FolderStatus.VALID and item.record is not None]
    return next(
        (item for item in valid if item.record is not None and item.record.complete),
        valid[0] if valid else None,
    )
