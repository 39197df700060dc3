"""`lastcall drill --prove`: the command runs twice in scratch directories, once undisturbed and once with
preemptions, and every named piece of its state is compared at the same steps.

Both runs are witnessed (core/proof/witness.py): each rank records the digests of its state at every boundary.
What already differs before the first preemption differs from run to run, and says nothing about lastcall: it
is left out of the comparison, or, where the state itself is concerned, nothing can be proved.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from lastcall import settings
from lastcall.core import timing
from lastcall.core.proof import witness
from lastcall.core.proof.witness import ProofPlan, Statement
from lastcall.drill import causes, evidence, sentences
from lastcall.drill.incarnation import Incarnation
from lastcall.drill.interruption import DrillInterrupted, Interruptions
from lastcall.drill.options import DrillOptions
from lastcall.launch import command as launching
from lastcall.launch import processes

_TICK = 0.05
Boundary = tuple[int, int]


@dataclass(frozen=True)
class Difference:
    rank: int
    step: int
    name: str
    undisturbed: str | None  # None: the name does not exist
    resumed: str | None


@dataclass
class ProofVerdict:
    """What the proof found."""

    options: DrillOptions
    steps: int = 0
    problem: str | None = None  # why nothing was proved
    interrupted: int | None = None
    resumed: list[evidence.CommittedCheckpoint] = field(
        default_factory=list
    )  # in the order of the preemptions
    compared: int = 0  # boundaries after a resume
    names: int = 0
    # names that vary from run to run and were not compared
    uncertain: list[str] = field(default_factory=list)
    differences: list[Difference] = field(default_factory=list)  # at the first boundary with any
    cause: str = ""
    log: Path | None = None

    @property
    def identical(self) -> bool:
        return self.problem is None and self.compared > 0 and not self.differences

    @property
    def proved(self) -> bool:
        """Identical, and no checkpoint on the way is marked as inexact: a gap may show only in a later
        step."""
        return self.identical and all(one.exact for one in self.resumed)


class Proof:
    def __init__(self, options: DrillOptions, steps: int, say: Callable[[str], None]) -> None:
        self._options = options
        self._steps = steps
        self._say = say
        self._interruptions = Interruptions()
        self._verdict = ProofVerdict(options, steps)
        self._life: Incarnation | None = None
        self._lives = 0

    def run(self) -> ProofVerdict:
        """ConfigError if the command cannot start. When this returns or raises, no process of it is left."""
        verdict = self._verdict
        try:
            self._path = launching.locate(self._options.command[0], os.environ)
        except launching.CannotStart as error:
            settings.fail(str(error))
        self._folder = Path(tempfile.mkdtemp(prefix="lastcall-proof-"))
        self._log = self._options.log or self._folder / "output.log"
        processes.become_subreaper()
        try:
            with self._interruptions:
                self._prove()
        except _Unproved as problem:
            verdict.problem = str(problem)
        except DrillInterrupted as interrupted:
            verdict.interrupted, verdict.problem = interrupted.signum, f"interrupted by {interrupted}"
        finally:
            if self._life is not None:
                self._life.kill_rest()
            self._clean()
        return verdict

    def _clean(self) -> None:
        if self._verdict.identical or self._options.log is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            return
        for path in self._folder.iterdir():
            if path != self._log:
                shutil.rmtree(path, ignore_errors=True)
        self._verdict.log = self._log if self._log.exists() else None

    def _prove(self) -> None:
        undisturbed, preempted = self._folder / "undisturbed", self._folder / "preempted"
        self._begin(undisturbed, ())
        self._say(f"Without a preemption, for {self._steps} steps: {' '.join(self._options.command)}")
        self._witnessed(undisturbed)
        alone = witness.statements(undisturbed)
        self._verdict.steps = reached = max((said.step for said in alone), default=0)
        notices = self._notices(reached)
        self._begin(preempted, notices)
        for number, step in enumerate(notices, 1):
            self._say(f"Once more, preempted at step {step} ({number} of {len(notices)})")
            self._preempted(preempted, number)
        self._say("Once more, from the checkpoint")
        self._witnessed(preempted, len(notices) + 1)
        compare(alone, witness.statements(preempted), self._verdict)

    def _notices(self, reached: int) -> tuple[int, ...]:
        """Spread over the steps, none so late that no step follows it."""
        times = self._options.times
        every = self._options.at if self._options.at is not None else max(1, reached // (times + 1))
        notices = tuple(every * number for number in range(1, times + 1))
        if not notices or notices[-1] + 2 > reached:
            raise _Unproved(
                f"the command does {reached} steps, and the last preemption, at step {notices[-1]}, must "
                "come two steps before. "
                "Run more steps, or use --at STEP or fewer --times"
            )
        return notices

    def _begin(self, folder: Path, notices: tuple[int, ...]) -> None:
        folder.mkdir()
        ProofPlan(self._steps, notices, os.getpid()).write(folder)

    # ---- one incarnation
    # --------------------------------------------------------------------------------------------------------

    def _witnessed(self, folder: Path, incarnation: int = 1) -> None:
        """Until every rank has reached the last step, or training has finished."""
        life = self._start(folder)

        def over() -> bool:
            said = [one for one in witness.statements(folder) if one.incarnation == incarnation]
            return bool(said) and len({one.rank for one in said if one.done}) == said[-1].world

        if not self._until(life, over, folder) and life.process.returncode != 0:
            code = processes.described(life.process.returncode)
            raise _Unproved(
                f"the command exited with {code} before step {self._steps}{sentences.last_words(life)}"
            )
        self._end(life)
        if not any(one.incarnation == incarnation for one in witness.statements(folder)):
            raise _Unproved(sentences.no_step(life, self._options.patience))

    def _preempted(self, folder: Path, number: int) -> None:
        """Until it has saved and exited, or has restarted on its own (`lastcall run --restart`)."""
        life = self._start(folder)
        self._until(life, lambda: any(one.incarnation > number for one in witness.statements(folder)), folder)
        code = life.process.poll()
        if code == 0:
            raise _Unproved(
                "the preempted command exited with code 0, which means that training has finished"
            )
        self._end(life)
        saved = [
            found[0]
            for root in sorted((folder / "runs").glob("*"))
            if (found := evidence.newest(root)) is not None
        ]
        if not saved:
            how = "" if code is None else f", and exited with {processes.described(code)}"
            raise _Unproved(f"nothing was saved after the preemption{how}{sentences.last_words(life)}")
        exact = "exact" if saved[0].exact else f"not exact: {saved[0].because}"
        self._verdict.resumed.append(saved[0])
        self._say(
            f"Saved {saved[0].name} "
            f"({exact}){'' if code is None else f', exit code {code if code >= 0 else 128 - code}'}"
        )

    def _start(self, folder: Path) -> Incarnation:
        self._lives += 1
        registry = self._folder / f"life-{self._lives}"
        registry.mkdir()
        more = {
            "LASTCALL_PROOF": str(folder),
            "LASTCALL_ENABLED": "1",
            "PYTHONHASHSEED": os.environ.get("PYTHONHASHSEED", "0"),
        }
        try:
            self._life = Incarnation(self._options, self._path, registry, self._log, more)
        except OSError as error:
            settings.fail(
                f"cannot start {self._path}: {error.strerror}. Check that the interpreter in its "
                "first line exists"
            )
        return self._life

    def _until(self, life: Incarnation, condition: Callable[[], bool], folder: Path) -> bool:
        """Whether it became true before the command ended. The patience is for one step: every new one
        restarts it."""
        looked, size, until = 0.0, -1, time.monotonic() + self._options.patience
        while True:
            self._interruptions.check()
            life.look()
            ended = life.process.poll() is not None
            if ended or time.monotonic() >= looked + timing.LOOK:
                looked = time.monotonic()
                now = sum(path.stat().st_size for path in folder.glob("witness-*.jsonl"))
                if now != size:
                    size, until = now, time.monotonic() + self._options.patience
                if condition():
                    return True
            if ended:
                return False
            if time.monotonic() >= until:
                raise _Unproved(sentences.no_step(life, self._options.patience))
            time.sleep(_TICK)

    def _end(self, life: Incarnation) -> None:
        life.kill_rest()
        self._life = None


class _Unproved(Exception):
    """This command cannot be judged; the message says why."""


# ---- the comparison
# ------------------------------------------------------------------------------------------------------------


def compare(alone: list[Statement], preempted: list[Statement], verdict: ProofVerdict) -> None:
    """What the two runs recorded at the same boundaries."""
    reference: dict[tuple[int, Boundary], list[Statement]] = {}  # a Trainer passes several times at one step
    for said in alone:
        reference.setdefault((said.rank, said.boundary), []).append(said)
    first: dict[tuple[int, int], int] = {}  # (rank, incarnation): its first step
    uncertain: set[str] = set()
    names: set[str] = set()
    for said in preempted:
        began = first.setdefault((said.rank, said.incarnation), said.step)
        known = reference.get((said.rank, said.boundary), [])
        differ = _differing(known, said, fresh=said.incarnation > 1 and said.step == began) if known else []
        if said.incarnation == 1:
            if torn := [one for one in differ if causes.is_state(one.name)]:
                raise _Unproved(_unrepeatable(torn[0]))
            uncertain.update(one.name for one in differ)
            continue
        verdict.compared += bool(known) and said.step > began
        names.update(said.names)
        found = [one for one in differ if one.name not in uncertain]
        if found and (
            not verdict.differences
            or (said.step, said.rank) < (verdict.differences[0].step, verdict.differences[0].rank)
        ):
            verdict.differences = found
    verdict.names, verdict.uncertain = len(names - uncertain), sorted(uncertain)
    if not verdict.compared and not verdict.differences:
        raise _Unproved(
            "no step after the resume could be compared with the undisturbed run: they share no step"
        )
    if verdict.differences:
        verdict.differences.sort(key=lambda one: causes.weight(one.name))
        checkpoint = verdict.resumed[0] if verdict.resumed else None
        verdict.cause = causes.probable(
            [one.name for one in verdict.differences], checkpoint.because if checkpoint else ""
        )


def _differing(known: Sequence[Statement], said: Statement, *, fresh: bool) -> list[Difference]:
    """`fresh`: this is the boundary that was resumed from, at which a run may not yet have reported
    everything."""
    found = []
    for name in sorted({*(name for one in known for name in one.names), *said.names}):
        before, after = [one.names.get(name) for one in known], said.names.get(name)
        # not available yet after a resume: what is reported occasionally
        unreported = after is None and name.startswith("report.")
        if after not in before and not unreported and not (fresh and causes.weight(name) >= causes.TOLD):
            found.append(Difference(said.rank, said.step, name, before[-1], after))
    return found


def _unrepeatable(one: Difference) -> str:
    begun = (
        ". If it starts from a file that the first run left behind (a snapshot of its own), remove that file "
        "each time: "
        "-- sh -c 'rm -f FILE; exec COMMAND'"
    )
    return (
        f"the command is not deterministic: at step {one.step}, before any preemption, {one.name} is "
        f"{causes.shown(one.resumed)} and was {causes.shown(one.undisturbed)} in the first run. Seed "
        "everything it draws from "
        "(torch, numpy, random), use deterministic algorithms, and prove it "
        f"again{begun if one.step == 0 else ''}"
    )
