"""What a drill found: the values, the verdict on each round with its reasons, and all of it as JSON."""

from __future__ import annotations

import dataclasses
import signal
from dataclasses import dataclass, field
from pathlib import Path

from lastcall.drill.evidence import CommittedCheckpoint, RecordedStart, Traces
from lastcall.drill.options import DrillOptions

_TOLERANCE = 1.0  # seconds by which a run may overestimate its grace before it is reported
_EXEC = (
    "A shell does not forward the signal: start the training with exec, or the command with: lastcall run -- "
    "COMMAND"
)


@dataclass(frozen=True)
class Gone:
    """How an incarnation ended after the signal."""

    sent: float  # wall clock
    seconds: float  # until the end
    status: int  # the return code of the command, negative for a signal
    killed: bool = False  # by the drill, at the end of the grace
    orphans: tuple[int, ...] = ()  # active training processes that the command left behind

    @property
    def exit(self) -> int:
        """As a shell reports it."""
        return self.status if self.status >= 0 else 128 - self.status

    @property
    def died_of(self) -> str | None:
        if self.status >= 0:
            return None
        try:
            return signal.Signals(-self.status).name
        except ValueError:
            return f"signal {-self.status}"


@dataclass(frozen=True)
class Back:
    """How the next incarnation started. Seconds count from its start."""

    came: bool
    because: str = ""  # why it did not start
    spoke: float | None = None
    joined: float | None = None
    first_step: float | None = None
    finished: bool = False  # there was nothing left to train


@dataclass(frozen=True)
class DirectoryRound:
    """One directory in a round: a run has one, unless each of its ranks has its own."""

    directory: Path
    step: int  # at the notice
    reached: int  # the last step known to be completed before the end
    at_least: bool  # it died without a last report: up to a second of steps may have to be added to `reached`
    traces: Traces
    saved: CommittedCheckpoint | None  # committed after the notice
    returned: bool  # the next incarnation has started
    elsewhere: bool = False  # ... but in another directory
    resumed: CommittedCheckpoint | None = None  # None: from scratch
    start: RecordedStart | None = None

    @property
    def rescued(self) -> bool:
        return self.saved is not None and self.saved.kind == "rescue"

    @property
    def lost(self) -> int | None:
        """Completed steps that have to be repeated. None until the next incarnation has started."""
        if not self.returned:
            return None
        return max(0, self.reached - (self.resumed.step if self.resumed else 0))


def part(
    directory: Path,
    step: int,
    last: int,
    sent: float,
    traces: Traces,
    newest: tuple[CommittedCheckpoint, float] | None,
) -> DirectoryRound:
    """What is known about a directory before the run restarts. `step` is what the process reported before the
    notice, `last` its last report; `newest` the newest checkpoint and when it was made."""
    saved = newest[0] if newest is not None and newest[1] >= sent else None
    step = step if traces.notice_step is None else traces.notice_step
    # what was done after the copy was taken (half a pass that a rescue interrupts) does not count
    if saved is not None:
        return DirectoryRound(directory, step, max(step, saved.step), False, traces, saved, False)
    reached = max(step, last, traces.save_step or 0, traces.stop_step or 0)
    return DirectoryRound(directory, step, reached, traces.stop_step is None, traces, None, False)


@dataclass(frozen=True)
class DrillRound:
    number: int
    waited: float  # seconds from the first step of the incarnation to the signal
    gone: Gone
    back: Back
    restarted: float  # seconds from the signal to the next start
    parts: tuple[DirectoryRound, ...]
    reasons: tuple[str, ...] = ()  # why it does not count as a success
    notes: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        return not self.reasons

    @property
    def step(self) -> int:
        return min(part.step for part in self.parts)

    @property
    def lost(self) -> int | None:
        """The steps lost in the directory that lost most."""
        known = [part.lost for part in self.parts if part.lost is not None]
        return max(known) if len(known) == len(self.parts) else None

    @property
    def at_least(self) -> bool:
        return any(part.at_least and part.lost for part in self.parts)

    @property
    def seconds(self) -> dict[str, float | None]:
        """The phases. Until `gone` they count from the signal; then from the restart."""
        marks = {
            name: [getattr(part.traces, name) for part in self.parts]
            for name in ("noticed", "save_begins", "committed")
        }
        times = {name: [at - self.gone.sent for at in all_ if at is not None] for name, all_ in marks.items()}
        resumed = [
            part.start.at - self.gone.sent - self.restarted for part in self.parts if part.start is not None
        ]
        restored = [
            part.start.seconds
            for part in self.parts
            if part.start is not None and part.start.seconds is not None
        ]
        begins = min(times["save_begins"], default=None)
        stopped = self.gone.seconds if begins is None else begins
        stood = None if self.back.first_step is None else self.restarted + self.back.first_step - stopped
        phases = {
            "waited": self.waited,
            "noticed": min(times["noticed"], default=None),
            "save_begins": begins,
            "committed": max(times["committed"], default=None),
            "gone": self.gone.seconds,
            "first_output": self.back.spoke,
            "resumed": max(resumed, default=self.back.joined),
            "restored_in": max(restored, default=None),
            "first_step": self.back.first_step,
            "standstill": stood,
        }
        return {name: None if value is None else round(max(value, 0.0), 3) for name, value in phases.items()}


