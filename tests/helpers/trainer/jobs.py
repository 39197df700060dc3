"""Trainings with transformers.Trainer that are struck by real signals, brought back and judged: the same play
for Transformers' own callback ("hf": enable_jit_checkpoint, and resume_from_checkpoint=True where there is a
checkpoint) and for us ("lastcall": the script as it is, LASTCALL_ENABLED=1), and one judge for both.

A complaint has a kind, so that a test knows whether it is the one that a finding is about:

    start       it does not even begin                    hang        it did not end by itself
    crash       it ends with an exception                 deaf        it goes on as if nothing had been said
    missed      the play was not played: a moment for a signal never came
    code        it exits with 0 before training is done   tail        the rest of the script ran all the same
    saves       more than one save for one notice         evaluation  a whole evaluation after the save
    late        not gone in time                          on_save     the user's callback was not called for
    the save
    lost        completed steps are gone                  resume      the next life fails
    exact       the next life computes something else     foreign     the next life takes another run's
    checkpoint
"""

from __future__ import annotations

import dataclasses
import os
import re
import signal
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

from helpers.processes.forkserver import Nursery
from helpers.ranks import jobs as ranks_jobs
from helpers.ranks import plan as ranks_plan
from helpers.ranks.jobs import Job, Launched, Launcher
from helpers.ranks.plan import Event
from helpers.trainer.plan import PLAN, Plan

SCRIPT = Path(__file__).resolve().parents[2] / "e2e" / "transformers" / "scripts" / "findings.py"
IMPORTS = (
    "transformers.trainer",
    "transformers.trainer_jit_checkpoint",
    "transformers.models.gpt2.modeling_gpt2",
    "lastcall.adapters.transformers.patch",  # which patches nothing until it is told to
)
KILL_WAIT = 0.3  # seconds, for both
PATIENCE = 45.0  # seconds for what is expected to end
SAVED, KILLED = 75, -int(signal.SIGTERM)


@dataclass(frozen=True)
class Strike:
    """Signals at a moment that a journal names: the `nth` line `what` at `step` or later of the rank
    `watched`."""

    what: str = "did"
    step: int = 5
    nth: int = 1
    after: float = 0.0
    signum: int = signal.SIGTERM
    ranks: tuple[int, ...] = (0,)  # in this order; -1 is the launcher
    apart: float = 0.0  # seconds between them
    times: int = 1  # so often, `apart` each
    group: bool = False  # the whole process group, DataLoader workers included
    watched: int = 0


@dataclass(frozen=True)
class Play:
    """What happens to a training, and what may come of it."""

    plan: Plan
    strikes: tuple[Strike, ...] = (Strike(),)
    ranks: int = 1
    how: str = "fork"  # or torchrun, lastcall run
    codes: tuple[int, ...] = (SAVED,)  # of ours, in the struck life
    within: float = 20.0  # seconds from the first SIGTERM to the end of the life
    lost: int = 0  # completed steps that may be lost
    resumed: bool = True  # there is a second life, to the end
    always: bool = False  # resume_from_checkpoint=True in the first life as well
    other: Plan | None = None  # the second life is another run, in the same directory
    on_save: bool = False
    saves: int = 1  # attempts at a save that one notice may take
    # every strike must find its moment; if not, the later ones are for what should never happen
    all_struck: bool = True
    patience: float = PATIENCE  # seconds after the last strike until it counts as a hang
    env: tuple[tuple[str, str], ...] = ()


@dataclass
class Life:
    wanted: int  # steps
    codes: dict[int, int | None]
    hung: bool
    struck: int  # strikes that found their moment
    told: float | None  # when the first SIGTERM was sent
    ended: float
    journals: dict[int, list[Event]]
    checkpoints: list[int]
    log: str

    def steps(self, what: str, rank: int = 0) -> list[int]:
        return [event.step for event in self.journals[rank] if event.what == what]

    def finished(self) -> bool:
        done = all(max(self.steps("done", rank), default=-1) >= self.wanted for rank in self.journals)
        return done and not any(self.codes.values())

    def did(self) -> int:
        return max([0, *(step for rank in self.journals for step in self.steps("did", rank))])

    def first(self) -> int:
        """The step it went on from."""
        return min(
            (self.steps("training", rank)[0] for rank in self.journals if self.steps("training", rank)),
            default=-1,
        )

    def last_line(self) -> str:
        lines = [line.strip() for line in self.log.splitlines() if "Error" in line]
        if not lines:
            return f"code {', '.join(str(code) for code in self.codes.values())}"
        return re.sub(r"/[^ ')]*/run\b/?", "", lines[-1])[:110]


