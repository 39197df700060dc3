"""What a session has reported: its progress and its events, on a clock that the test turns."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Self

from lastcall import events, testing
from lastcall.core.progress.report import ProgressReport


class Reported:
    def __init__(self, folder: Path) -> None:
        self.clock = testing.FakeClock()
        self.log = events.EventLog(folder / "events-0.jsonl", self.clock)
        self.progress = events.Progress(folder / "progress.json", self.clock, total=200)
        self.report = ProgressReport(self.progress, self.log, self.clock)

    def at(self, step: int, *more: Any, seconds: float = 1.0) -> Self:
        self.clock.advance(seconds)
        self.progress.update(step, *more)
        self.progress.flush()
        return self

    def event(self, kind: str, **fields: object) -> Self:
        self.log.emit(kind, **fields)
        return self
