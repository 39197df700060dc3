"""Writes events and progress, and keeps the launcher informed, on a thread of its own: a metric on a busy GPU
or a dead network disk may block it for long, and neither the agent nor the training thread must wait for
that."""

from __future__ import annotations

import threading

from lastcall.core.context import NoticeContext
from lastcall.core.notice.launcher_link import LauncherLink

_EVERY = 1.0  # seconds


class EventWriter:
    def __init__(self, context: NoticeContext, link: LauncherLink, stopping: threading.Event) -> None:
        self._context = context
        self._link = link
        self._stopping = stopping
        self._thread = threading.Thread(target=self._write, name="lastcall-events", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def join(self, timeout: float) -> None:
        """`stopping` is set: the last events are written."""
        self._thread.join(timeout)

    def close(self) -> None:
        """Write the last events now, from any thread: the process is about to end."""
        context = self._context
        context.events.close()
        context.progress.flush()
        context.progress.flush()  # the last report was made within a step: where the run is comes after it

    def _write(self) -> None:
        context = self._context
        while not self._stopping.wait(_EVERY):
            context.events.flush()
            context.progress.flush()
            self._link.tell(step=context.step)
        self.close()