@dataclass
class Result:
    mode: str
    lives: list[Life]
    complaints: dict[str, str] = field(default_factory=dict)

    def story(self) -> str:
        """Everything, for the message of a failed test."""
        parts = [f"{self.mode}: {self.complaints}"]
        for number, life in enumerate(self.lives):
            brief = {
                rank: [f"{event.what} {event.step}" for event in events][-25:]
                for rank, events in life.journals.items()
            }
            parts.append(
                f"--- life {number}: codes {life.codes}, hung {life.hung}, checkpoints "
                f"{life.checkpoints}\n{brief}\n{_tail(life.log)}"
            )
        return "\n".join(parts)


class Solo(Job):
    """One process, forked, that knows nothing of ranks."""

    def __init__(self, warm: Nursery, folder: Path, directory: Path, env: dict[str, str]) -> None:
        super().__init__(folder, 1)
        self._child = warm.start(folder, SCRIPT, directory, **env)

    def codes(self) -> dict[int, int | None]:
        return {0: self._child.poll()}

    def pid(self, rank: int) -> int:
        return self._child.pid if self._child.poll() is None else 0

    def end(self) -> None:
        self._child.end()


class Stage:
    """Runs plays below a folder. Uninterrupted runs, and plays that several findings speak of, are run
    once."""

    def __init__(self, warm: Nursery, folder: Path) -> None:
        self._warm = warm
        self._folder = folder
        self._count = 0
        self._references: dict[tuple[Plan, int], Life] = {}
        self._results: dict[tuple[Play, str], Result] = {}

    def result(self, play: Play, mode: str, *, again: bool = False) -> Result:
        if again or (play, mode) not in self._results:
            self._results[play, mode] = self._perform(play, mode)
        return self._results[play, mode]

    def reference(self, plan: Plan, ranks: int) -> Life:
        """The run that nobody disturbs, without sleeps, without either callback."""
        quick = dataclasses.replace(
            _still(plan), save="no" if plan.best is None else plan.save, eio=False, chatty=False, thread=False
        )
        if (quick, ranks) not in self._references:
            life = self._live(Play(quick, (), ranks), quick, "plain", self._new_folder() / "run", ())
            assert life.finished(), life.log
            self._references[quick, ranks] = life
        return self._references[quick, ranks]

    def _perform(self, play: Play, mode: str) -> Result:
        directory = self._new_folder() / "run"
        lives = [self._live(play, play.plan, mode, directory, play.strikes)]
        if play.resumed and not lives[0].finished():
            # How it was started does not matter any more. Another run so soon after an exit with 75 is one
            # only if a person says so.
            named = (("LASTCALL_RUN_ID", "other"),) if play.other is not None and mode == "lastcall" else ()
            forked = dataclasses.replace(play, how="fork", env=(*play.env, *named))
            lives.append(self._live(forked, _still(play.other or play.plan), mode, directory, ()))
        result = Result(mode, lives)
        result.complaints = judge(
            play, result, self.reference(play.other or play.plan, play.ranks) if len(lives) > 1 else None
        )
        return result

    def _new_folder(self) -> Path:
        self._count += 1
        folder = self._folder / f"play-{self._count}"
        folder.mkdir()
        return folder

    def _live(self, play: Play, plan: Plan, mode: str, directory: Path, strikes: tuple[Strike, ...]) -> Life:
        launcher = Launcher(self._warm, directory.parent / f"lives-{len(list(directory.parent.iterdir()))}")
        launcher.folder.mkdir()
        env = {**_environment(plan, mode), **dict(play.env)}
        if mode == "hf" and (play.always or any(directory.glob("checkpoint-*"))):
            env["TRAINER_RESUME"] = "1"
        job = self._start(play, launcher, directory, env)
        try:
            struck, told = _strike(job, strikes)
            hung = not _over(job, play.patience)
            ended = time.monotonic()
            codes = job.codes()
        finally:
            job.end()
        found = sorted(int(path.name.rpartition("-")[2]) for path in directory.glob("checkpoint-*"))
        return Life(plan.steps, codes, hung, struck, told, ended, job.journals(), found, _said(job.folder))

    def _start(self, play: Play, launcher: Launcher, directory: Path, env: dict[str, str]) -> Job:
        if play.ranks == 1 and play.how == "fork":
            folder = launcher.folder / "life-0"
            folder.mkdir()
            return Solo(
                self._warm, folder, directory, {**env, "TRAINER_FORKED": "1", ranks_plan.FOLDER: str(folder)}
            )
        if play.ranks == 1:
            return launcher.launch_all(
                [[*ranks_jobs.LASTCALL_RUN, sys.executable, str(SCRIPT), str(directory)]],
                1,
                ranks_plan.Plan(),
                **env,
            )
        if play.how == "fork":
            return launcher.launch(
                str(SCRIPT), play.ranks, "agent", directory, ranks_plan.Plan(), **env, TRAINER_FORKED="1"
            )
        return launcher.launch(str(SCRIPT), play.ranks, play.how, directory, ranks_plan.Plan(), **env)


