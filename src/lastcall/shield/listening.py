"""What a protected run needs from its process, with any framework: signals, children that outlive the group's
SIGTERM, visible log lines, and an exit that reports what happened."""

from __future__ import annotations

import dataclasses
import logging
import signal
import threading
from collections.abc import Callable, Sequence

from lastcall import errors, settings
from lastcall.core.context import RunContext
from lastcall.core.notice.inbox import Inbox
from lastcall.core.notice.launcher_link import LauncherLink
from lastcall.core.process import exits, logs
from lastcall.notices.files import StopFile
from lastcall.notices.signals import SignalListener
from lastcall.settings import JITCheckpointConfig
from lastcall.shield.child_shield import WorkerShield
from lastcall.types import Notice, Outcome

log = logging.getLogger("lastcall")
taken = ""  # set by a framework's adapter that handles this process's notices. Zero-code runs then do nothing


class Guarded:
    """A process whose signals and stop file are listened to: `on_signal(number, how often it came)` and
    `on_notice(notice)`, each on a thread of its own."""

    def __init__(
        self,
        jit: JITCheckpointConfig,
        on_signal: Callable[[int, int], None],
        on_notice: Callable[[Notice], None],
        signals: Sequence[str] | None = None,
    ) -> None:
        """`signals`: the signals to listen to, if more than the settings name."""
        self._jit = jit
        self._signals = tuple(jit.signals if signals is None else signals)
        self._on_signal = on_signal
        self._on_notice = on_notice
        self._stop_file: StopFile | None = None
        self._visible = logs.Visible(jit.log_level)
        self._shield = WorkerShield()
        self._listener: SignalListener | None = None

    def begin(self) -> None:
        self._visible.__enter__()
        for message in settings.unknown_variables():
            log.warning("%s", message)
        Afterwards.end()
        self._listener = SignalListener(self._signals, self._on_signal)
        try:
            self._shield.install([signal.Signals[name] for name in self._signals])
        except RuntimeError as error:
            self._visible.__exit__()
            self._listener = None
            raise errors.BusyError(
                "a run is already protected in this process, and two cannot share its signals. Exit its with "
                "block first."
            ) from error
        try:
            self._listener.start()
        except RuntimeError as error:
            log.warning("Cannot listen to signals: %s. Notices must come from another source", error)
            self._listener = None
        if self._jit.stop_file is not None:
            self._stop_file = StopFile.named(self._jit.stop_file)
            self._stop_file.start(self._heard)

    def _heard(self, notice: Notice) -> None:
        self._on_notice(
            dataclasses.replace(notice, deadline=notice.at + self._jit.grace)
            if notice.deadline is None
            else notice
        )

    @property
    def listening(self) -> bool:
        """Whether it listens to any signals."""
        return self._listener is not None and bool(self._jit.signals)

    def rearm(self) -> None:
        """asyncio takes the wakeup fd away when it closes a loop."""
        if self._listener is not None:
            self._listener.rearm()

    def settle(self) -> None:
        """Report every signal that has arrived so far."""
        if self._listener is not None:
            self._listener.settle()

    def let_go(self, *, ignore: bool = False) -> None:
        """Remove the handlers. A process that has saved and is exiting ignores further signals: a second
        SIGTERM during the interpreter's shutdown must not change its exit code."""
        if self._stop_file is not None:
            self._stop_file.stop()
        self._shield.uninstall()
        if self._listener is not None:
            self._listener.stop(ignore=ignore)
        self._visible.__exit__()


class Protection(Guarded):
    """A listener whose notices go to the inbox of a session."""

    def __init__(self, context: RunContext, inbox: Inbox) -> None:
        super().__init__(
            context.jit, self._notify, inbox.notify, (*context.jit.signals, *_hangup(context.jit))
        )
        self._context = context
        self._inbox = inbox

    def _notify(self, signum: int, count: int) -> None:
        context = self._context
        # what is being written is not committed, and is removed on start
        if signum == signal.SIGINT and count > 1:
            log.warning("Got %s again: exiting at once", signal.Signals(signum).name)
            exits.leave(128 + signum)
        if signal.Signals(signum).name not in self._jit.signals and self._jit.on_error != "save":
            log.warning(
                "Got SIGHUP at step %d, which is not saved because LASTCALL_ON_ERROR is 'leave'",
                context.subject.step,
            )
            exits.die_of(signum)
        self._inbox.notify_signal(signum)

    def leave(
        self, left: BaseException | None, preempted: Callable[[], errors.Preempted]
    ) -> BaseException | None:
        """After everything is closed: the process ends here if it must not continue. Otherwise returns what
        to raise: `left`, or that the run must be restarted, if it had finished and got a notice before its
        end was in the mirror."""
        outcome, notice = self._context.outcome.value, self._context.latch.notice
        if left is None and outcome is Outcome.SAVED:
            left = preempted()
        if outcome is Outcome.NOT_SAVED and notice is not None and notice.signum is not None:
            with logs.Visible(self._jit.log_level):
                log.error("Nothing was saved: exiting with %s", notice.reason)
            exits.die_of(notice.signum)
        if isinstance(left, errors.Preempted) and threading.current_thread() is not threading.main_thread():
            # a SystemExit ends only its own thread: the process would continue, and exit with 0
            exits.leave(int(left.code or 0))
        if isinstance(left, errors.Preempted) and notice is not None:
            exits.see_out(
                int(left.code or 0),
                notice.at + self._jit.grace if notice.deadline is None else notice.deadline,
            )
        return left


def _hangup(jit: JITCheckpointConfig) -> tuple[str, ...]:
    """SIGHUP, unless it is configured: a terminal that hangs up ends the run as an exception would. Under
    nohup it is ignored, and stays ignored."""
    free = jit.signals and "SIGHUP" not in jit.signals and signal.getsignal(signal.SIGHUP) is signal.SIG_DFL
    return ("SIGHUP",) if free else ()


class Afterwards:
    """Training has finished, and the rest of the script runs (an evaluation, an export) below `lastcall run`.
    A notice still ends it, as it would without lastcall; but the launcher learns that the same command must
    be run again, whatever is in between."""

    _listener: SignalListener | None = None

    @classmethod
    def begin(cls, context: RunContext, link: LauncherLink) -> None:
        jit = context.jit
        if context.outcome.value is not Outcome.FINISHED or not link.launched:
            return
        names = [
            name
            for name in jit.signals
            if name != "SIGINT" and signal.getsignal(signal.Signals[name]) is signal.SIG_DFL
        ]

        def on_signal(signum: int, count: int) -> None:
            if not listener.hears(signum):
                return  # the script has since installed its own handler
            link.tell(outcome=Outcome.SAVED.value)
            with logs.Visible(jit.log_level):
                log.warning(
                    "Got %s after training had finished at step %d, during the rest of the script: it must "
                    "be run again. "
                    "Exiting with code %d",
                    signal.Signals(signum).name,
                    context.subject.step,
                    jit.exit_code,
                )
                exits.leave(jit.exit_code)

        listener = SignalListener(names, on_signal)
        try:
            listener.start()
        except RuntimeError:  # another listener is active, or none can be
            return
        cls._listener = listener

    @classmethod
    def end(cls) -> None:
        """Another run starts in this process."""
        if cls._listener is not None:
            cls._listener.stop()
            cls._listener = None
