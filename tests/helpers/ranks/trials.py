"""Trials of runs of many ranks: interrupted at random, started again until they finish, and compared with a
run in peace.

A check that finds nothing must have had something to find: a Life knows which signals arrived inside the
protected block of a rank, and a Tally of many trials how often each outcome was there.
"""

from __future__ import annotations

import dataclasses
import json
import random
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from helpers.ranks.jobs import LIMIT, Job, Launcher, Sent
from helpers.ranks.plan import Event, Plan
from lastcall import testing

SAVED = 75
MOST_LIVES = 8
Journals = Mapping[int, Sequence[Event]]


# ---- the run in peace --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Reference:
    """What a run that nobody interrupts does, without lastcall."""

    final: Mapping[int, Mapping[str, str]]  # rank: digests at the end
    data: Mapping[tuple[int, int], str]  # rank, step: the samples
    # rank, completed steps: digests, where the plan asked for them
    states: Mapping[tuple[int, int], Mapping[str, str]]


class References:
    """Each kind of run is made once."""

    def __init__(self, launcher: Launcher) -> None:
        self._launcher = launcher
        self._known: dict[tuple[str, int, str], Reference] = {}

    def of(self, script: str, ranks: int, plan: Plan, how: str = "alone") -> Reference:
        bare = dataclasses.replace(
            plan,
            seconds=0.0,
            slow={},
            late={},
            tail={},
            pauses={},
            pausing=None,
            fault=None,
            disk_seconds=0.0,
        )
        key = (script, ranks, bare.to_json())
        if key not in self._known:
            unused = self._launcher.folder / "unused"
            job = self._launcher.launch(script, ranks, how, unused, bare, LASTCALL_ENABLED="0")
            codes = job.wait()
            assert not any(codes.values()), f"the reference run ended with {codes}\n{job.log()}"
            assert not unused.exists(), "lastcall was off, and has written"
            self._known[key] = reference(job.journals())
        return self._known[key]


def reference(journals: Journals) -> Reference:
    events = [(rank, event) for rank, lines in journals.items() for event in lines]
    return Reference(
        {rank: event.state for rank, event in events if event.what == "done"},
        {(rank, event.step): event.data for rank, event in events if event.what == "at"},
        {(rank, event.step): event.state for rank, event in events if event.what == "did"},
    )


# ---- interruptions -----------------------------------------------------------------------------------------


class Blow(Protocol):
    """What a test does to a life."""

    def land(self, job: Job) -> list[Sent]: ...


@dataclass(frozen=True)
class Strike:
    """When `rank` says `what` (of that step or a later one), wait `delay` seconds, then send each hit its
    signal, and wait after it."""

    rank: int
    what: str
    step: int = -1
    delay: float = 0.0
    hits: tuple[tuple[int, float], ...] = ((0, 0.0),)
    signum: int = signal.SIGTERM

    def land(self, job: Job) -> list[Sent]:
        if not job.until(self.rank, self.what, self.step):
            return []
        time.sleep(self.delay)
        sent = []
        for rank, pause in self.hits:
            sent.append(job.send(rank, self.signum))
            if pause:
                time.sleep(pause)
        return sent


def random_strike(dice: random.Random, ranks: int, plan: Plan, early: bool) -> Strike:
    """Any subset of ranks, any moment, any spacing, some of them twice. `early`: also before protect()."""
    targets = dice.sample(range(ranks), dice.randint(1, ranks))
    targets += [rank for rank in targets if dice.random() < 0.3]  # duplicates
    spacing = dice.choice([0.0, 0.0, 0.005, 0.1])
    hits = tuple((rank, dice.uniform(0.0, spacing)) for rank in targets)
    moments = (
        ["at"] * 7
        + ["protected", "last", "end"]
        + ["evaluating"] * (2 if plan.pauses else 0)
        + ["joined"] * early
    )
    what, watched = dice.choice(moments), dice.randrange(ranks)
    if what == "last":
        return Strike(watched, "at", plan.steps - 1, dice.uniform(0.0, 0.05), hits)
    if what == "end":
        return Strike(watched, "left", -1, 0.0, hits)
    return Strike(
        watched, what, dice.randrange(plan.steps) if what == "at" else -1, dice.uniform(0.0, 0.03), hits
    )