# ---- the judge ---------------------------------------------------------------------------------------------


def judge(play: Play, result: Result, reference: Life | None) -> dict[str, str]:
    """Complaints by kind; none is what everybody wants."""
    life = result.lives[0]
    found: dict[str, str] = {}
    if life.hung:
        found["hang"] = f"hangs (killed after {play.patience:.0f} s)"
    if not life.finished() and not life.struck:
        found["start"] = f"ended before anything was sent to it: {life.last_line()}"
    if life.finished():
        if play.strikes:
            found["deaf"] = "went on to the end"
        return found
    if life.struck and play.all_struck and life.struck < len(play.strikes) and not life.hung:
        found["missed"] = f"no moment for {play.strikes[life.struck]}"
    found |= _of_the_end(play, result.mode, life)
    found |= _of_saves(play, life)
    if not play.resumed and not life.checkpoints:
        found["lost"] = f"nothing is saved: {life.last_line()}"
    if reference is not None:
        found |= _of_the_next(play, life, result.lives[1], reference)
    return found


def _of_the_end(play: Play, mode: str, life: Life) -> dict[str, str]:
    found: dict[str, str] = {}
    codes = {code for rank, code in life.codes.items() if rank >= 0 or play.how == "lastcall run"}
    trained = any(step >= play.plan.steps for step in life.steps("tail"))
    if broken := [code for code in codes if code not in (None, 0, SAVED, KILLED, -signal.SIGKILL)]:
        found["crash"] = f"crashes with {', '.join(map(str, broken))}: {life.last_line()[:60]}"
    if 0 in codes:
        found["code"] = f"exit 0 after {life.did()} of {play.plan.steps} steps"
    elif mode == "lastcall" and not life.hung and codes and not codes <= set(play.codes):
        found["code"] = f"exit {sorted(str(code) for code in codes)} instead of {play.codes}"
    if tails := [step for rank in life.journals for step in life.steps("tail", rank)]:
        if not trained:
            found["tail"] = f"writes final/ after {tails[0]} of {play.plan.steps} steps"
        elif life.steps("done"):
            found["tail"] = "writes final/ after the notice"
    if life.told is not None and not life.hung and life.ended - life.told > play.within:
        found["late"] = f"gone {life.ended - life.told:.1f} s after SIGTERM (limit {play.within:.0f} s)"
    return found


def _of_saves(play: Play, life: Life) -> dict[str, str]:
    found: dict[str, str] = {}
    told = life.told if life.told is not None else float("inf")
    saves = [event for event in life.journals[0] if event.what == "save"]
    after = [event for event in saves if event.at > told]
    steps = [event.step for event in saves]
    if len(after) > play.saves:
        found["saves"] = f"{len(after)} saves for one notice (steps {[event.step for event in after]})"
    elif twice := {step for step in steps if steps.count(step) > play.saves}:
        found["saves"] = f"saves step {min(twice)} twice"
    if after and any(event.what == "evaluation" and event.at > after[0].at for event in life.journals[0]):
        found["evaluation"] = "evaluates after the save"
    if play.on_save and life.checkpoints and life.checkpoints[-1] not in life.steps("on_save"):
        found["on_save"] = f"on_save was not called for checkpoint-{life.checkpoints[-1]}"
    return found


