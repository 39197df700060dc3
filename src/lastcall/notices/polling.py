"""The base of polling sources: one thread each, failures that do not affect training, and times."""

from __future__ import annotations

import datetime
import email.utils
import logging
import math
import threading
from collections.abc import Callable

from lastcall import clock as clocks
from lastcall.types import Notice

log = logging.getLogger("lastcall")

DONE = math.inf  # what look() returns when there is nothing left to poll for
# a thread may hang in a name look-up, which nothing interrupts; it is a daemon and reports nothing more
_JOIN_SECONDS = 1.0


class Trouble(Exception):
    """Polling failed. Each `kind` is logged once; the message ends the sentence that begins with the source's
    title."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


class Poller:
    """Calls look() on a daemon thread until stop(). Nothing that look() does can raise into the process.

    May be started again after stop(): `lastcall run` does so when it restarts a command in place, and an
    announcement that is still valid is then reported again.
    """

    name = ""  # Notice.source
    title = ""  # its name in log lines
    interval = 1.0  # seconds between two polls, and before the first poll after a failure
    # seconds between two polls after many failures: half of the shortest notice a cloud gives (30 s)
    most = 15.0

    def __init__(self, clock: clocks.Clock | None = None) -> None:
        self.clock = clock or clocks.Clock()
        self._starting = threading.Lock()  # detection starts a source on one thread while another may stop it
        self._thread: threading.Thread | None = None
        self._stopping = threading.Event()
        self._notify: Callable[[Notice], None] = _ignore
        self._kinds: set[str] = set()  # the kinds of failures that were logged as warnings

    # ---- for a source to fill in ---------------------------------------------------------------------------

    def begin(self) -> None:
        """Before the thread starts: forget what was reported before."""

    def look(self) -> float:
        """Poll once, tell() what is new, and return the seconds until the next poll."""
        raise NotImplementedError

    def interrupt(self) -> None:
        """Make a look() that waits on another thread return."""

    # ---- for all sources -----------------------------------------------------------------------------------

    def start(self, notify: Callable[[Notice], None]) -> None:
        with self._starting:
            if self._thread is not None:
                return
            self._notify = notify
            self._stopping = threading.Event()  # a new one: the previous thread may not have ended yet
            self.begin()
            self._thread = threading.Thread(
                target=self._run, args=[self._stopping], name=f"lastcall-{self.name}", daemon=True
            )
            self._thread.start()

    def stop(self) -> None:
        with self._starting:
            thread, self._thread = self._thread, None
            if thread is None:
                return
            self._stopping.set()
        self.interrupt()
        if thread is not threading.current_thread():  # notify() itself may stop us
            thread.join(_JOIN_SECONDS)

    def tell(self, reason: str, deadline: float | None, at: float | None = None) -> None:
        if threading.current_thread() is not self._thread:
            return
        notice = Notice(self.name, reason, self.clock.now() if at is None else at, deadline)
        try:
            self._notify(notice)
        except Exception:
            log.exception("handling %r failed; still watching for notices", reason)

    def warn(self, kind: str, message: str, *arguments: object) -> None:
        """A warning the first time, a debug line afterwards."""
        level = logging.DEBUG if kind in self._kinds else logging.WARNING
        self._kinds.add(kind)
        log.log(level, message, *arguments)

    def _run(self, stopping: threading.Event) -> None:
        failures = 0
        while not stopping.is_set():
            try:
                delay = self.look()
                if failures:
                    log.info("%s: works again", self.title)
                failures = 0
            except Exception as error:
                if stopping.is_set():
                    return
                failures += 1
                self._failed(error)
                delay = min(self.most, self.interval * 2.0 ** min(failures - 1, 10))
            if delay == DONE:
                return
            stopping.wait(delay)

    def _failed(self, error: Exception) -> None:
        if isinstance(error, Trouble):
            self.warn(error.kind, "%s %s. Training continues; retrying", self.title, error)
        else:  # a bug of ours: it must not end the training
            self.warn(
                type(error).__name__,
                "%s: watching for notices failed with %r. Training continues; retrying",
                self.title,
                error,
            )


def _ignore(notice: Notice) -> None:
    pass


def monotonic(clock: clocks.Clock, wall: float) -> float:
    """A time of day as a deadline on the monotonic clock. A time in the past is due now."""
    return clock.now() + max(0.0, wall - clock.wall())


def instant(text: object) -> float | None:
    """Seconds since 1970 of "2017-09-18T08:22:00Z" or "Mon, 19 Sep 2016 18:29:47 GMT"; None for anything
    else."""
    if not isinstance(text, str):
        return None
    for parse in (datetime.datetime.fromisoformat, email.utils.parsedate_to_datetime):
        try:
            moment = parse(text.strip())
            return (moment if moment.tzinfo else moment.replace(tzinfo=datetime.UTC)).timestamp()
        except (ValueError, TypeError, IndexError, OverflowError):
            continue
    return None


def shown(wall: float) -> str:
    """A time of day for people, in their time zone."""
    try:
        return datetime.datetime.fromtimestamp(wall).astimezone().isoformat(" ", "seconds")
    except (ValueError, OverflowError, OSError):
        return f"{wall:.0f} seconds after 1970"
