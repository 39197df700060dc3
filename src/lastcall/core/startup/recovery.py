"""Recovery of a guarded state that a killed process left behind: it is saved as an ordinary committed
checkpoint."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from lastcall import clock as clocks
from lastcall import errors
from lastcall.core.checkpoint.catalog import Catalog
from lastcall.core.engine.writer import Engine
from lastcall.core.guard import guard
from lastcall.core.save.budget import Budget
from lastcall.core.save.saver import Request, Saver
from lastcall.storage import files as storage
from lastcall.types import Capture, Kind

log = logging.getLogger("lastcall")


@dataclass(frozen=True)
class Rescued:
    """A guarded state that was saved."""

    root: Path
    step: int
    path: Path


def recover(root: Path, reason: str, *, clock: clocks.Clock | None = None) -> Rescued | None:
    """Lock a dead run's directory and save its guarded state. None where that is not newer than its last
    checkpoint."""
    if not (root / ".lastcall" / guard.POINTER).exists():
        return None
    clock = clock or clocks.Clock()
    catalog = Catalog(root, storage.Files())
    catalog.open(clock)
    try:
        return recover_into(catalog, reason, clock)
    finally:
        catalog.close()


def recover_into(catalog: Catalog, reason: str, clock: clocks.Clock) -> Rescued | None:
    """The same, for the process that holds the directory. What cannot be saved now stays, with a warning, for
    the next start: never a reason not to start."""
    pointer = catalog.private / guard.POINTER
    # gone with the machine, if it was restarted
    paths = [Path(path) for path in guard.areas(pointer) if os.path.exists(path)]
    try:
        found = [(area, slot) for area in _attached(paths) if (slot := _slot(area)) is not None]
        if strange := [area.path for area, slot in found if not _of_this_run(catalog, slot[1])]:
            log.warning(
                "Ignoring the guarded state that %s names: it belongs to another run: %s",
                pointer,
                ", ".join(map(str, strange)),
            )
            found = [each for each in found if each[0].path not in strange]
            paths = [path for path in paths if path not in strange]
        newest = max(found, key=lambda each: each[1][0].step, default=None)
        rescued = None if newest is None else _save(catalog, *newest[1], reason, clock)
        for path in paths:
            path.unlink(missing_ok=True)
        pointer.unlink(missing_ok=True)
    except (errors.LastcallError, OSError) as error:
        log.warning(
            "The guarded state could not be saved, and stays in %s: %s", ", ".join(map(str, paths)), error
        )
        return None
    return rescued


def _of_this_run(catalog: Catalog, body: dict[str, object]) -> bool:
    """A directory from another user may name any area of this user's."""
    try:
        known = json.loads(storage.read_plain(catalog.private / "run.json", 64 * 1024))
        return (
            not isinstance(known, dict) or "run" not in known or known["run"] == body.get("run", known["run"])
        )
    except (OSError, ValueError, RecursionError):
        return True


def _attached(paths: list[Path]) -> Iterator[guard.Area]:
    for path in paths:
        try:
            yield guard.Area.attach(path)
        except errors.CheckpointError as error:  # killed while it was being made
            log.warning("No guarded state: %s", error)


def _slot(area: guard.Area) -> tuple[Capture, dict[str, object]] | None:
    try:
        return guard.read_slot(area)
    except errors.CheckpointError as error:
        log.warning("The guarded state in %s cannot be used: %s", area.path, error)
        return None


def _save(
    catalog: Catalog, capture: Capture, body: dict[str, object], reason: str, clock: clocks.Clock
) -> Rescued | None:
    entries = catalog.entries()
    newest = next((entry.record for entry in entries if entry.record.complete), None)
    if newest is not None and newest.step >= capture.step and newest.whole:
        log.info(
            "The guarded step %d is not newer than checkpoint-%d: nothing to save", capture.step, newest.step
        )
        return None
    engine = Engine(files=catalog.files)
    try:
        saver = Saver(
            catalog,
            engine,
            Budget(clock),
            clock,
            run=str(body.get("run", "")),
            incarnation=int(str(body.get("incarnation", 1))),
        )
        saver.follow(entries, entries[0] if entries else None)
        entry = saver.save(capture, Request(Kind.GUARD, reason))
    finally:
        engine.close()
    log.info("Saved step %d from shared memory into %s after %s", capture.step, entry.path.name, reason)
    return Rescued(catalog.root, capture.step, entry.path)