# ---- lives -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Life:
    """What happened in one life."""

    codes: Mapping[int, int]
    sent: Sequence[Sent]
    journals: Journals
    # the records of the checkpoints that this life has added, in order
    committed: Sequence[Mapping[str, Any]]
    log: str = field(repr=False)

    @property
    def outcome(self) -> str:
        codes = set(self.codes.values())
        if codes == {0}:
            return "finished"
        return "saved" if codes <= {0, SAVED} else "lost"

    def did(self, rank: int) -> int:
        """The steps that a rank said to have completed, counted from the beginning of the run."""
        return max(
            (event.step for event in self.journals[rank] if event.what in ("did", "protected")), default=0
        )

    def began(self, rank: int) -> int | None:
        """Where it went on from; None if it never came so far."""
        return next((event.step for event in self.journals[rank] if event.what == "protected"), None)

    def inside(self, sent: Sent, steps: int) -> bool:
        """Whether the signal fell into the training loop of a rank, and all ranks were in theirs: then it
        must not be lost."""
        before = {
            rank: [event for event in lines if event.at <= sent.at] for rank, lines in self.journals.items()
        }
        last = before[sent.rank][-1] if before[sent.rank] else None
        looping = last is not None and (
            last.what in ("protected", "at", "evaluating") or (last.what == "did" and last.step < steps)
        )
        return (
            sent.arrived
            and looping
            and all(any(event.what == "protected" for event in lines) for lines in before.values())
        )


def records(directory: Path) -> list[dict[str, Any]]:
    """The commit records in a directory, oldest first."""
    found = [json.loads(path.read_text()) for path in directory.glob("checkpoint-*/lastcall.json")]
    return sorted(found, key=lambda record: record["sequence"])


def live(
    job: Job, directory: Path, strikes: Sequence[Blow] = (), limit: float = LIMIT, *, fresh: bool = False
) -> Life:
    """A life from its start to its end, interrupted as told. `fresh`: it is the first one, and may have
    committed already."""
    known = set() if fresh else {record["sequence"] for record in records(directory)}
    try:
        sent = [one for strike in strikes for one in strike.land(job)]
        codes = job.wait(limit)
        new = [record for record in records(directory) if record["sequence"] not in known]
        return Life(codes, sent, job.journals(), new, job.log())
    finally:
        job.end()


def incarnations(journals: Journals) -> Iterator[Life]:
    """The lives below one torchrun, which starts its workers again and again: as many as it counted."""
    count = 1 + max(event.restart for lines in journals.values() for event in lines if event.what == "start")
    for number in range(count):
        yield Life({}, (), {rank: _of_restart(lines, number) for rank, lines in journals.items()}, (), "")


def _of_restart(lines: Sequence[Event], number: int) -> list[Event]:
    found, current = [], -1
    for event in lines:
        current = event.restart if event.what == "start" else current
        if current == number:
            found.append(event)
    return found


# ---- trials ------------------------------------------------------------------------------------------------


@dataclass
class Trial:
    """A run, from its first life to the one in which it finished."""

    lives: list[Life] = field(default_factory=list)

    def story(self) -> str:
        told = [
            f"{life.outcome} {dict(life.codes)}, signals to {[sent.rank for sent in life.sent]}"
            f", steps {[life.did(rank) for rank in life.journals]}"
            f", committed {[(record['kind'], record['step']) for record in life.committed]}"
            for life in self.lives
        ]
        return "\n".join([*told, *(life.log for life in self.lives)])


