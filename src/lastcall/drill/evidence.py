"""What a directory shows about a notice and a start: the event log and the commit records, read from outside.

A killed process loses up to a second of its events, but no commit record: what was saved is read from the
records; the events only tell when.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from lastcall import errors, events
from lastcall.core.checkpoint import catalog as catalogs
from lastcall.core.checkpoint import record as records
from lastcall.core.checkpoint.record import Record
from lastcall.storage import files as storage
from lastcall.types import Kind

_ANSWERS = (Kind.JIT.value, Kind.RESCUE.value)


@dataclass(frozen=True)
class CommittedCheckpoint:
    """A committed checkpoint, as far as a report needs it."""

    name: str
    step: int
    kind: str | None = None  # this and the rest: None if the record is no longer readable
    exact: bool | None = None
    because: str = ""  # when not exact: why
    complete: bool | None = None
    bytes: int | None = None


@dataclass(frozen=True)
class Traces:
    """What the event log says about a notice. Times are wall clock."""

    noticed: float | None = None
    believed: float | None = None  # the grace that the run assumed, in seconds
    notice_step: int | None = None
    save_begins: float | None = None
    save_step: int | None = None
    committed: float | None = None
    not_saved: str = ""
    outcome: str | None = None
    stop_step: int | None = None


@dataclass(frozen=True)
class RecordedStart:
    """What the event log says about a start."""

    at: float
    name: str | None  # the checkpoint that it resumed from
    seconds: float | None  # seconds to find and read it


def traces(root: Path, since: float) -> Traces:
    """What happened after the notice at `since`."""
    found: dict[str, dict[str, object]] = {}
    for event in _events(root, since):
        kind = str(event.get("kind"))
        if kind in ("save-begins", "committed", "not-saved") and event.get("save") not in _ANSWERS:
            continue  # a periodic save that was under way
        if kind in ("notice", "save-begins"):
            found.setdefault(kind, event)
        else:
            found[kind] = event
    notice, begins, stop = (found.get(kind, {}) for kind in ("notice", "save-begins", "stop"))
    outcome = stop.get("outcome")
    return Traces(
        noticed=_number(notice.get("at")),
        believed=_number(notice.get("deadline_in")),
        notice_step=_count(notice.get("step")),
        save_begins=_number(begins.get("at")),
        save_step=_count(begins.get("step")),
        committed=_number(found.get("committed", {}).get("at")),
        not_saved=str(found.get("not-saved", {}).get("because", "")),
        outcome=outcome if isinstance(outcome, str) else None,
        stop_step=_count(stop.get("step")),
    )


def start(root: Path, since: float) -> RecordedStart | None:
    """The last start since then; None if none has been recorded yet."""
    found = None
    for event in _events(root, since):
        at = _number(event.get("at"))
        if event.get("kind") == "start" and at is not None:
            name = event.get("resumed")
            found = RecordedStart(at, name if isinstance(name, str) else None, _number(event.get("seconds")))
    return found


def newest(root: Path) -> tuple[CommittedCheckpoint, Record] | None:
    """The checkpoint that was committed last."""
    entries = catalogs.Catalog(root, storage.Files()).entries()
    return (described(entries[0].path.name, entries[0].record), entries[0].record) if entries else None


def named(root: Path, name: str, step: int) -> CommittedCheckpoint:
    """A checkpoint by its name; only name and step if a later save has already replaced it."""
    try:
        return described(name, records.read(root / Path(name).name))
    except errors.CheckpointError:
        return CommittedCheckpoint(name, step)


def described(name: str, record: Record) -> CommittedCheckpoint:
    return CommittedCheckpoint(
        name, record.step, record.kind.value, record.exact, record.because, record.complete, record.size
    )


def _events(root: Path, since: float) -> list[dict[str, object]]:
    """Of all ranks, in order of time. An unreadable log is skipped."""
    found: list[tuple[float, dict[str, object]]] = []
    for path in (root / catalogs.PRIVATE).glob("events-*.jsonl"):
        try:
            found += [
                (at, event)
                for event in events.read(path)
                if (at := _number(event.get("at"))) is not None and at >= since
            ]
        except OSError:
            continue
    return [event for _, event in sorted(found, key=lambda pair: pair[0])]


def _number(value: object) -> float | None:
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def _count(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None
