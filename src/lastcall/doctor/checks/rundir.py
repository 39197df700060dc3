"""The state of a run's directory: which process holds it, what is damaged, and how its last incarnation
ended."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from lastcall import errors
from lastcall.core.checkpoint.record import Entry, Record
from lastcall.core.engine import writer
from lastcall.core.restore import restore
from lastcall.doctor import finding
from lastcall.doctor.checks import configuration
from lastcall.doctor.finding import Finding
from lastcall.types import Kind

_READ_UP_TO = 4 * 10**9  # the largest checkpoint to read here, in bytes; lastcall verify reads any size
_SKEW = 60.0  # seconds
_THREADS = 4


@dataclass(frozen=True)
class Checkpoint:
    path: Path
    status: str  # as in `lastcall ls`: valid, damaged, incomplete, set aside, foreign
    problem: str
    record: Record | None


@dataclass(frozen=True)
class Directory:
    """What is known about a run's directory from what the other commands read."""

    root: Path
    checkpoints: tuple[Checkpoint, ...] = ()  # the newest first
    active: bool = False  # a process is at work in it
    pid: int | None = None
    paused: bool = False
    outcome: str | None = None  # how the last incarnation ended; "killed" if it recorded none
    because: str = ""
    periodic: bool = False  # the last incarnation was configured to save periodically
    spare: int = 0  # bytes of spare space for the next checkpoint

    @property
    def records(self) -> tuple[Record, ...]:
        """Of the valid ones, newest first."""
        return tuple(
            item.record for item in self.checkpoints if item.status == "valid" and item.record is not None
        )


def check(known: Directory, starting: bool) -> list[Finding]:
    findings = [*_use(known, starting), *_damage(known), *_past(known), *_clock(known)]
    if all(item.level == "ok" for item in findings):
        newest = known.records[0] if known.records else None
        what = (
            "no checkpoint yet: a run would start from scratch"
            if newest is None
            else f"a run would resume from step {newest.step}"
        )
        findings.append(
            finding.ok("directory", f"{known.root}: {what}", step=newest.step if newest else None)
        )
    return findings


def _use(known: Directory, starting: bool) -> Iterator[Finding]:
    who = f"process {known.pid}" if known.pid else "a process on another machine"
    if known.active and starting:
        yield finding.warning(
            "in-use",
            f"{known.root} is in use by {who}: a second run in it would be refused",
            f"lastcall pause --wait {known.root}; or use another directory for this run",
            pid=known.pid,
        )
    elif known.active:
        yield finding.ok("in-use", f"a run is active in {known.root} ({who})", pid=known.pid)
    if known.paused:
        yield finding.warning(
            "paused", f"{known.root} is paused: a run that starts waits", f"lastcall resume {known.root}"
        )


def _damage(known: Directory) -> Iterator[Finding]:
    ours = [item for item in known.checkpoints if item.status in ("valid", "damaged")]
    newest_valid = next((item for item in ours if item.status == "valid"), None)
    problem = _unreadable(newest_valid)
    # A folder without a record has no known order: it may be the newest, and is treated as such.
    lost = [item for item in ours if item.status == "damaged" and _newer(item, newest_valid)]
    if problem and newest_valid is not None:
        lost.append(Checkpoint(newest_valid.path, "damaged", problem, newest_valid.record))
        newest_valid = next(
            (item for item in ours if item.status == "valid" and item.path != newest_valid.path), None
        )
    if lost:
        names = "; ".join(f"{item.path.name}: {item.problem}" for item in lost)
        instead = (
            f"a run would resume from {newest_valid.path.name}"
            if newest_valid
            else "a run would start from scratch: there is no valid one"
        )
        yield finding.risk(
            "checkpoints",
            f"the newest checkpoint is damaged ({names}). {instead}",
            f"lastcall verify {known.root}; if you have a copy of the files, restore them before the next "
            "start "
            "sets the checkpoint aside",
            damaged=[item.path.name for item in lost],
        )
    older = [item for item in ours if item.status == "damaged" and item not in lost]
    if older:
        names = ", ".join(item.path.name for item in older)
        yield finding.warning(
            "checkpoints", f"older checkpoints are damaged: {names}", f"lastcall verify {known.root}"
        )
    incomplete = [item for item in known.checkpoints if item.status == "incomplete"]
    if incomplete and not known.active:
        names = ", ".join(item.path.name for item in incomplete)
        yield finding.warning(
            "incomplete",
            f"{names}: never committed, because its writer was killed during the save. The next start "
            "removes it",
            "give the save more time: export LASTCALL_GRACE_SECONDS=120, and as much from the platform",
            names=[i.path.name for i in incomplete],
        )


