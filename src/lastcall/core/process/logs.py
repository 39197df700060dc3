"""Log lines reach the user even without a logging configuration, and never delay a rescue: for the time of a
session only.

A handler takes its lock and writes. Where the main thread is stuck in that write (a full pipe without a
reader), a side thread that logs would wait for it, and the agent logs before it acts. So lines of side
threads go through a queue to a thread of their own; lines of the main thread, which is the one that can be
stuck, go straight out.
"""

from __future__ import annotations

import logging
import os
import queue
import threading

_NAME = "lastcall"
_DRAIN_SECONDS = 2.0


class Visible:
    """While entered, INFO lines of ours go to stderr, unless the application has set up logging."""

    def __init__(self, level: str) -> None:
        self._level = level
        self._handler: logging.Handler | None = None
        self._before = logging.NOTSET
        self._deferral = _DeferredRecords()

    def __enter__(self) -> Visible:
        logger = logging.getLogger(_NAME)
        self._before = logger.level
        if logger.level == logging.NOTSET:
            logger.setLevel(self._level)
        if not logger.hasHandlers():
            self._handler = logging.StreamHandler()
            self._handler.setFormatter(
                logging.Formatter("%(asctime)s %(levelname)s lastcall: %(message)s", "%H:%M:%S")
            )
            logger.addHandler(self._handler)
        self._deferral.begin(logger)
        return self

    def __exit__(self, *_: object) -> None:
        logger = logging.getLogger(_NAME)
        self._deferral.end(logger)
        logger.setLevel(self._before)
        if self._handler is not None:
            logger.removeHandler(self._handler)
            self._handler = None


class _DeferredRecords(logging.Filter):
    """Takes the records of side threads out of the logger's way, and hands them to its handlers on a thread
    of its own."""

    def __init__(self) -> None:
        super().__init__()
        self._records: queue.SimpleQueue[logging.LogRecord | threading.Event | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def begin(self, logger: logging.Logger) -> None:
        self._thread = threading.Thread(target=self._serve, args=(logger,), name="lastcall-log", daemon=True)
        self._thread.start()
        logger.addFilter(self)

    def end(self, logger: logging.Logger) -> None:
        logger.removeFilter(self)
        self._records.put(None)
        if self._thread is not None:
            self._thread.join(_DRAIN_SECONDS)

    def filter(self, record: logging.LogRecord) -> bool:
        if isinstance(record.args, tuple):
            record.args = tuple(map(_on_one_line, record.args))
        thread = self._thread
        if (
            thread is None
            or not thread.is_alive()
            or threading.current_thread() in (thread, threading.main_thread())
        ):
            return True
        record.msg, record.args = record.getMessage(), None  # the arguments may change until it is written
        self._records.put(record)
        return False

    def drain(self, seconds: float) -> None:
        """Until what is queued now has been written, or the time is over."""
        written = threading.Event()
        self._records.put(written)
        written.wait(seconds)

    def _serve(self, logger: logging.Logger) -> None:
        while (record := self._records.get()) is not None:
            if isinstance(record, threading.Event):
                record.set()
            else:
                logger.callHandlers(record)


def _on_one_line(value: object) -> object:
    """Names of files and directories, and errors that quote them, may hold anything: a line of the log stays
    one line, and a terminal never executes a file name."""
    if isinstance(value, str | os.PathLike | BaseException):
        text = str(value)
        if not text.isprintable():
            return "".join(
                sign if sign.isprintable() else sign.encode("unicode_escape").decode() for sign in text
            )
    return value


def drain(seconds: float) -> None:
    """Wait for the queued lines of a session, if there is one: the process is about to leave."""
    for deferral in [one for one in logging.getLogger(_NAME).filters if isinstance(one, _DeferredRecords)]:
        deferral.drain(seconds)
