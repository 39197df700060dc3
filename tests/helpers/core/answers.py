"""A notice that is answered on a clock turned by hand: a scripted strategy, and ways out of the process that
raise."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import pytest

from lastcall.core import timing
from lastcall.core.context import NoticeContext
from lastcall.core.notice.answer import Answer
from lastcall.core.notice.phases import Phase, Phases
from lastcall.core.notice.responder import Responder, Where
from lastcall.core.process import exits
from lastcall.settings import JITCheckpointConfig
from lastcall.testing import FakeClock
from lastcall.types import Notice

NOW = 1000.0
STEP = 0.25  # that the clock makes at each look


class Left(BaseException):
    """The process was left by force, with this code or by this signal."""


def nobody_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also: threads that wait for each other look again at once, since the clock does not go on by itself."""

    def leave(code: int) -> NoReturn:
        raise Left(code)

    def die_of(signum: int) -> NoReturn:
        raise Left(f"signal {signum}")

    monkeypatch.setattr(exits, "leave", leave)
    monkeypatch.setattr(exits, "die_of", die_of)
    monkeypatch.setattr(timing, "LOOK", 0.0)
    monkeypatch.setattr(timing, "TICK", 0.0)


def a_notice(
    grace: float | None = 30.0, *, at: float = NOW, source: str = "signal", signum: int | None = 15
) -> Notice:
    return Notice(source, "SIGTERM", at, None if grace is None else at + grace, signum)


class Stage:
    """A responder and its scripted `Strategy`, which this is. `on`: what happens when the responder calls it.
    `at`: what happens once the clock has come to a time (in seconds after the notice), as another thread
    would do it."""

    def __init__(self, root: Path, **jit: Any) -> None:
        self.clock = FakeClock(NOW)
        config = JITCheckpointConfig(**{"kill_wait": 3.0, "grace": 30.0, **jit}, environ={})
        self.context = NoticeContext.beside(root, config, clock=self.clock)
        self.changes: list[tuple[float, Phase, str]] = []
        self.phases = Phases(self._changed)
        self.wound_up = 0
        self.answer = Answer(self.context, self.phases, self._wind_up)
        self.responder = Responder(self.context, self.answer, self, self.look)
        self.called: list[str] = []
        self.on: dict[str, Callable[[], Any]] = {}
        self.seconds = 1.0  # that a save needs
        self.is_hurried = False
        self.where = Where(because="the next boundary")
        self.patience = 5.0  # that a boundary is waited for
        self.no_hope = ""
        self._later: list[tuple[float, Callable[[], object]]] = []

    def at(self, seconds: float, act: Callable[[], object]) -> None:
        self._later.append((NOW + seconds, act))

    def look(self) -> None:
        self.clock.advance(STEP)
        due = [each for each in self._later if each[0] <= self.clock.now()]
        self._later = [each for each in self._later if each not in due]
        for _, act in due:
            act()
        assert self.clock.now() < NOW + 1000, "the responder never returns"

    def run(self, notice: Notice | None = None, *, passing: bool = False) -> None:
        notice = notice or a_notice()
        if notice.source == "signal":
            self.context.latch.offer(notice)
        self.responder.run(notice, passing=passing)

    @property
    def names(self) -> list[Phase]:
        return [phase for _, phase, _ in self.changes]

    def when(self, phase: Phase) -> float:
        """Seconds after the notice at which this phase was entered."""
        return next(at for at, entered, _ in self.changes if entered is phase) - NOW

    def why(self, phase: Phase) -> str:
        return next(because for _, entered, because in self.changes if entered is phase)

    # ---- what the training thread does ---------------------------------------------------------------------

    def save(self) -> None:
        """It has come to its boundary, and leaves by itself."""
        self.answer.arrived = True
        self.phases.enter(Phase.SAVING)

    def save_and_leave(self) -> None:
        self.save()
        self.commit_and_leave()

    def commit_and_leave(self) -> None:
        self.answer.saved("saved checkpoint-5")
        self.phases.enter(Phase.LEAVING)

    # ---- the strategy --------------------------------------------------------------------------------------

    def needs(self, deadline: float) -> float:
        return self.seconds

    def announce(self, notice: Notice) -> None:
        self._call("announce")

    def hurried(self, notice: Notice) -> bool:
        return self.is_hurried

    def hold(self) -> None:
        self._call("hold")

    def decide(self) -> Where:
        self._call("decide")
        return self.where

    def boundary_until(self) -> float:
        self._call("boundary_until")
        return min(self.answer.deadline - self.seconds, self.clock.now() + self.patience)

    def hopeless(self, saving: bool) -> str:
        self._call("hopeless saving" if saving else "hopeless")
        return self.no_hope

    def aside(self, because: str) -> None:
        self._call("aside")

    def continues(self) -> bool:
        self._call("continues")
        return self.phases.try_enter(Phase.QUIET)

    def stuck(self) -> None:
        self._call("stuck")

    def fault(self) -> None:
        self._call("fault")

    def _call(self, name: str) -> None:
        if name not in self.called:
            self.called.append(name)
        self.on.get(name, lambda: None)()

    def _changed(self, kind: str, **facts: Any) -> None:
        self.changes.append((self.clock.now(), Phase(facts["phase"]), facts["because"]))

    def _wind_up(self) -> None:
        self.wound_up += 1
