"""`lastcall run` from beginning to end: incarnation after incarnation, and one exit code."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import logging
import os
import shlex
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from lastcall import settings
from lastcall.core.checkpoint import handover
from lastcall.core.process import identity, logs, registry
from lastcall.launch import environment, machines, outcome, platforms, processes, restarts, store
from lastcall.launch.options import LaunchOptions
from lastcall.launch.outcome import ExitVerdict, Result
from lastcall.launch.signal_inbox import SignalInbox
from lastcall.launch.supervisor import Ending, Supervisor, as_notice
from lastcall.types import Notice

if TYPE_CHECKING:
    from lastcall.notices.sources import NoticeSource

log = logging.getLogger("lastcall")
NOT_FOUND, NOT_EXECUTABLE = 127, 126  # as every shell says it
_PAUSE_TICK = 0.5  # seconds between two checks for the end of a pause


class CannotStart(Exception):
    """The command cannot start; the second argument is the exit code."""

    def __init__(self, message: str, code: int) -> None:
        super().__init__(message)
        self.code = code


def launch(
    options: LaunchOptions,
    environ: Mapping[str, str],
    sources: Sequence[NoticeSource] | None = None,
    told: Callable[[ExitVerdict], None] | None = None,
) -> int:
    """The exit code. `told` is called with how it ended. Signals stay blocked in this process afterwards: it
    is about to exit."""
    platform, why = platforms.choose(options.platform, environ)
    exit_code = options.exit_code or platform.exit_code
    try:
        path = locate(options.command[0], environ)
    except CannotStart as error:
        if sys.stderr is not None:
            sys.stderr.write(f"lastcall: {error}\n")
        return error.code
    config = settings.JITCheckpointConfig(environ=environ)
    # those that are notices; SIGTERM always is one here
    signals = {signal.SIGTERM, *(signal.Signals[name] for name in config.signals)}
    # Before the first thread: a thread that has not blocked the signals would be killed by them, and this
    # process with it.
    inbox = SignalInbox(signals)
    opened = (
        store.served(everywhere=machines.several(options.command, environ))
        if config.enabled
        else store.unserved()
    )
    with logs.Visible(options.log_level), _registry() as book, opened as serving:
        log.debug("Platform %s: %s; a saved run exits with code %d", platform.name, why, exit_code)
        child = environment.build(options, exit_code, book.folder, environ, serving.told)
        listening = _sources(options, platform.name) if sources is None else sources
        launcher = Launcher(options, exit_code, book, inbox, signals, serving.clear)
        try:
            with _listening(listening, inbox.tell):
                verdict = launcher.run(path, child)
        except CannotStart as error:
            log.error("%s", error)
            return error.code
        if verdict.result is Result.SAVED and platform.name == "slurm" and platforms.requeue(environ):
            launcher.linger()
        if told is not None:
            told(verdict)
        return verdict.code


class Launcher:
    """All incarnations on this machine."""

    def __init__(
        self,
        options: LaunchOptions,
        exit_code: int,
        book: registry.Registry,
        inbox: SignalInbox,
        signals: Collection[int],
        forget: Callable[[], None] = lambda: None,
    ) -> None:
        self._inbox = inbox
        self._forget = forget  # what the ranks of an incarnation wrote for each other
        self._options = options
        self._exit_code = exit_code
        self._book = book
        self._signals = signals
        if not processes.become_subreaper() and os.getpid() != 1:
            log.warning(
                "Could not become a subreaper: if an intermediate shell dies, lastcall loses track "
                "of the training process"
            )
        self._roots: set[str] = set()  # the directories that the training processes have saved to so far
        # A shell that ended in `exec lastcall run` leaves its children to this process: they are not ours to
        # signal.
        self._strangers = [
            (process.pid, process.started) for process in processes.below(os.getpid()).values()
        ]

    def run(self, path: str, environ: Mapping[str, str]) -> ExitVerdict:
        policy = restarts.Policy(self._options)
        while True:
            ending = self._incarnation(path, environ)
            verdict = self._judge(ending)
            if self._options.restart == "never":
                return verdict
            decision = policy.after(verdict, ending.members, ending.notice)
            if not decision.again:
                return self._no_more(decision, ending, verdict)
            log.info(
                "%s: %s",
                "Waiting for `lastcall resume`" if decision.because == restarts.PAUSED else "Starting again",
                decision.because,
            )
            if (instead := self._rest(decision, ending, verdict)) is not None:
                return instead
            self._book.clear()
            self._forget()

    def _no_more(
        self, decision: restarts.RestartDecision, ending: Ending, verdict: ExitVerdict
    ) -> ExitVerdict:
        if verdict.result is Result.ENDED:
            return verdict
        log.log(logging.ERROR if decision.hopeless else logging.INFO, "No restart: %s", decision.because)
        own = outcome.shell_code(ending.status)
        if decision.hopeless and verdict.result is Result.SAVED and own != 0:
            # the code of a saved run would make the platform retry forever
            return ExitVerdict(Result.FAILED, own, decision.because)
        return verdict

    def _incarnation(self, path: str, environ: Mapping[str, str]) -> Ending:
        supervisor = Supervisor(self._options, self._book, self._inbox, self._signals, self._strangers)
        try:
            supervisor.start(path, environ, self._handed_over())
        except OSError as error:
            hint = ": it has no #! line" if error.errno == errno.ENOEXEC else ""
            # the program exists: the interpreter in its first line does not
            missing = error.errno == errno.ENOENT
            raise CannotStart(
                f"cannot start {path}: {error.strerror}{hint}", NOT_FOUND if missing else NOT_EXECUTABLE
            ) from error
        ending = supervisor.run()
        self._roots |= {member.root for member in ending.members if member.checkpoint}
        return ending

    def _handed_over(self) -> list[str]:
        """What --resume-args makes of the newest checkpoint: of this launcher's runs, or in a folder that the
        command names."""
        if self._options.resume_args is None:
            return []
        found = handover.newest([*map(Path, sorted(self._roots)), *handover.named(self._options.command)])
        if found is None:
            log.info("--resume-args: no checkpoint yet, starting the command unchanged")
            return []
        more = [word.replace("{path}", str(found.path)) for word in shlex.split(self._options.resume_args)]
        log.info("--resume-args: resuming with %s", shlex.join(more))
        return more

    def _judge(self, ending: Ending) -> ExitVerdict:
        rescued = (
            self._recover(ending)
            if self._options.guard or any(member.area for member in ending.members)
            else []
        )
        verdict = outcome.decide(ending, self._exit_code, rescued)
        plain = (
            not ending.members and ending.notice is None and verdict.code == outcome.shell_code(ending.status)
        )
        log.log(logging.DEBUG if plain else logging.INFO, "Exit code %d: %s", verdict.code, verdict.because)
        return verdict

    def _recover(self, ending: Ending) -> list[str]:
        """What the guardian could save of the runs that did not end well. It checks all of them: a run that
        had time for only a part left the rest in shared memory."""
        from lastcall.launch import guardian

        lost = outcome.unsaved(ending.members)
        status = next(
            (ending.statuses[member.pid] for member in lost if member.pid in ending.statuses), ending.status
        )
        # an intermediate shell reports SIGKILL as 137
        how = processes.described(128 - status if status > 128 else status)
        found = guardian.recover(ending.members, how)
        roots = {member.root for member in lost}
        return [f"{rescued.root.name}/{rescued.path.name}" for rescued in found if str(rescued.root) in roots]

    def _rest(
        self, decision: restarts.RestartDecision, ending: Ending, verdict: ExitVerdict
    ) -> ExitVerdict | None:
        """Between two incarnations: the back-off, or a pause. Returns the verdict that applies if the
        launcher is asked to stop."""
        until = time.monotonic() + decision.delay
        while (left := until - time.monotonic()) > 0 or restarts.paused(ending.members):
            heard = self._inbox.wait(min(left, _PAUSE_TICK) if left > 0 else _PAUSE_TICK)
            if heard is None:
                continue
            if not isinstance(heard, Notice) and heard.signum == signal.SIGINT:
                return ExitVerdict(Result.STOPPED, 128 + signal.SIGINT, "interrupted by a person")
            notice = as_notice(heard, self._signals, self._options.grace)
            if notice is None:
                continue
            log.info("Got %s between two incarnations: not starting another one", notice.reason)
            if verdict.result is Result.SAVED:
                return verdict
            code = 128 + (notice.signum or signal.SIGTERM)
            return ExitVerdict(Result.STOPPED, code, f"{notice.reason} came before the restart")
        return None

    def linger(self) -> None:
        """Slurm kills a job that it requeues. A job that exits before that may count as completed and not be
        requeued."""
        until = time.monotonic() + self._options.linger
        while (left := until - time.monotonic()) > 0:
            heard = self._inbox.wait(left)
            if heard is not None and (
                isinstance(heard, Notice) or heard.signum in (signal.SIGTERM, signal.SIGINT)
            ):
                return
        log.warning("Slurm has not ended this job after %.0f s: exiting", self._options.linger)


def locate(command: str, environ: Mapping[str, str]) -> str:
    """The program that a shell would run."""
    if os.sep in command:
        tried = [command]
    else:
        tried = [
            os.path.join(folder or ".", command)
            for folder in environ.get("PATH", os.defpath).split(os.pathsep)
        ]
    there = [path for path in tried if os.path.exists(path)]
    for path in there:
        if os.path.isfile(path) and os.access(path, os.X_OK):
            return path
    if there:
        what = "is a directory" if os.path.isdir(there[0]) else f"is not executable. Run: chmod +x {there[0]}"
        raise CannotStart(f"{there[0]} {what}", NOT_EXECUTABLE)
    raise CannotStart(f"{command}: command not found. Is it installed, and is it in PATH?", NOT_FOUND)


def _sources(options: LaunchOptions, platform: str) -> Sequence[NoticeSource]:
    from lastcall.notices import sources

    return sources.build(options.stop_file, options.cloud, platform == "slurm")


@contextlib.contextmanager
def _listening(sources: Sequence[NoticeSource], notify: Callable[[Notice], None]) -> Iterator[None]:
    started = []
    try:
        for source in sources:
            source.start(notify)
            started.append(source)
        yield
    finally:
        for source in started:
            source.stop()


@contextlib.contextmanager
def _registry() -> Iterator[registry.Registry]:
    try:
        folder = Path(tempfile.mkdtemp(prefix="lastcall-run-"))
    except OSError as error:
        settings.fail(f"cannot create a temporary folder: {error}. Set TMPDIR to a writable directory.")
    book = registry.Registry(folder)
    try:
        book.sign(dataclasses.asdict(identity.Process.own()))
    except OSError as error:  # a full TMPDIR: then the processes below cannot detect that this one was killed
        log.warning(
            "Could not record the launcher's process ID (%s): if the launcher is killed, the training below "
            "it continues",
            error,
        )
    try:
        yield book
    finally:
        shutil.rmtree(folder, ignore_errors=True)
