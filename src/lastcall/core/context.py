"""What every part of one incarnation shares: frozen, so that a part that has it cannot replace anything of
it."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from lastcall import clock as clocks
from lastcall import memory
from lastcall.core.checkpoint import retention
from lastcall.core.checkpoint.catalog import PRIVATE, Catalog
from lastcall.core.outcome import OutcomeCell
from lastcall.core.progress.report import ProgressReport
from lastcall.core.ranks.world import World
from lastcall.core.save.budget import Budget
from lastcall.core.subject import Subject
from lastcall.core.sync.gate import Gate
from lastcall.core.sync.latch import Latch
from lastcall.events import EventLog, Progress
from lastcall.settings import JITCheckpointConfig, PeriodicCheckpointConfig
from lastcall.storage import files as storage

NOWHERE = Path(os.devnull) / PRIVATE  # a folder that cannot exist: what is written there is dropped


@dataclass(frozen=True)
class NoticeContext:
    """What answering a notice needs, whether a session saves, a script itself or Ray's report."""

    jit: JITCheckpointConfig
    clock: clocks.Clock
    latch: Latch
    budget: Budget
    outcome: OutcomeCell
    events: EventLog
    progress: Progress
    report: ProgressReport

    @classmethod
    def beside(
        cls, private: Path | None, jit: JITCheckpointConfig, rank: int = 0, clock: clocks.Clock | None = None
    ) -> NoticeContext:
        """One that writes its events and its progress into this folder; None: nowhere."""
        clock = clock or clocks.Clock()
        return cls(jit, clock, Latch(), Budget(clock), OutcomeCell(), *_logs(private or NOWHERE, rank, clock))

    @property
    def step(self) -> int:
        """Completed steps, for events and for the launcher."""
        return 0 if self.progress.where is None else self.progress.where()

    def copy_every_boundary(self) -> None:
        """A notice has come, and a rescue may need the copy of any boundary. A save of the script's own needs
        none."""


@dataclass(frozen=True)
class RunContext(NoticeContext):
    """The same with what a session saves, and where."""

    subject: Subject
    periodic: PeriodicCheckpointConfig
    catalog: Catalog
    gate: Gate
    world: World
    allocate: Callable[[int], memory.Buffer]
    run: str  # the run's name, where it is known from outside; checkpoints of another run are then left alone
    background_saves: bool  # periodic saves are wanted: memory is kept for a copy of the state

    def copy_every_boundary(self) -> None:
        self.subject.copy_every_boundary()

    @classmethod
    def create(
        cls,
        root: Path,
        subject: Subject,
        jit: JITCheckpointConfig,
        periodic: PeriodicCheckpointConfig,
        *,
        clock: clocks.Clock | None = None,
        files: storage.Files | None = None,
        allocate: Callable[[int], memory.Buffer] = memory.PageBuffer,
        world: World | None = None,
        run: str = "",
        background_saves: bool | None = None,
    ) -> RunContext:
        if background_saves is None:
            background_saves = periodic.save_strategy != "no"
        world = world or World()
        # Absolute at once: a script may change its working directory.
        catalog = Catalog(root.absolute(), files or storage.Files(), world.rank)
        catalog.keep = retention.Keep(periodic.save_total_limit, periodic.monitor, periodic.mode)
        clock = clock or clocks.Clock()
        events, progress, report = _logs(catalog.private, world.rank, clock)
        progress.where = lambda: subject.step
        return cls(
            jit, clock, Latch(), Budget(clock), OutcomeCell(), events, progress, report,
            subject, periodic, catalog, Gate(), world, allocate, run, background_saves,
        )  # fmt: skip


def _logs(private: Path, rank: int, clock: clocks.Clock) -> tuple[EventLog, Progress, ProgressReport]:
    name = f"progress-{rank}.json" if rank else "progress.json"
    events, progress = EventLog(private / f"events-{rank}.jsonl", clock), Progress(private / name, clock)
    return events, progress, ProgressReport(progress, events, clock)
