"""`lastcall watch`: the progress of a run, from the files that it writes for readers
(`.lastcall/progress.json` and `events-0.jsonl`).

Nothing here talks to the training process. Whether it still runs is found out from the kernel: who holds the
directory's lock. This works for processes in other containers as well, and a reused process ID cannot deceive
it.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import struct
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lastcall import events
from lastcall.cli import ls, output
from lastcall.cli import parser as parsers
from lastcall.core.checkpoint import catalog as catalogs
from lastcall.core.process import registry

PAUSE = "pause.json"
_FLOCK = "hhqqi4x"  # struct flock of 64-bit Linux: type, whence, start, length, process
# seconds: a run that wrote this recently is alive, even if this file system's locks are invisible on other
# machines
_FRESH = 3.0
_MOMENT = len("2026-11-15 11:45:15  ")
_STALE = 60.0  # ... and if it has no locks at all, this much silence counts as the end
Event = dict[str, Any]
_EXAMPLES = """examples:
  lastcall watch runs/exp1
  lastcall watch runs/exp1 --once --json
"""
_JSON = {
    "at": "when this was found out",
    "directory": "the absolute path of the run",
    "state": "idle, starting, running, pausing, paused or ended",
    "outcome": "how the last incarnation ended, while none is active; or null",
    "pid": "the process that holds the directory, or null",
    "run": "the run's name for itself",
    "incarnation": "the number of the incarnation",
    "resumed": "the checkpoint that it resumed from, or null",
    "step": "the last step that is known",
    "total": "steps in all, or null",
    "epoch": "the epoch, or null",
    "total_epochs": "epochs in all, or null",
    "metrics": "the latest metrics",
    "eval_metrics": "the latest metrics of an evaluation",
    "steps_per_second": "its speed in this incarnation",
    "eta_seconds": "seconds left at this speed, or null",
    "progress_at": "when the run last wrote its progress",
    "saving": "the event of a save in progress, or null",
    "last_save": "the event of the last commit, or null",
    "notice": "the event of the last notice, or null",
    "not_saved": "the event of a save that failed after it, or null",
    "paused": "when and by whom it was paused, or null",
}


def add(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "watch",
        description="Follows a run until it ends.",
        epilog=_EXAMPLES,
    )
    parser.add_argument("directory", metavar="DIR", type=Path, help="the directory of a run")
    parser.add_argument("--once", action="store_true", help="print the status once and exit")
    parser.add_argument(
        "--forever", action="store_true", help="keep following when the run ends: it may be restarted"
    )
    parser.add_argument(
        "--interval",
        metavar="SECONDS",
        type=parsers.seconds,
        default=1.0,
        help="seconds between two updates (default: 1)",
    )
    output.add_json(parser, _JSON, "print a JSON document on a line for each update")
    parser.set_defaults(call=run)


def run(args: argparse.Namespace) -> int:
    watcher = Watcher(ls.single(args.directory))
    show = _json if args.json else _Block() if output.interactive(sys.stdout) else _ChangeLines()
    while True:
        now = watcher.look()
        show(now)
        if args.once or (now.over and not args.forever):
            return 0
        time.sleep(max(args.interval, 0.05))


# ---- how a run stands --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RunStatus:
    """A run at one moment."""

    root: Path
    at: float
    state: str  # "idle": nothing has run yet | "starting" | "running" | "pausing" | "paused" | "ended"
    outcome: str | None  # how the last incarnation ended: an Outcome, or "killed" if it recorded none
    pid: int | None
    held: bool | None  # whether a process holds the directory; None if the file system cannot tell
    incarnation: int | None
    resumed: str | None
    step: int | None
    progress: Event
    last_save: Event | None
    saving: Event | None
    notice: Event | None
    failure: Event | None
    paused: Event | None

    @property
    def over(self) -> bool:
        return self.state in ("ended", "idle")

    @property
    def active(self) -> bool:
        return self.state in ("starting", "running", "pausing")

    @property
    def eta(self) -> float | None:
        seconds, written = _number(self.progress.get("eta_seconds")), _number(self.progress.get("at"))
        if seconds is None or written is None or self.state != "running":
            return None
        return max(seconds - max(self.at - written, 0.0), 0.0)


class Watcher:
    """Polls a run, reading only what is new."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.private = root / catalogs.PRIVATE
        self._log = Log(self.private / "events-0.jsonl")
        self.story = _Story()

    def look(self) -> RunStatus:
        paused = _read(self.private / PAUSE)
        held, pid = owner(self.private / "lock")
        for event in self._log.news():
            self.story.tell(event)
        progress = _read(self.private / "progress.json") or {}
        story, now = self.story, time.time()
        start = story.start or {}
        if (_number(progress.get("at")) or 0.0) < (_number(start.get("at")) or 0.0):
            progress = {}  # of an earlier incarnation
        state = self._state(held, pid, paused is not None, progress, now)
        return RunStatus(
            root=self.root,
            at=now,
            state=state,
            outcome=story.outcome if state in ("ended", "paused") else None,
            pid=pid if held else None,
            held=held,
            incarnation=_whole(start.get("incarnation")),
            resumed=_text(start.get("resumed")) or None,
            step=story.step(progress),
            progress=progress,
            last_save=story.last_save,
            saving=story.saving if state in ("running", "pausing") else None,
            notice=story.notice,
            failure=story.failure,
            paused=paused,
        )

    def _state(self, held: bool | None, pid: int | None, paused: bool, progress: Event, now: float) -> str:
        begun = self.story.start is not None and self.story.stop is None
        signs = [_number(event.get("at")) for event in (progress, self.story.latest or {})]
        silence = now - max((sign for sign in signs if sign is not None), default=0.0)
        there = bool(held)
        if held is None:
            there = begun and (
                silence < _STALE or (pid is not None and registry.process_start(pid) is not None)
            )
        elif not held and begun:
            there = silence < _FRESH
        if there:
            return "starting" if not begun else "pausing" if paused else "running"
        if paused:
            return "paused"
        return "ended" if self.story.start or self.story.stop else "idle"