def _of_the_next(play: Play, life: Life, following: Life, reference: Life) -> dict[str, str]:
    if not following.finished():
        return {"resume": f"restart fails: {following.last_line()}"}
    found: dict[str, str] = {}
    begun = following.first()
    if play.other is not None:
        if begun > 0:
            found["foreign"] = f"goes on at step {begun} of another run"
    elif 0 <= begun < life.did() - play.lost:
        found["lost"] = (
            f"{life.did() - begun} completed step{'s' * (life.did() - begun > 1)} lost ({life.did()} done, "
            f"goes on at {begun})"
        )
    for rank, events in following.journals.items():
        want: dict[int, list[Event]] = {event.step: [] for event in reference.journals[rank]} | _by_step(
            reference.journals[rank]
        )
        have = _by_step(events)
        same = sum(have[step] == want.get(step) for step in have)
        if same < len(have):
            found.setdefault("exact", f"{same} of {len(have)} resumed steps identical")
        elif _weights(events) != _weights(reference.journals[rank]):
            found.setdefault("exact", "another model in the end")
    return found


def _by_step(events: list[Event]) -> dict[int, list[tuple[str, str]]]:
    """What was computed in each step: the samples and the loss of each micro-batch."""
    steps: dict[int, list[tuple[str, str]]] = {}
    for event in events:
        if event.what == "micro":
            steps.setdefault(event.step, []).append((event.data, event.state["loss"]))
    return steps


def _weights(events: list[Event]) -> str:
    return next(event.state["weights"] for event in reversed(events) if event.what == "done")


# ---- signals -----------------------------------------------------------------------------------------------


def _strike(job: Job, strikes: tuple[Strike, ...]) -> tuple[int, float | None]:
    """(how many strikes found their moment, when the first SIGTERM was sent)"""
    told: float | None = None
    for number, strike in enumerate(strikes):
        if not _until(job, strike, PATIENCE if number == 0 else 15.0):
            return number, told
        time.sleep(strike.after)
        for count in range(strike.times):
            for place, rank in enumerate(strike.ranks):
                time.sleep(strike.apart if count or place else 0.0)
                if strike.signum == signal.SIGTERM and told is None:
                    told = time.monotonic()
                _send(job, rank, strike)
                job.tend()
    return len(strikes), told


def _until(job: Job, strike: Strike, patience: float) -> bool:
    deadline = time.monotonic() + patience
    while time.monotonic() < deadline:
        seen = [
            event
            for event in job.journal(strike.watched)
            if event.what == strike.what and event.step >= strike.step
        ]
        if len(seen) >= strike.nth:
            return True
        if job.over():
            return False
        job.tend()
        time.sleep(0.01)
    return False


def _send(job: Job, rank: int, strike: Strike) -> None:
    pid = job.launchers[-rank - 1].pid if rank < 0 and isinstance(job, Launched) else job.pid(rank)
    if not pid:
        return
    try:
        if strike.group:
            os.killpg(pid, strike.signum)
        else:
            os.kill(pid, strike.signum)
    except ProcessLookupError:
        pass


def _over(job: Job, patience: float) -> bool:
    deadline = time.monotonic() + patience
    while not job.over():
        if time.monotonic() > deadline:
            return False
        job.tend()
        time.sleep(0.01)
    return True


def _still(plan: Plan) -> Plan:
    """The same training without any sleep, and without what goes wrong in one life only."""
    quick = {entry.name: 0.0 for entry in dataclasses.fields(Plan) if entry.name.endswith("seconds")}
    return dataclasses.replace(plan, **quick, long=None, raises=None)


def _environment(plan: Plan, mode: str) -> dict[str, str]:
    env = {
        PLAN: plan.to_json(),
        "TRAINER_MODE": mode,
        "LASTCALL_KILL_WAIT_SECONDS": str(KILL_WAIT),
        "HF_HUB_OFFLINE": "1",
    }
    return {**env, "LASTCALL_ENABLED": "1"} if mode == "lastcall" else env


def _said(folder: Path) -> str:
    return "\n".join(path.read_text(errors="replace") for path in sorted(folder.glob("stderr*")))


def _tail(log: str) -> str:
    lines = [
        line
        for line in log.splitlines()
        if line.strip() and "Writing model shards" not in line and "loss_type" not in line
    ]
    return "\n".join(lines[-30:])
