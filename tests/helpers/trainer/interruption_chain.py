"""A training with transformers.Trainer that is interrupted again and again and started again until it exits
0: one rank or several, forked from a parent that has imported transformers. What it logs on stdout, a line a
step, says where it is.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from helpers.processes.forkserver import Child, Nursery, until
from helpers.ranks.jobs import SCRIPTS as RANKS_SCRIPTS

SCRIPTS = Path(__file__).resolve().parents[2] / "e2e" / "transformers" / "scripts"
FORKED = SCRIPTS / "forked.py"
QUICK: dict[str, Any] = {"LASTCALL_ENABLED": "1", "LASTCALL_KILL_WAIT_SECONDS": "0"}
PLAIN: dict[str, Any] = {"LASTCALL_ENABLED": "0"}
SAVED, KILLED = 75, -int(signal.SIGTERM)
MOST_LIVES, PATIENCE, AGENT_SECONDS = 40, 60.0, 0.1
TIMES = ("_runtime", "_per_second")  # what differs from run to run by nature

Batches = dict[tuple[int, int], tuple[str, int]]  # step and number -> loss and data


@dataclass(frozen=True)
class Blow:
    """When this life has logged so many lines, wait `delay` seconds, then send SIGTERM to these ranks,
    `apart` seconds between them."""

    lines: int
    delay: float
    ranks: tuple[int, ...] = (0,)
    apart: float = 0.0
    group: bool = False


@dataclass
class Chain:
    """What happened: the exit codes of the ranks of each life, and what they said on stderr."""

    codes: list[tuple[int, ...]] = field(default_factory=list)
    logs: list[str] = field(default_factory=list)

    @property
    def saved(self) -> int:
        """Lives that ended with a saved notice."""
        return sum(set(codes) == {SAVED} for codes in self.codes)

    def __str__(self) -> str:
        parts = [
            f"--- life {number}: {codes}\n{tail(log)}"
            for number, (codes, log) in enumerate(zip(self.codes, self.logs, strict=True))
        ]
        return "\n".join(parts)


class Life:
    """The ranks of one incarnation. Several have what the agent of torchrun gives: a store outside, SIGTERM
    to all when one fails."""

    def __init__(
        self,
        warm: Nursery,
        folder: Path,
        command: Sequence[object],
        ranks: int,
        env: dict[str, str],
        each: Sequence[dict[str, str]] = (),
    ) -> None:
        """`each`: what every rank has for itself."""
        self._keeper: Child | None = None
        self._failed = 0.0
        self._told = False
        if ranks > 1:
            port = folder / f"port-{time.monotonic_ns()}"
            self._keeper = warm.start(folder, RANKS_SCRIPTS / "keeper.py", port, MASTER_ADDR="127.0.0.1")
            self._keeper.expect("ready")
            env = env | {
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": port.read_text(),
                "TORCHELASTIC_USE_AGENT_STORE": "True",
            }
            env |= {
                "WORLD_SIZE": str(ranks),
                "LOCAL_WORLD_SIZE": str(ranks),
                "TORCHELASTIC_RESTART_COUNT": "0",
            }
            env |= {"TORCHELASTIC_RUN_ID": port.name, "GLOO_SOCKET_IFNAME": "lo"}
        own = [{"RANK": str(rank), "LOCAL_RANK": str(rank)} if ranks > 1 else {} for rank in range(ranks)]
        own = [mine | theirs for mine, theirs in zip(own, each, strict=True)] if each else own
        self.children = [warm.start(folder, FORKED, *command, **{**env, **mine}) for mine in own]

    def lines(self) -> int:
        """How many lines the first rank has logged."""
        return sum(line.startswith("{") for line in self.children[0].lines())

    def over(self) -> bool:
        codes = [child.poll() for child in self.children]
        if any(codes) and not self._failed:
            self._failed = time.monotonic()
        if self._failed and not self._told and time.monotonic() > self._failed + AGENT_SECONDS:
            self._told = True
            for child in self.children:
                child.send(signal.SIGTERM)
        return None not in codes

    def strike(self, blow: Blow) -> None:
        until(
            lambda: self.over() or self.lines() >= blow.lines, f"{blow.lines} lines\n{self.log()}", PATIENCE
        )
        time.sleep(blow.delay)
        for rank in blow.ranks:
            (self.children[rank].send_group if blow.group else self.children[rank].send)(signal.SIGTERM)
            time.sleep(blow.apart)

    def wait(self) -> tuple[int, ...]:
        try:
            until(self.over, "the end of a life", PATIENCE)
        except AssertionError:
            for child in self.children:
                child.send(signal.SIGABRT)  # the faulthandler shows what they do
            time.sleep(0.5)
            raise AssertionError(f"a life did not end:\n{self.log()}") from None
        finally:
            if self._keeper:
                self._keeper.end()
        return tuple(child.wait() for child in self.children)

    def log(self) -> str:
        return "\n".join(child.log() for child in self.children)


def run(
    warm: Nursery, folder: Path, command: Sequence[object], plan: Sequence[Blow], ranks: int = 1, **env: str
) -> Chain:
    """One blow a life, as planned, until it exits 0."""
    chain = Chain()
    for number in range(MOST_LIVES):
        life = Life(warm, folder, command, ranks, env)
        if number < len(plan):
            life.strike(plan[number])
        codes, logged = life.wait(), life.lines()
        chain.codes.append(codes)
        chain.logs.append(life.log())
        if not any(codes):
            return chain
        # Before train() has begun nobody is there to be told, and after it the signal is the script's own
        # business again.
        lawful = {SAVED} if logged else {SAVED, KILLED}
        if "train_loss" in "\n".join(life.children[0].lines()):
            lawful = {SAVED, KILLED, 0}
        assert number < len(plan) and set(codes) <= lawful, (
            f"life {number} ended with {codes} after {logged} lines:\n{chain}"
        )
    raise AssertionError(f"not finished after {MOST_LIVES} lives:\n{chain}")


def moments(seed: int, count: int, history: list[dict[str, Any]], ranks: int = 1) -> list[Blow]:
    """So many blows all over a run whose log is known: at its start, in evaluations, in the saves after them,
    and anywhere."""
    dice = random.Random(seed)
    steps = [index + 1 for index, entry in enumerate(history[:-3]) if "loss" in entry]
    evaluated = [
        index for index, entry in enumerate(history[:-3]) if any(key.startswith("eval_") for key in entry)
    ]
    # after the line before it, and after its own
    kinds = [dice.choice(evaluated), dice.choice(evaluated) + 1] if evaluated else []
    dice.shuffle(kinds)
    first = [0] if count > 2 else []
    places = sorted(
        [*first, *(kinds + dice.sample(steps, max(0, count - len(kinds) - len(first))))[: count - len(first)]]
    )
    blows, before = [], 0
    for place in places:
        struck = tuple(dice.sample(range(ranks), dice.randrange(1, ranks + 1)))
        delay = dice.uniform(0.0, 0.5 if place == 0 else 0.03)
        blows.append(
            Blow(
                max(place - before, 0 if place == 0 else 1),
                delay,
                struck,
                dice.choice([0.0, 0.05]),
                dice.random() < 0.3,
            )
        )
        before = place
    return blows


def interruptions(usual: int) -> int:
    return int(os.environ.get("LASTCALL_TEST_INTERRUPTIONS", usual))


def timeless(history: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{key: value for key, value in entry.items() if not key.endswith(TIMES)} for entry in history]


def compare(
    nursery: Nursery,
    folder: Path,
    script: str,
    case: dict[str, Any],
    *,
    count: int = 1,
    ranks: int = 1,
    **env: str,
) -> Chain:
    """A script of ours in peace and under blows: the same result, and the same micro-batches on the way."""
    seed = len(script) + len(json.dumps(case))
    setting = {"CASE": json.dumps(case), **env}
    run(nursery, folder, [SCRIPTS / script], [], ranks, **PLAIN, **setting, **places(folder, "peace"))
    expected = results(folder, "peace", ranks)
    plan = moments(seed, interruptions(count), expected[0]["history"], ranks)
    chain = run(
        nursery, folder, [SCRIPTS / script], plan, ranks, **QUICK, **setting, **places(folder, "struck")
    )
    found = results(folder, "struck", ranks)
    for rank in range(ranks):
        batches = [micro_batches(folder / f"{name}.journal-{rank}") for name in ("peace", "struck")]
        wrong = differences(batches[0], batches[1], expected[rank], found[rank])
        assert not wrong, "\n".join([f"rank {rank}", *wrong, str(plan), str(chain)])
    return chain


def places(folder: Path, name: str) -> dict[str, Any]:
    return {
        "OUTPUT": str(folder / name),
        "RESULT": str(folder / f"{name}.result"),
        "JOURNAL": str(folder / f"{name}.journal"),
    }


def results(folder: Path, name: str, ranks: int) -> list[dict[str, Any]]:
    return [json.loads((folder / f"{name}.result-{rank}").read_text()) for rank in range(ranks)]


def micro_batches(path: Path) -> Batches:
    """What a rank has journalled. What was computed twice must have come out the same."""
    found: Batches = {}
    for line in path.read_text().splitlines():
        step, number, loss, data = json.loads(line)
        if found.setdefault((step, number), (loss, data)) != (loss, data):
            found[step, number] = ("both " + found[step, number][0] + " and " + loss, data)
    return found


def differences(
    batches: Batches, others: Batches, result: dict[str, Any], other: dict[str, Any]
) -> list[str]:
    """What is not the same in two runs, the first of each kind."""
    wrong = []
    for place in sorted(batches.keys() | others.keys()):
        if batches.get(place) != others.get(place):
            wrong.append(
                f"step {place[0]}, micro-batch {place[1]}: {batches.get(place)} and {others.get(place)}"
            )
            break
    parts = [part for part in result if part != "history" and result[part] != other[part]]
    wrong += [f"{part}: {result[part]} and {other[part]}" for part in parts]
    logs = list(itertools.zip_longest(result["history"], other["history"]))
    return wrong + [f"log: {one} and {two}" for one, two in logs if one != two][:2]


def tail(log: str, most: int = 2500) -> str:
    log = "\n".join(line for line in log.splitlines() if line and "Writing model shards" not in line)
    ours = "\n".join(line for line in log[:-most].splitlines() if "lastcall" in line)
    return f"{ours}\n...\n{log[-most:]}" if len(log) > most else log