def owner(path: Path) -> tuple[bool | None, int | None]:
    """Whether a process holds the lock (None: this file system cannot say), and which. Taking the lock to
    find out would block a run that starts at this moment."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return False, None
    try:
        text = os.read(fd, 100).decode(errors="replace").partition(" ")[0].strip()
        named = int(text) if text.isdecimal() else None
        try:
            answer = fcntl.fcntl(fd, fcntl.F_GETLK, struct.pack(_FLOCK, fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0))
        except OSError:
            return None, named
        kind, *_, pid = struct.unpack(_FLOCK, answer)
    finally:
        os.close(fd)
    return kind != fcntl.F_UNLCK, (pid if pid > 0 else named)  # 0: it is in another PID namespace


@dataclass
class _Story:
    """A summary of the events of a run."""

    start: Event | None = None
    stop: Event | None = None
    latest: Event | None = None
    last_save: Event | None = None
    saving: Event | None = None
    notice: Event | None = None
    failure: Event | None = None
    stops: int = field(default=0)  # number of incarnations that recorded an outcome

    @property
    def outcome(self) -> str | None:
        if self.stop is not None:
            return _text(self.stop.get("outcome")) or None
        return "killed" if self.start is not None else None

    def step(self, progress: Event) -> int | None:
        """The last event takes precedence: the progress file may be a step behind it."""
        stopped = _latest_step(self.stop)
        return stopped if stopped is not None else _latest_step(progress, self.last_save)

    def tell(self, event: Event) -> None:
        kind = event.get("kind")
        self.latest = event
        if kind == "start":
            self.start, self.stop, self.notice, self.failure, self.saving = event, None, None, None, None
        elif kind == "stop":
            self.stop, self.saving = event, None
            self.stops += 1
        elif kind == "notice":
            self.notice = event
        elif kind == "save-begins":
            self.saving = event
        elif kind == "committed":
            self.last_save, self.saving, self.failure = event, None, None
        elif kind == "not-saved":
            self.failure, self.saving = event, None


class Log:
    """The events of a file that grows and is rotated, each of them once."""

    def __init__(self, path: Path) -> None:
        self._paths = (path.with_name(f"{path.name}.1"), path)
        self._read: dict[int, int] = {}  # inode -> how far it has been read

    def news(self) -> Iterator[Event]:
        for path in self._paths:
            yield from self._rest(path)

    def _rest(self, path: Path) -> Iterator[Event]:
        try:
            with open(path, "rb") as file:
                info = os.fstat(file.fileno())
                begin = self._read.get(info.st_ino, 0)
                if begin > info.st_size:  # another file that got the inode of a removed one
                    begin = 0
                file.seek(begin)
                data = file.read()
        except OSError:
            return
        whole = data[: data.rfind(b"\n") + 1]  # the last line may still be incomplete
        self._read[info.st_ino] = begin + len(whole)
        yield from events.parsed(whole.splitlines())


def _read(path: Path) -> Event | None:
    """A small JSON file: empty if it is invalid, None if it does not exist."""
    try:
        body = json.loads(path.read_bytes())
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError):
        return {}
    return body if isinstance(body, dict) else {}


def _latest_step(*events: Event | None) -> int | None:
    known = [event for event in events if event and _whole(event.get("step")) is not None]
    return _whole(max(known, key=lambda event: _number(event.get("at")) or 0.0)["step"]) if known else None


def _number(value: object) -> float | None:
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def _whole(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _text(value: object) -> str:
    return output.printable(value) if isinstance(value, str) else ""


# ---- how it is shown ---------------------------------------------------------------------------------------


def describe(status: RunStatus) -> dict[str, object]:
    """The status as JSON."""
    identity = ls.identify(status.root)
    progress = status.progress
    return {
        "at": status.at,
        "directory": os.path.abspath(status.root),
        "state": status.state,
        "outcome": status.outcome,
        "pid": status.pid,
        "run": identity.get("run"),
        "incarnation": status.incarnation,
        "resumed": status.resumed,
        "step": status.step,
        "total": progress.get("total"),
        "epoch": progress.get("epoch"),
        "total_epochs": progress.get("total_epochs"),
        "metrics": progress.get("metrics") or {},
        "eval_metrics": progress.get("eval_metrics") or {},
        "steps_per_second": progress.get("steps_per_second"),
        "eta_seconds": status.eta,
        "progress_at": progress.get("at"),
        "saving": status.saving,
        "last_save": status.last_save,
        "notice": status.notice,
        "not_saved": status.failure,
        "paused": status.paused,
    }


def _json(status: RunStatus) -> None:
    output.line(describe(status))


def _facts(status: RunStatus) -> Iterator[tuple[str, str]]:
    """The lines to show, each with its name."""
    yield "state", _state_text(status)
    total, step = _whole(status.progress.get("total")), status.step
    if step is not None:
        yield "step", f"{step} of {total} ({step / total:.1%})" if total else str(step)
    epoch, epochs = _number(status.progress.get("epoch")), _number(status.progress.get("total_epochs"))
    if epoch is not None:
        yield "epoch", f"{epoch:.4g} of {epochs:g}" if epochs else f"{epoch:g}"
    for label, field_name in (("metrics", "metrics"), ("evaluation", "eval_metrics")):
        metrics = status.progress.get(field_name)
        if isinstance(metrics, dict) and metrics:
            yield label, ", ".join(f"{_text(name)} {output.number(value)}" for name, value in metrics.items())
    speed = _number(status.progress.get("steps_per_second"))
    if speed is not None and status.state == "running":
        left = "" if status.eta is None else f", {output.duration(status.eta, precise=False)} left"
        yield "speed", f"{speed:.3g} steps/s{left}"
    if status.saving is not None:
        yield "saving", f"step {status.saving.get('step')}, {_text(status.saving.get('save'))}"
    if status.last_save is not None:
        yield "last save", _save_text(status.last_save, status.at)
    if status.notice is not None:
        yield "notice", _notice_text(status.notice, status)
    if status.failure is not None:
        yield "not saved", _text(status.failure.get("because"))


def _state_text(status: RunStatus) -> str:
    parts = []
    if status.pid is not None:
        parts.append(f"process {status.pid}")
    if status.incarnation is not None:
        parts.append(f"incarnation {status.incarnation}")
    if status.resumed and status.active:
        parts.append(f"resumed from {status.resumed}")
    if status.outcome is not None:
        parts.insert(0, status.outcome)
    if status.paused is not None and status.paused.get("by"):
        parts.append(f"asked for by {_text(status.paused['by'])}")
    return status.state + (f" ({', '.join(parts)})" if parts else "")


def _save_text(event: Event, now: float) -> str:
    at, seconds = _number(event.get("at")), _number(event.get("seconds"))
    parts = [_text(event.get("save")), "exact" if event.get("exact") else "not exact"]
    if seconds is not None:
        parts.append(f"took {output.duration(seconds)}")
    if at is not None:
        parts.append(output.age(at, now))
    return f"{_text(event.get('path'))} ({', '.join(part for part in parts if part)})"


def _notice_text(event: Event, status: RunStatus) -> str:
    at, allowed = _number(event.get("at")), _number(event.get("deadline_in"))
    parts = [f"from {_text(event.get('source'))}"]
    if at is not None:
        parts.append(output.age(at, status.at))
        if allowed is not None and status.active:
            parts.append(f"{output.duration(at + allowed - status.at, precise=False)} left")
    return f"{_text(event.get('reason'))} ({', '.join(parts)})"


class _ChangeLines:
    """Prints a line for each change, for a log or a pipe."""

    def __init__(self) -> None:
        self._before: object = None

    def __call__(self, status: RunStatus) -> None:
        key = (
            status.state,
            status.outcome,
            status.step,
            status.last_save,
            status.notice,
            status.saving,
            status.failure,
        )
        if key == self._before:
            return
        self._before = key
        facts = dict(_facts(status))
        state = facts.pop("state")
        more = "".join(f"; {name} {value}" for name, value in facts.items())
        text = f"{output.moment(status.at)}  {state}{more}"
        output.say(text, hang=" " * _MOMENT, state=status.outcome or status.state)
        sys.stdout.flush()


class _Block:
    """Prints a few lines on a terminal and updates them in place."""

    def __init__(self, width: Callable[[], int] = output.width) -> None:
        self._width = width
        self._lines = 0

    def __call__(self, status: RunStatus) -> None:
        facts = dict(_facts(status))
        lines = [str(status.root), *(f"  {name:<10} {value}" for name, value in facts.items())]
        back = f"\x1b[{self._lines}A\r\x1b[J" if self._lines else ""
        # a line that wraps would take two rows, and the cursor would not move up far enough
        room = max(self._width() - 1, 20)
        shown = [output.printable(line)[:room] for line in lines]
        for word in (status.state, status.outcome or ""):
            shown[1] = shown[1].replace(word, output.state(word), 1)
        sys.stdout.write(back + "".join(f"{line}\n" for line in shown))
        sys.stdout.flush()
        self._lines = len(lines)