def judged(round: DrillRound, options: DrillOptions) -> DrillRound:
    """The round with its reasons and notes."""
    reasons = []
    if not round.back.came:
        reasons.append(f"it did not resume: {round.back.because}")
    for item in round.parts if round.back.came else ():
        where = f" in {item.directory}" if len(round.parts) > 1 else ""
        if item.elsewhere:
            reasons.append(
                f"{item.lost} steps, which is all, lost{where}: it restarted in another directory, and so "
                "from scratch. "
                f"Pass protect() the same directory at every start (no date, no process ID in its name)"
            )
        elif item.lost:
            count = (
                f"{'at least ' if item.at_least else ''}{item.lost} {'step' if item.lost == 1 else 'steps'}"
            )
            reasons.append(f"{count} lost{where}: {_why_lost(item, round.gone, options)}")
        elif item.resumed is not None and item.resumed.exact is False:
            what = "not exact" if item.resumed.complete is not False else "partial"
            reasons.append(
                f"{item.resumed.name}{where}, which it resumed from, is {what}: {item.resumed.because}"
            )
    return dataclasses.replace(round, reasons=tuple(reasons), notes=tuple(_notes(round, options)))


def _why_lost(item: DirectoryRound, gone: Gone, options: DrillOptions) -> str:
    if item.saved is not None:
        origin = item.resumed.name if item.resumed else "scratch"
        return (
            f"{item.saved.name} was saved, but it resumed from {origin}. Check with: lastcall verify "
            f"{item.directory}"
        )
    if item.traces.committed is not None:
        return (
            f"a checkpoint was committed, but is no longer in {item.directory}. Check what deletes files "
            "there"
        )
    if gone.orphans:
        pids = ", ".join(map(str, gone.orphans))
        return (
            f"the command ended, and its container with it, while the training (process {pids}) got no "
            f"notice. {_EXEC}"
        )
    if gone.killed:
        if item.traces.noticed is None:
            return (
                f"the training never got the notice, and was killed when the grace of {options.grace:g} s "
                f"ended. {_EXEC}"
            )
        return f"no checkpoint was committed in the grace of {options.grace:g} s, and it was killed"
    if item.traces.not_saved:
        return f"it could not save: {item.traces.not_saved}"
    if options.signum == signal.SIGKILL:
        return (
            "SIGKILL leaves no time to save. Periodic checkpoints and lastcall run --guard limit the damage"
        )
    if item.traces.noticed is None:
        return (
            f"{options.signal_name} is no notice to this run, which died of it. Set "
            f"LASTCALL_SIGNALS={options.signal_name}"
        )
    return f"it ended with exit code {gone.exit} before a checkpoint was committed"


def _notes(round: DrillRound, options: DrillOptions) -> list[str]:
    notes = []
    believed = max(
        (item.traces.believed for item in round.parts if item.traces.believed is not None), default=None
    )
    if believed is not None and believed > options.grace + _TOLERANCE:
        notes.append(
            f"the run assumed a grace of {believed:.0f} s, but it is {options.grace:g} s. Set "
            f"LASTCALL_GRACE_SECONDS={options.grace:g}"
        )
    if round.gone.status == 0:
        notes.append(
            "exit code 0 means that training has finished: many platforms would not have restarted it"
        )
    return notes


@dataclass(frozen=True)
class RunEnd:
    """How the run ended after the last round."""

    # "finished" | "stopped": by the drill | "killed": by the drill, when the grace ended | "left": it exited
    # on its own
    how: str
    exit: int
    saved: bool  # whether it left everything in a checkpoint


@dataclass
class DrillReport:
    options: DrillOptions
    directories: list[Path] = field(default_factory=list)
    rounds: list[DrillRound] = field(default_factory=list)
    end: RunEnd | None = None
    problem: str | None = None  # why the drill could not complete
    interrupted: int | None = None  # the signal that ended the drill
    log: Path | None = None  # where the command's output was kept

    @property
    def ok(self) -> bool:
        done = len(self.rounds) == self.options.times and all(round.ok for round in self.rounds)
        return done and self.problem is None and self.interrupted is None

    def to_json(self) -> dict[str, object]:
        """The document of `--json`; the fields are explained in docs/drill.md."""
        options = self.options
        return {
            "ok": self.ok,
            "problem": self.problem,
            "command": list(options.command),
            "signal": options.signal_name,
            "to": options.to,
            "grace": options.grace,
            "times": options.times,
            "directories": [str(path) for path in self.directories],
            "lost": sum(round.lost or 0 for round in self.rounds),
            "rounds": [_round_json(round) for round in self.rounds],
            "end": None if self.end is None else dataclasses.asdict(self.end),
            "log": None if self.log is None else str(self.log),
        }


def _round_json(round: DrillRound) -> dict[str, object]:
    return {
        "round": round.number,
        "ok": round.ok,
        "reasons": list(round.reasons),
        "notes": list(round.notes),
        "step": round.step,
        "lost": round.lost,
        "at_least": round.at_least,
        "came_back": round.back.came,
        "exact": _exact(round),
        "rescue": any(item.rescued for item in round.parts),
        "killed": round.gone.killed,
        "exit": round.gone.exit,
        "died_of": round.gone.died_of,
        "seconds": round.seconds,
        "directories": [_part_json(item) for item in round.parts],
    }


def _exact(round: DrillRound) -> bool | None:
    """Whether it resumed from exact checkpoints; None if it resumed from none, or if that is unknown."""
    known = [item.resumed.exact if item.resumed is not None else None for item in round.parts]
    return False if False in known else None if None in known else True


def _part_json(item: DirectoryRound) -> dict[str, object]:
    return {
        "directory": str(item.directory),
        "step": item.step,
        "reached": item.reached,
        "lost": item.lost,
        "at_least": item.at_least,
        "outcome": item.traces.outcome,
        "rescue": item.rescued,
        "saved": None if item.saved is None else dataclasses.asdict(item.saved),
        "resumed": None if item.resumed is None else dataclasses.asdict(item.resumed),
    }
