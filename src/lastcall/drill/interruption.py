"""Ctrl-C, SIGTERM and SIGHUP to the drill itself: recorded here, acted on where the drill waits."""

from __future__ import annotations

import signal
from types import FrameType
from typing import Any

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class DrillInterrupted(Exception):
    """The user wants the drill to end."""

    def __init__(self, signum: int) -> None:
        super().__init__(signal.Signals(signum).name)
        self.signum = signum


class Interruptions:
    """While the block lasts, these signals only count. The first ends the drill, which stops the run; a
    second kills the run."""

    def __init__(self) -> None:
        self.heard: list[int] = []
        self._before: dict[int, Any] = {}

    def check(self) -> None:
        if self.heard:
            raise DrillInterrupted(self.heard[0])

    def _note(self, signum: int, frame: FrameType | None) -> None:
        self.heard.append(signum)

    def __enter__(self) -> Interruptions:
        for signum in _SIGNALS:
            if signal.getsignal(signum) is not signal.SIG_IGN:  # nohup, a job in the background
                self._before[signum] = signal.signal(signum, self._note)
        return self

    def __exit__(self, *exc: object) -> None:
        for signum, handler in self._before.items():
            signal.signal(signum, handler)
