"""The drill from beginning to end: start, wait for the moment, preempt, restart, and check what was
resumed."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import random
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from lastcall import settings
from lastcall.drill import evidence, report, sentences
from lastcall.drill.incarnation import Incarnation
from lastcall.drill.interruption import DrillInterrupted, Interruptions
from lastcall.drill.options import EARLIEST, LATEST, DrillOptions
from lastcall.drill.report import Back, DirectoryRound, DrillReport, DrillRound, Gone, RunEnd
from lastcall.launch import command as launching
from lastcall.launch import processes

_TICK = 0.05  # seconds between two checks
_QUICK = 0.01  # ... while measuring how fast the run ends
_LATE = 5.0  # seconds for further ranks to join after the first one's first step


class DrillProblem(Exception):
    """The drill cannot continue; the message says why."""


class Drill:
    def __init__(
        self, options: DrillOptions, say: Callable[[str], None], dice: random.Random | None = None
    ) -> None:
        self._options = options
        self._say = say
        self._dice = dice or random.Random()
        self._report = DrillReport(options)
        self._interruptions = Interruptions()
        self._life: Incarnation | None = None
        self._lives = 0

    def run(self) -> DrillReport:
        """ConfigError if the command cannot start. When this returns or raises, no process of the run is
        left."""
        try:
            self._path = launching.locate(self._options.command[0], os.environ)
        except launching.CannotStart as error:
            settings.fail(str(error))
        self._folder = Path(tempfile.mkdtemp(prefix="lastcall-drill-"))
        self._log = self._options.log or self._folder / "output.log"
        try:
            self._check_log()
            processes.become_subreaper()
            with self._interruptions:
                self._guarded()
            self._keep_log()
        finally:
            if self._report.log is None:
                shutil.rmtree(self._folder, ignore_errors=True)
        return self._report

    def _check_log(self) -> None:
        try:
            self._log.open("ab").close()
        except OSError as error:
            settings.fail(f"--log {self._log}: {error.strerror}. Name a writable file.")

    def _guarded(self) -> None:
        try:
            self._rounds()
        except DrillProblem as problem:
            self._report.problem = str(problem)
            self._stop("The drill ends here")
        except DrillInterrupted as interrupted:
            self._report.interrupted = interrupted.signum
            self._report.problem = f"interrupted by {interrupted}"
            self._stop(f"{interrupted}: the drill ends here (once more: kill the run at once)")
        finally:
            if self._life is not None:
                self._life.kill_rest()

    def _keep_log(self) -> None:
        if self._report.ok:
            return
        self._report.log = self._log
        for path in self._folder.glob("life-*"):
            shutil.rmtree(path, ignore_errors=True)

    # ---- the order of things -------------------------------------------------------------------------------

    def _rounds(self) -> None:
        life = self._start()
        first = self._first_step(life)
        if not first.came:
            raise DrillProblem(first.because)
        if life.finished:
            raise DrillProblem(sentences.finished_early(1))
        self._report.directories = life.roots
        for number in range(1, self._options.times + 1):
            life = self._round(number, life)
            done = self._report.rounds[-1]
            if not done.back.came:
                raise DrillProblem(f"the run did not resume in round {number}: {done.back.because}")
            if life.finished and number < self._options.times:
                raise DrillProblem(sentences.finished_early(number + 1))
        self._finish(life)

    def _round(self, number: int, life: Incarnation) -> Incarnation:
        name = f"Round {number} of {self._options.times}"
        waited = self._wait_for_moment(number, life)
        steps = {root: life.step(root) or 0 for root in life.roots}
        gone = self._preempt(life, f"{name}: at step {min(steps.values())}, ")
        if life.finished:
            raise DrillProblem(sentences.finished_early(number))
        parts = [self._part(root, step, life, gone) for root, step in steps.items()]
        self._say(f"{name}: {sentences.ending(gone, parts)}")
        again = self._start()
        restarted = again.began_wall - gone.sent
        back = self._first_step(again, wanted=tuple(steps))
        parts = [_returned(item, again) if back.came else item for item in parts]
        self._report.rounds.append(
            report.judged(DrillRound(number, waited, gone, back, restarted, tuple(parts)), self._options)
        )
        self._say(f"{name}: {sentences.back(self._report.rounds[-1])}")
        return again

    def _finish(self, life: Incarnation) -> None:
        """After the last round: the run is left stopped and ready to be resumed, or runs to its end."""
        if self._options.to_the_end and not life.finished:
            self._say("All rounds are done; the run continues to its end")
        if self._options.to_the_end or life.finished:
            self._until(life, lambda: False, float("inf"))
            code = life.process.wait()
            self._report.end = _left(life)
            if code != 0:
                raise DrillProblem(
                    "the run was allowed to finish, and exited with "
                    f"{processes.described(code)}{sentences.last_words(life)}"
                )
            return
        self._stop("All rounds are done")

    def _stop(self, why: str) -> None:
        """Stop the run with the drill's signal: it may save."""
        life = self._life
        if life is None:
            return
        if life.finished:  # a signal would only disturb its exit
            with contextlib.suppress(subprocess.TimeoutExpired):
                life.process.wait(self._options.grace)
        if life.process.poll() is not None:
            self._report.end = _left(life)
            return
        gone = self._preempt(life, f"{why}: ", last=True)
        parts = [self._part(root, 0, life, gone) for root in life.roots]
        how = "killed" if gone.killed else "finished" if life.finished else "stopped"
        saved = bool(parts) and all(
            item.saved is not None or item.traces.outcome == "saved" for item in parts
        )
        self._report.end = RunEnd(how, gone.exit, saved or how == "finished")
        self._say(f"The end: {sentences.ending(gone, parts)}")

    # ---- phases --------------------------------------------------------------------------------------------

    def _start(self) -> Incarnation:
        self._lives += 1
        folder = self._folder / f"life-{self._lives}"
        folder.mkdir()
        try:
            self._life = Incarnation(self._options, self._path, folder, self._log)
        except OSError as error:
            settings.fail(
                f"cannot start {self._path}: {error.strerror}. Check that the interpreter in its "
                "first line exists"
            )
        self._say(
            f"Started {'again ' if self._lives > 1 else ''}as process {self._life.process.pid}: "
            f"{' '.join(self._options.command)}"
        )
        return self._life

    def _first_step(self, life: Incarnation, wanted: tuple[Path, ...] = ()) -> Back:
        """Wait until the run completes steps of its own, in the wanted directories if they appear."""
        times: dict[str, float] = {}

        def note(name: str, condition: bool) -> None:
            if condition:
                times.setdefault(name, time.monotonic() - life.began)

        def stepping() -> bool:
            note("spoke", life.has_spoken)
            note("joined", bool(life.members))
            note("first_step", life.stepping)
            if not life.stepping:
                return False
            return (
                set(wanted) <= set(life.roots) or time.monotonic() - life.began > times["first_step"] + _LATE
            )

        came = self._until(life, stepping, self._options.patience)
        note("first_step", life.stepping)
        came = came or life.finished
        first_step = times.get("first_step") if any(m.step > (m.resumed or 0) for m in life.members) else None
        because = "" if came else sentences.no_step(life, self._options.patience)
        return Back(came, because, times.get("spoke"), times.get("joined"), first_step, life.finished)

    def _wait_for_moment(self, number: int, life: Incarnation) -> float:
        """Wait until it is time for the notice. Returns the seconds since the first step."""
        began = time.monotonic()
        if self._options.at is not None:
            step = self._options.at * number
            self._say(
                f"Round {number} of {self._options.times}: waiting for step {step}; it is at {life.step()}"
            )
            self._reach(life, number, step)
        else:
            after = (
                self._options.after
                if self._options.after is not None
                else self._dice.uniform(EARLIEST, LATEST)
            )
            self._say(f"Round {number} of {self._options.times}: the notice comes in {after:.1f} s")
            self._until(life, lambda: life.finished, after)
        if life.finished:
            raise DrillProblem(sentences.finished_early(number))
        if life.process.poll() is not None:
            raise DrillProblem(sentences.left_early(number, life))
        return time.monotonic() - began

    def _reach(self, life: Incarnation, number: int, step: int) -> None:
        while (at := life.step()) is not None and at < step:
            moved = self._until(life, lambda at=at: (life.step() or 0) > at, self._options.patience)  # type: ignore[misc]
            if life.process.poll() is not None:
                return
            if not moved:
                raise DrillProblem(
                    f"no step was completed in {self._options.patience:g} s: the run stands at step {at}, "
                    f"and round {number} waits"
                )

    def _preempt(self, life: Incarnation, why: str, last: bool = False) -> Gone:
        """The signal, the grace, the kill. `last`: the drill itself is ending, and a further Ctrl-C cuts the
        grace short."""
        options = self._options
        heard = len(self._interruptions.heard)
        # at the end it may save
        signum = signal.SIGTERM if last and options.signum == signal.SIGKILL else options.signum
        sent, began, told = life.tell(signum, options.to)
        self._say(
            f"{why}{signal.Signals(signum).name} to {processes.names(told)}; {options.grace:g} s of grace"
        )

        def over() -> bool:
            # A container ends with its first process. Where the platform signals more processes, it also
            # waits for more.
            return life.process.poll() is not None and (options.to == "child" or not life.unaware)

        while not over() and time.monotonic() < began + options.grace:
            if not last:
                self._interruptions.check()
            elif len(self._interruptions.heard) > heard:
                break
            life.look()
            time.sleep(_QUICK)
        killed, ended = not over(), time.monotonic()
        life.look()
        orphans = () if killed else tuple(member.pid for member in life.unaware)
        life.kill_rest()
        seconds = (time.monotonic() if killed else ended) - began
        self._life = None
        return Gone(sent, seconds, life.process.returncode, killed, orphans)

    def _part(self, root: Path, step: int, life: Incarnation, gone: Gone) -> DirectoryRound:
        newest = evidence.newest(root)
        last = max((member.step for member in life.members if Path(member.root) == root), default=0)
        made = None if newest is None else (newest[0], newest[1].created)
        return report.part(root, step, last, gone.sent, evidence.traces(root, gone.sent), made)

    # ---- waiting -------------------------------------------------------------------------------------------

    def _until(self, life: Incarnation, condition: Callable[[], bool], seconds: float) -> bool:
        """Whether it became true before the time was over or the command ended."""
        until = time.monotonic() + seconds
        while True:
            self._interruptions.check()
            ended = life.process.poll() is not None  # before the check, so that its last report is seen
            life.look()
            if condition():
                return True
            if ended or time.monotonic() >= until:
                return False
            time.sleep(_TICK)


def _returned(item: DirectoryRound, life: Incarnation) -> DirectoryRound:
    """The part, now that the next incarnation has started."""
    members = [member for member in life.members if Path(member.root) == item.directory]
    if not members:
        return dataclasses.replace(item, returned=True, elsewhere=True)
    start = evidence.start(item.directory, life.began_wall)
    steps = [member.resumed for member in members if member.resumed is not None]
    resumed = None
    if steps:
        name = start.name if start is not None and start.name is not None else f"checkpoint-{min(steps)}"
        resumed = evidence.named(item.directory, name, min(steps))
    # a report that is a second old may be behind the checkpoint
    reached = max(item.reached, min(steps, default=0))
    return dataclasses.replace(item, returned=True, resumed=resumed, start=start, reached=reached)


def _left(life: Incarnation) -> RunEnd:
    """The end of a run that exited on its own."""
    code = life.process.returncode
    return RunEnd("finished" if life.finished else "left", code if code >= 0 else 128 - code, life.finished)
