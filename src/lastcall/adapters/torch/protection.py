"""What a protected run needs from its process, whatever the framework: signals, children that outlive the group's SIGTERM, visible log
lines, and a way out that says what happened."""

from __future__ import annotations

import dataclasses
import logging
import signal
import threading
from collections.abc import Callable

from lastcall import errors, settings
from lastcall.adapters.torch.workers import WorkerShield
from lastcall.core import exits, logs
from lastcall.core.session import Session
from lastcall.notices.files import StopFile
from lastcall.notices.signals import SignalListener
from lastcall.settings import JITCheckpointConfig
from lastcall.types import Notice, Outcome

log = logging.getLogger("lastcall")
taken = ""  # who else gets the notices of this process: a framework's adapter above ours. Zero-code runs then stand back


class Guarded:
    """A process whose signals and stop file are listened to: `on_signal(number, how often it came)` and `on_notice(notice)`, each on a
    thread of its own."""

    def __init__(self, jit: JITCheckpointConfig, on_signal: Callable[[int, int], None], on_notice: Callable[[Notice], None]) -> None:
        self._jit = jit
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
        self._listener = SignalListener(self._jit.signals, self._on_signal)
        try:
            self._shield.install([signal.Signals[name] for name in self._jit.signals])
        except RuntimeError as error:
            self._visible.__exit__()
            self._listener = None
            raise errors.BusyError(
                "a run is protected in this process already, and two cannot share its signals. Leave its with block first."
            ) from error
        try:
            self._listener.start()
        except RuntimeError as error:
            log.warning("Signals are not listened to: %s. Notices must come another way", error)
            self._listener = None
        if self._jit.stop_file is not None:
            self._stop_file = StopFile.named(self._jit.stop_file)
            self._stop_file.start(self._heard)

    def _heard(self, notice: Notice) -> None:
        self._on_notice(dataclasses.replace(notice, deadline=notice.at + self._jit.grace) if notice.deadline is None else notice)

    @property
    def listening(self) -> bool:
        """Whether there are signals that it hears."""
        return self._listener is not None and bool(self._jit.signals)

    def rearm(self) -> None:
        """asyncio takes the wakeup fd away when it closes a loop."""
        if self._listener is not None:
            self._listener.rearm()

    def let_go(self, *, ignore: bool = False) -> None:
        """Handlers go. A process that has saved and is on its way out ignores further signals: a second SIGTERM during the
        interpreter's shutdown must not turn its exit code into another."""
        if self._stop_file is not None:
            self._stop_file.stop()
        self._shield.uninstall()
        if self._listener is not None:
            self._listener.stop(ignore=ignore)
        self._visible.__exit__()


class Protection(Guarded):
    """One with a session, which gets the notices."""

    def __init__(self, session: Session, jit: JITCheckpointConfig) -> None:
        super().__init__(jit, self._notify, session.notify)
        self._session = session

    def _notify(self, signum: int, count: int) -> None:
        session = self._session
        if signum == signal.SIGINT and count > 1:
            session.serving.interrupted_again(signum)
        now = session.clock.now()
        session.notify(Notice("signal", signal.Signals(signum).name, now, now + self._jit.grace, signum))

    def leave(self, left: BaseException | None) -> BaseException | None:
        """After everything is closed: the process ends here if it must not go on. Otherwise returns what is to be raised: `left`, or
        that the run must come again, where it had finished and was told to stop before its end was in the mirror."""
        session = self._session
        if left is None and session.outcome is Outcome.SAVED:
            left = session.serving.preempted()
        notice = session.latch.notice
        if session.outcome is Outcome.NOT_SAVED and notice is not None and notice.signum is not None:
            with logs.Visible(self._jit.log_level):
                log.error("Nothing was saved: dying of %s", notice.reason)
            exits.die_of(notice.signum)
        if isinstance(left, errors.Preempted) and threading.current_thread() is not threading.main_thread():
            exits.leave(int(left.code or 0))  # a SystemExit ends its own thread only: the process would go on, and end with 0
        return left
