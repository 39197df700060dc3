"""One process that answers a notice, without its agent: a test does what both threads would do, on a clock
turned by hand."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

from helpers.core.answers import NOW, a_notice
from helpers.ranks.sessions import Subject
from lastcall.core.checkpoint.record import Entry
from lastcall.core.checkpointer import Checkpointer
from lastcall.core.context import RunContext
from lastcall.core.notice.answer import Answer
from lastcall.core.notice.one_process import OneProcess
from lastcall.core.notice.periodic import PeriodicSaver
from lastcall.core.notice.phases import Phase, Phases
from lastcall.core.startup.startup import Startup
from lastcall.settings import JITCheckpointConfig, PeriodicCheckpointConfig
from lastcall.storage import files as storage
from lastcall.testing import FakeClock
from lastcall.types import Capture, Notice


class Plain(Subject):
    """A subject whose answers a test can change."""

    def __init__(self) -> None:
        super().__init__(0, 1)
        self.barred = ""  # why a rescue must not be tried
        self.touched = False  # something has changed since the last boundary
        self.inexact = ""  # why what a rescue finds is not exact
        self.before_capture: Callable[[], object] = lambda: None
        self.stops = 0

    def capture(self) -> Capture:
        self.before_capture()
        return super().capture()

    def rescue(self) -> Capture:  # type: ignore[override]
        return dataclasses.replace(self.capture(), exact=not self.inexact, because=self.inexact)

    outline = behind_gate = Subject.capture

    def untouched(self) -> bool:
        return not self.touched

    def unrescuable(self) -> str:
        return self.barred

    def stop_at_next_boundary(self) -> None:
        self.stops += 1


class Solo:
    """`steps`: how far training is when the test begins."""

    def __init__(self, root: Path, *, files: storage.Files | None = None, steps: int = 3, **jit: Any) -> None:
        self.clock = FakeClock(NOW)
        self.subject = Plain()
        config = JITCheckpointConfig(**{"spare": False, "huge_pages": False, "threads": 1, **jit}, environ={})
        saves = PeriodicCheckpointConfig(environ={})
        self.context = RunContext.create(root, self.subject, config, saves, clock=self.clock, files=files)
        self.subject.gate = self.context.gate
        self.started = Startup(self.context, lambda: False).run()
        self.events: list[tuple[str, dict[str, object]]] = []
        self.context.events.heard = lambda at, kind, facts: self.events.append((kind, dict(facts)))
        saver = self.started.saver
        self.phases = Phases(self.context.events.emit)
        self.answer = Answer(self.context, self.phases)
        self.checkpointer = Checkpointer(self.context, saver, self.started.committed)
        self.periodic = PeriodicSaver(
            self.context, self.checkpointer, saver, self.started.engine, None, self.started.best
        )
        self.strategy = OneProcess(self.context, self.answer, self.checkpointer, self.periodic, saver)
        self.train(steps)

    def train(self, steps: int) -> None:
        for _ in range(steps):
            self.subject.mutate()

    def notify(self, phase: Phase | None = None, grace: float = 30.0) -> Notice:
        """A notice comes, and is answered as far as to this phase."""
        notice = a_notice(grace, at=self.clock.now())
        self.context.latch.offer(notice)
        self.answer.begin(notice)
        if phase is not None:
            self.enter(phase)
        return notice

    def enter(self, phase: Phase) -> None:
        order = [Phase.WAITING, Phase.HOLDING, Phase.BOUNDARY, Phase.INSTANT, Phase.SAVING_ASIDE]
        for each in order[: order.index(phase) + 1] if phase in order else ():
            self.phases.enter(each)

    @property
    def entries(self) -> list[Entry]:
        return self.context.catalog.entries()

    @property
    def kept(self) -> list[tuple[int, str, str]]:
        """The checkpoints, newest first: step, kind and reason."""
        return [(entry.record.step, entry.record.kind.value, entry.record.reason) for entry in self.entries]

    def said(self, kind: str) -> list[dict[str, object]]:
        return [facts for named, facts in self.events if named == kind]

    def __enter__(self) -> Solo:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.started.engine.close()
        self.context.catalog.close()
