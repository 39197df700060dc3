"""Whole sessions of several ranks as threads of one process, with a state of plain memory and a loop that
waits for the others at each step, as an all-reduce does."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from helpers.core.bare_core import block, content, noise, put
from helpers.ranks.thread_ranks import PATIENCE, at_once
from lastcall import clock as clocks
from lastcall import errors
from lastcall.core import session as sessions
from lastcall.core.context import RunContext
from lastcall.core.joint.many_ranks import ManyRanks
from lastcall.core.notice.ending import FINISHED
from lastcall.core.notice.inbox import Inbox
from lastcall.core.notice.periodic import PeriodicSaver
from lastcall.core.ranks.world import World
from lastcall.core.session import Session
from lastcall.core.store.memory import MemoryStore
from lastcall.core.subject import Stored
from lastcall.core.sync.gate import Gate
from lastcall.settings import JITCheckpointConfig, PeriodicCheckpointConfig
from lastcall.storage import files as storage
from lastcall.types import Capture, Group, Notice, Outcome, Share, TensorEntry

NBYTES = 4096
CLOCK = clocks.Clock()


class Subject:
    """A tensor that all ranks hold, and a number of the rank's own: a core.subject.Subject."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size
        self.step = 0
        self.gate = Gate()
        self.live = block(noise(NBYTES, 0))
        self.own = block(noise(16, f"own {rank}"))
        self.step_seconds: float | None = 0.01
        self.resumed: dict[str, object] | None = None
        self.targets: dict[str, dict[str, object]] = {}
        self.metrics: dict[str, float] = {}

    @property
    def boundary(self) -> tuple[int, int]:
        return self.step, 0

    @property
    def ordinal(self) -> int:
        return self.step

    @property
    def settled(self) -> bool:
        return content(self.live) == noise(NBYTES, self.step)

    def capture(self) -> Capture:
        share = Share((NBYTES,), (0,), tuple(range(self.size)))
        entries = (
            TensorEntry("w", "U8", (NBYTES,), self.live, share),
            TensorEntry("own", "U8", (16,), self.own),
        )
        return Capture(self.step, {"rank": self.rank, "step": self.step}, (Group("model", entries, rank=0),))

    rescue = behind_gate = outline = capture

    def mutate(self) -> None:
        self.gate.enter()
        put(self.live, noise(NBYTES, self.step + 1))
        self.gate.leave()
        self.step += 1

    def untouched(self) -> bool:
        return True

    def unrescuable(self) -> str:
        return ""

    def numbers(self) -> dict[str, float]:
        return self.metrics

    def copy_every_boundary(self) -> None: ...
    def retry_copy(self) -> None: ...
    def stop_at_next_boundary(self) -> None: ...
    def join(self, run: str, incarnation: int, folder: Path) -> None: ...

    def holdings(self) -> tuple[tuple[int, ...], ...]:
        return (tuple(range(self.size)),)

    def unreplicated_digest(self) -> str:
        return ""

    def part_of(self, rank: int, step: int, mine: Capture) -> Capture | None:
        return None

    loads_by_itself = False
    whole = False

    @property
    def saved_step(self) -> int | None:
        return None if self.resumed is None else int(str(self.resumed["step"]))

    def prepare(self, document: dict[str, object], stored: Stored) -> Subject:
        self.resumed = document
        self.targets = {"model": {"w": self.live, "own": self.own}}
        return self

    def finish(self) -> None:
        assert self.resumed is not None
        self.step = int(str(self.resumed["step"]))


class Crew:
    """`size` ranks that train. `hook(rank, step)` is called before each step of each rank, and may do
    whatever training does."""

    def __init__(
        self,
        root: Path | Sequence[Path],
        size: int,
        hook: Callable[[int, int], None] = lambda rank, step: None,
        *,
        periodic: PeriodicCheckpointConfig | None = None,
        files: dict[int, storage.Files] | None = None,
        lockstep: bool = True,
        ending: str = FINISHED,
        subject: type[Subject] = Subject,
        **jit: Any,
    ) -> None:
        """`root`: one for all, or one for each. `ending`: why training is over."""
        roots = [root] * size if isinstance(root, Path) else root
        self.store = MemoryStore()
        self.hook = hook
        self.ending = ending
        self.size = size
        self.meeting = threading.Barrier(size) if lockstep else None
        self.subjects = [subject(rank, size) for rank in range(size)]
        config = JITCheckpointConfig(
            **{"kill_wait": 0.0, "spare": False, "huge_pages": False, "threads": 1, **jit}, environ={}
        )
        saves = periodic or PeriodicCheckpointConfig(environ={})
        self.contexts = [
            RunContext.create(
                roots[rank],
                mine,
                config,
                saves,
                files=(files or {}).get(rank),
                world=World(rank, size, self.store.clone),
            )
            for rank, mine in enumerate(self.subjects)
        ]
        self.inboxes = [Inbox.of_run(context) for context in self.contexts]
        self.sessions: dict[int, Session] = {}  # of the ranks that have begun
        for context, mine in zip(self.contexts, self.subjects, strict=True):
            mine.gate = context.gate

    def notify(self, rank: int, reason: str = "SIGTERM", grace: float = PATIENCE) -> None:
        now = CLOCK.now()
        self.inboxes[rank].notify(Notice("signal", reason, now, now + grace, 15))

    def begin(self, rank: int) -> Session:
        self.sessions[rank] = sessions.begin(self.contexts[rank], self.inboxes[rank])
        return self.sessions[rank]

    @property
    def outcomes(self) -> list[Outcome | None]:
        return [context.outcome.value for context in self.contexts]

    def train(self, steps: int | list[int]) -> list[Any]:
        """How each rank has ended: the step it finished at, or what was raised."""
        until = [steps] * self.size if isinstance(steps, int) else steps
        return at_once(*(partial(self._one, rank, until[rank]) for rank in range(self.size)))

    def _one(self, rank: int, steps: int) -> int:
        subject, session = self.subjects[rank], self.begin(rank)
        try:
            while subject.step < steps:
                self.hook(rank, subject.step)
                if self.meeting is not None:
                    self.meeting.wait(PATIENCE)
                subject.mutate()
                session.at_boundary()
            session.finish(self.ending)
            return subject.step
        except Exception as error:
            instead = session.failed(error)
            if self.meeting is not None:
                self.meeting.abort()  # as the connections do that end with this process
            raise instead or error from None
        finally:
            session.stop()


def strategy(session: Session) -> ManyRanks:
    """How a rank of many answers a notice."""
    found = session._strategy
    assert isinstance(found, ManyRanks)
    return found


def answered(session: Session) -> bool:
    """Whether a checkpoint that is as good as it gets answers the notice."""
    return session._answer.whole


def periodic(session: Session) -> PeriodicSaver:
    return session._periodic


def saved(results: list[Any]) -> None:
    """All have left after a save."""
    for result in results:
        assert isinstance(result, errors.Preempted) and result.code == 75, results