def until_finished(
    start: Callable[[], Job], directory: Path, plan: Sequence[Sequence[Blow]], limit: float = LIMIT
) -> Trial:
    """Life after life, the first ones interrupted as planned, until all ranks end with 0."""
    trial = Trial()
    for number in range(MOST_LIVES):
        trial.lives.append(live(start(), directory, plan[number] if number < len(plan) else (), limit))
        if trial.lives[-1].committed:
            testing.assert_resumable(directory)
        check_sequence(trial)
        if trial.lives[-1].outcome == "finished":
            return trial
        if number > len(plan) and trial.lives[-1].outcome == "lost":
            raise AssertionError(f"life {number} was lost, and nobody had touched it\n{trial.story()}")
    raise AssertionError(f"not finished after {MOST_LIVES} lives\n{trial.story()}")


def check(trial: Trial, expected: Reference, most_lost: int = 0) -> None:
    """Nothing is torn, lost or repeated, in any life, and the end is that of the run in peace."""
    for life in trial.lives:
        check_data(life, expected)
        assert len(life.committed) <= 1, f"more than one commit in a life\n{trial.story()}"
        assert all(record["world"] == len(life.journals) for record in life.committed), trial.story()
    for life, following in zip(trial.lives, trial.lives[1:], strict=False):
        try:
            check_steps(life, following, most_lost if life.committed else None)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{trial.story()}") from None
    check_end(trial.lives[-1], expected, trial.story)


def check_sequence(trial: Trial) -> None:
    """No life has replaced what it had committed: a rank that did not know of it would have taken the
    checkpoint from the others."""
    newest = 0
    for life in trial.lives:
        numbers = [record["sequence"] for record in life.committed]
        assert numbers == list(range(newest + 1, newest + 1 + len(numbers))), (
            f"commit {newest + 1} was replaced\n{trial.story()}"
        )
        newest += len(numbers)


def check_data(life: Life, expected: Reference) -> None:
    """Every step of every rank had the samples that it has in peace."""
    for rank, lines in life.journals.items():
        for event in lines:
            if event.what == "at":
                assert event.data == expected.data[rank, event.step], (
                    f"rank {rank} had other samples in step {event.step}\n{life.log}"
                )


def check_steps(life: Life, following: Life, most_lost: int | None) -> None:
    """All ranks went on from one step, and no rank had to do again more than `most_lost` of its own (None: it
    may have been lost)."""
    began = {rank: following.began(rank) for rank in following.journals}
    steps = {step for step in began.values() if step is not None}
    assert len(steps) <= 1, f"the ranks went on from different steps: {began}"
    if most_lost is not None and steps:
        lost = max(life.did(rank) for rank in life.journals) - min(steps)
        assert lost <= most_lost, (
            f"{lost} steps were lost: {[life.did(rank) for rank in life.journals]}, went on from {steps}"
        )


def check_end(life: Life, expected: Reference, story: Callable[[], str]) -> None:
    for rank, lines in life.journals.items():
        done = [event.state for event in lines if event.what == "done"]
        assert done[-1:] == [expected.final[rank]], (
            f"rank {rank} ended otherwise: {done} and not {expected.final[rank]}\n{story()}"
        )


def check_heard(trial: Trial, steps: int) -> None:
    """A notice inside the loop of a rank, with at least half of the steps to come, leads to a save; none
    inside is ever lost."""
    for life in trial.lives:
        inside = [sent for sent in life.sent if life.inside(sent, steps)]
        if inside and len(inside) == len(life.sent):
            assert life.outcome in ("saved", "finished"), f"a notice was lost\n{trial.story()}"
        if any(_step_at(life, sent) <= steps // 2 for sent in inside):
            assert life.outcome == "saved", f"a notice in time led to no save\n{trial.story()}"


def _step_at(life: Life, sent: Sent) -> int:
    return max(
        (event.step for lines in life.journals.values() for event in lines if event.at <= sent.at), default=0
    )


@dataclass
class Tally:
    """How the lives that were hit ended."""

    outcomes: Counter[str] = field(default_factory=Counter)

    def add(self, trial: Trial, steps: int) -> None:
        for life in trial.lives:
            if life.sent:
                where = "inside" if any(life.inside(sent, steps) for sent in life.sent) else "outside"
                self.outcomes[f"{life.outcome}, {where}"] += 1