def _newer(item: Checkpoint, than: Checkpoint | None) -> bool:
    if than is None or than.record is None or item.record is None:
        return True
    return item.record.recency > than.record.recency


def _unreadable(newest: Checkpoint | None) -> str:
    """Reads the newest checkpoint as a resume would. Empty if every digest matches, or if it is too large to
    read here."""
    if newest is None or newest.record is None or newest.record.size > _READ_UP_TO:
        return ""
    engine = writer.Engine(_THREADS)
    try:
        restore.verify(Entry(newest.path, newest.record), engine)
    except errors.CheckpointError as error:
        return str(error) if newest.path.exists() else ""  # a run may have pruned it in the meantime
    except OSError as error:
        return f"it cannot be read: {error.strerror}" if newest.path.exists() else ""
    finally:
        engine.close()
    return ""


def _past(known: Directory) -> Iterator[Finding]:
    if known.outcome == "not saved":
        why = known.because or "the reason was not recorded"
        yield finding.risk(
            "last-end",
            f"the last incarnation got a notice and could not save: {why}",
            "lastcall drill -- COMMAND shows whether it can now; the log is "
            f"{known.root}/.lastcall/events-0.jsonl",
            because=known.because,
        )
    elif known.outcome == "killed" and not known.active:
        guarded = bool(known.records) and known.records[0].kind is Kind.GUARD
        if not guarded:
            yield finding.warning(
                "last-end",
                "the last incarnation was killed without a notice (SIGKILL, out of memory, or machine "
                "failure): the "
                "steps since the last checkpoint are lost",
                "lastcall run --guard -- COMMAND",
            )
    elif known.outcome == "failed":
        yield finding.ok("last-end", "the last incarnation ended with an exception in the program")


def _clock(known: Directory) -> Iterator[Finding]:
    newest = known.records[0] if known.records else None
    ahead = 0.0 if newest is None else newest.created - time.time()
    if ahead > _SKEW:
        yield finding.warning(
            "clock",
            f"the newest checkpoint was made {finding.seconds(ahead)} in the future: the clocks of two "
            "machines differ",
            "timedatectl set-ntp true",
            ahead=ahead,
        )


def check_unannounced(config: configuration.Configuration, known: Directory | None, guard: bool) -> Finding:
    """Protection against ends without a notice: SIGKILL, out of memory, a power cut."""
    done = known is not None and (
        known.periodic or any(record.kind is Kind.PERIODIC for record in known.records)
    )
    periodic = config.periodic.save_strategy != "no" or done
    if guard and periodic:
        return finding.ok(
            "unannounced", "periodic saves and the guardian limit the loss from a kill without a notice"
        )
    if periodic:
        return finding.ok("unannounced", "periodic saves limit the loss from a kill without a notice")
    if guard:
        return finding.ok(
            "unannounced",
            "the guardian preserves the last step across SIGKILL and out of memory (not a power cut)",
        )
    return finding.warning(
        "unannounced",
        "neither periodic saves nor the guardian are enabled, judging by the environment and the directory: "
        "a kill without a notice "
        "(SIGKILL, out of memory, power) loses everything since the start",
        "export LASTCALL_SAVE_STEPS=500; or: lastcall run --guard -- COMMAND",
    )
