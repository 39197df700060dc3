"""`lastcall verify`: checks every byte of checkpoints against its digest. Read-only: takes no lock, sets
nothing aside, works beside an active run."""

from __future__ import annotations

import argparse
import dataclasses
import os
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lastcall import errors
from lastcall.cli import ls, output
from lastcall.core.checkpoint import record as records
from lastcall.core.checkpoint.record import Entry
from lastcall.core.engine import writer
from lastcall.core.restore import restore
from lastcall.storage import files as storage

_BAR = 30
_EVERY = 0.1  # seconds between two updates of the bar
_EXAMPLES = """examples:
  lastcall verify runs/exp1
  lastcall verify --newest runs
"""
_JSON = {
    "ok": "whether every byte is intact",
    "checkpoints": "one entry for each checkpoint",
    "checkpoints[].name": "the name of its folder",
    "checkpoints[].path": "the absolute path of its folder",
    "checkpoints[].step": "its step, or null",
    "checkpoints[].result": "ok, damaged, unchecked (no record) or gone (removed meanwhile)",
    "checkpoints[].problems": "what is damaged, file by file",
    "checkpoints[].size": "its bytes",
    "checkpoints[].seconds": "how long it took",
}


@dataclass(frozen=True)
class CheckpointVerification:
    """The result for one checkpoint."""

    found: ls.Found
    # "ok" | "damaged" | "gone": pruned while it was read | "unchecked": nothing to check it against
    result: str
    problems: tuple[str, ...]
    seconds: float


def add(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "verify",
        description="Checks every byte of checkpoints against its digest. Exits with 0 if all match, "
        "otherwise with 1.",
        epilog=_EXAMPLES,
    )
    parser.add_argument(
        "paths",
        metavar="DIR|CHECKPOINT",
        nargs="+",
        type=Path,
        help="runs (all their checkpoints), or single checkpoints",
    )
    parser.add_argument("--newest", action="store_true", help="only the newest checkpoint of each run")
    output.add_json(parser, _JSON)
    parser.set_defaults(call=run)


def run(args: argparse.Namespace) -> int:
    targets = [item for path in args.paths for item in _targets(path, newest=args.newest)]
    targets = list({os.path.abspath(item.path): item for item in targets}.values())
    bar = Bar(
        sum(item.size for item in targets if item.record),
        show=not args.json and output.interactive(sys.stderr),
    )
    engine = writer.Engine(files=bar)
    results = []
    try:
        for item in targets:
            results.append(_check(item, engine))
            if not args.json:
                bar.wipe()
                _print(results[-1])
    finally:
        bar.wipe()
        engine.close()
    bad = [result for result in results if result.result in ("damaged", "unchecked")]
    good = [result for result in results if result.result == "ok"]
    holds = not bad and bool(good)
    if args.json:
        output.document({"ok": holds, "checkpoints": [_json(result) for result in results]})
    elif bad:
        output.say(f"{len(bad)} of {output.plural(len(results), 'checkpoint')} cannot be trusted")
    elif not good:
        output.say("nothing was verified: the checkpoints were removed in the meantime")
    return 0 if holds else 1


def _targets(path: Path, *, newest: bool) -> Iterator[ls.Found]:
    if (named := ls.checkpoint(path)) is not None:
        found = ls.look(named)
        if found is None:
            raise errors.LastcallError(f"{path} does not exist.")
        yield found
        return
    for root in ls.runs(path):
        committed = [item for item in ls.survey(root) if item.committed]
        if not committed:
            raise errors.LastcallError(
                f"{root} holds no committed checkpoint. List what exists with: lastcall ls {root}"
            )
        yield from committed[:1] if newest else committed


def _check(found: ls.Found, engine: writer.Engine) -> CheckpointVerification:
    began = time.monotonic()
    if found.record is None:
        result = (
            "damaged" if found.status in (ls.FolderStatus.DAMAGED, ls.FolderStatus.SET_ASIDE) else "unchecked"
        )
        return CheckpointVerification(found, result, (found.problem,), 0.0)
    problems = tuple(_problems(found.path, found.record, engine))
    result = "ok"
    if problems:
        result = "damaged" if _still_there(found) else "gone"
    return CheckpointVerification(
        found, result, problems if result == "damaged" else (), time.monotonic() - began
    )


def _problems(path: Path, record: records.Record, engine: writer.Engine) -> Iterator[str]:
    """File by file, so that each damaged one is named; the chunks of a file are read in parallel."""
    for file in record.files:
        try:
            restore.verify(Entry(path, dataclasses.replace(record, files=(file,))), engine)
        except errors.CheckpointError as error:
            yield str(error)
        except OSError as error:
            yield f"{file.name} cannot be read: {error.strerror or error}"


def _still_there(found: ls.Found) -> bool:
    """A run may have pruned or replaced the checkpoint while it was being read."""
    try:
        return records.read(found.path) == found.record
    except errors.CheckpointError:
        return found.path.exists()


def _print(result: CheckpointVerification) -> None:
    name = output.printable(str(result.found.path))
    if result.result == "ok":
        read = result.found.size / 1e6
        speed = f", {read / result.seconds:.0f} MB/s" if result.seconds > 0.01 and read > 1 else ""
        partial = ", partial" if result.found.record is not None and not result.found.record.complete else ""
        took = output.duration(result.seconds)
        said = f"ok ({output.size(result.found.size)} in {took}{speed}{partial})"
    elif result.result == "gone":
        said = "gone (the run removed it in the meantime)"
    else:
        said = f"{result.result}: {output.printable('; '.join(result.problems))}"
    output.say(f"{name}: {said}", hang="  ", state=result.result)
    sys.stdout.flush()


def _json(result: CheckpointVerification) -> dict[str, object]:
    found = result.found
    return {
        "name": found.path.name,
        "path": os.path.abspath(found.path),
        "step": found.record.step if found.record else None,
        "result": result.result,
        "problems": list(result.problems),
        "size": found.size,
        "seconds": round(result.seconds, 4),
    }


class Bar(storage.Files):
    """The engine's file system, which counts what is read and updates the progress bar."""

    def __init__(self, total: int, *, show: bool) -> None:
        self._total = total
        self._show = show and total > 0
        self._done = 0
        self._drawn = 0.0
        self._lock = threading.Lock()

    def pread(self, fd: int, data: memoryview, offset: int) -> int:
        got = super().pread(fd, data, offset)
        with self._lock:
            self._done += got
            now = time.monotonic()
            if self._show and now - self._drawn >= _EVERY:
                self._drawn = now
                self._draw()
        return got

    def _draw(self) -> None:
        part = min(self._done / self._total, 1.0)
        filled = "#" * round(part * _BAR)
        sys.stderr.write(f"\r[{filled:<{_BAR}}] {part:4.0%} of {output.size(self._total)} ")
        sys.stderr.flush()

    def wipe(self) -> None:
        """Make room for a line of text."""
        if self._show and self._drawn:
            sys.stderr.write("\r\x1b[K")
            sys.stderr.flush()
