"""A run that is interrupted again and again and started again and again, until it exits 0."""

from __future__ import annotations

import json
import random
import signal
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from helpers.processes.forkserver import Child, Nursery, until

SAVED = 75
MOST_LIVES = 100


@dataclass
class Chain:
    """What happened: the exit code of each incarnation, and the steps that the checkpoints were of."""

    codes: list[int] = field(default_factory=list)
    logs: list[str] = field(default_factory=list)

    @property
    def interruptions(self) -> int:
        return len(self.codes) - 1


@dataclass(frozen=True)
class Blow:
    """When the process says that it is at `step` (or at once with None), wait `delay` seconds, then send the
    signal."""

    step: int | None
    delay: float
    group: bool = False
    signum: int = signal.SIGTERM


def blows(seed: int, count: int, steps: int) -> list[Blow]:
    """Random moments all over a run of so many steps, the first of them before the first step."""
    dice = random.Random(seed)
    points = sorted(dice.sample(range(steps), count - 1))
    first = Blow(None, dice.uniform(0.0, 0.15), dice.random() < 0.5)
    return [first, *(Blow(point, dice.uniform(0.0, 0.01), dice.random() < 0.5) for point in points)]


class Said(Protocol):
    def lines(self) -> list[str]: ...


def position(child: Said) -> int:
    """The last step that it says to be at; -1 before the first."""
    said = [line for line in child.lines() if line.startswith("at ")]
    return int(said[-1].split()[1]) if said else -1


def strike(child: Child, blow: Blow) -> None:
    if blow.step is not None:
        step = blow.step
        until(lambda: position(child) >= step or child.poll() is not None, f"step {step}\n{child.log()}")
    time.sleep(blow.delay)
    (child.send_group if blow.group else child.send)(blow.signum)


def run(
    nursery: Nursery, folder: Path, script: Path, plan: list[Blow], *arguments: object, **env: str
) -> Chain:
    """Interrupt a script as planned, once an incarnation, and start it again until it exits 0."""
    chain = Chain()
    for life in range(MOST_LIVES):
        child = nursery.start(folder, script, *arguments, **env)
        if life < len(plan):
            strike(child, plan[life])
        chain.codes.append(child.wait())
        chain.logs.append(child.log())
        if child.code == 0:
            return chain
        if child.code not in (SAVED, -signal.SIGTERM, -signal.SIGKILL):
            raise AssertionError(
                f"incarnation {life} ended with {child.code}:\n{child.log()}\n{child.lines()[-3:]}"
            )
    raise AssertionError(f"not finished after {MOST_LIVES} incarnations: {chain.codes}\n{chain.logs[-1]}")


def records(directory: Path) -> list[dict[str, object]]:
    """The commit records in a directory, oldest first."""
    found = [json.loads(path.read_text()) for path in directory.glob("checkpoint-*/lastcall.json")]
    return sorted(found, key=lambda record: record["sequence"])
