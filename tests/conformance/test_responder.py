"""What every adapter's strategy promises to the responder (core/notice), asked of each: the same waits,
phases, events and endings, whoever saves. The agent is a thread, and the test is the training thread."""

from __future__ import annotations

import importlib.util
import itertools
import json
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn, cast

import pytest

from lastcall import clock as clocks
from lastcall import errors
from lastcall.adapters.accelerate.script_save import ScriptSave
from lastcall.core.context import NoticeContext, RunContext
from lastcall.core.joint.many_ranks import ManyRanks
from lastcall.core.notice.answer import Answer
from lastcall.core.notice.one_process import OneProcess
from lastcall.core.notice.phases import ALLOWED, Phase, Phases
from lastcall.core.notice.responder import Responder, Strategy
from lastcall.core.process import exits
from lastcall.core.ranks.agreement import Agreement
from lastcall.core.store.memory import MemoryStore
from lastcall.settings import JITCheckpointConfig, PeriodicCheckpointConfig
from lastcall.types import Capture, Notice, Outcome

PATIENCE = 30.0
EXACT = {"exact": True, "because": ""}
CLOCK = clocks.Clock()
_ray = importlib.util.find_spec("ray")
# our own tests/ray is a package of that name, too, without a file
RAY = _ray is not None and _ray.origin is not None


class Left(BaseException):
    """The process would have been left by force."""


class Adapter:
    """A strategy with what it saves. `come`: the training thread is where a save may happen. `fails`: so does
    the save."""

    context: NoticeContext
    phases: Phases
    answer: Answer
    strategy: Strategy
    rescues = False  # it can save without a boundary

    def __init__(self) -> None:
        self.saves = 0
        self.fails = False

    def come(self) -> None:
        raise NotImplementedError


class Subject:
    """A state without a content."""

    step = 7
    step_seconds = 0.01
    settled = True

    @property
    def ordinal(self) -> int:
        return self.step

    @property
    def boundary(self) -> tuple[int, int]:
        return self.step, 0

    def capture(self) -> Capture:
        return Capture(self.step, {}, ())

    rescue = capture

    def untouched(self) -> bool:
        return False

    def unrescuable(self) -> str:
        return ""

    def stop_at_next_boundary(self) -> None: ...


class Checkpointer:
    up_to_date = covers_now = keeps_boundary = False

    def __init__(self, adapter: Adapter) -> None:
        self.lock = threading.RLock()
        self._adapter = adapter

    def seconds(self) -> float:
        return 0.1

    def seconds_until_safe(self, deadline: float) -> float:
        return 0.1

    def save(self, capture: Capture, *rest: object) -> Any:
        if self._adapter.fails:
            raise errors.SaveError("the disk is full")
        self._adapter.saves += 1
        record = SimpleNamespace(whole=True, exact=True, step=capture.step, because="", missing=())
        return SimpleNamespace(path=Path(f"checkpoint-{capture.step}"), record=record)

    save_agreed = save


PERIODIC: Any = SimpleNamespace(make_way=lambda deadline: None, writing=None, give_up=lambda: None)


class Native(Adapter):
    """core.notice.one_process"""

    rescues = True

    def __init__(self, folder: Path, jit: JITCheckpointConfig) -> None:
        super().__init__()
        self.subject = Subject()
        self.context = RunContext.create(
            folder, cast(Any, self.subject), jit, PeriodicCheckpointConfig(environ={})
        )
        self.phases = Phases(self.context.events.emit)
        self.answer = Answer(self.context, self.phases)
        self.strategy = self.made(
            self.context, (self.context, self.answer, Checkpointer(self), PERIODIC, None)
        )

    def made(self, context: RunContext, parts: tuple[Any, ...]) -> OneProcess:
        return OneProcess(*parts)

    def come(self) -> None:
        """As a session has it come."""
        self.subject.step += 1
        if self.phases.open:
            assert isinstance(self.strategy, OneProcess)
            try:
                self.strategy.at_boundary()
            except errors.Preempted:
                return


class Together(Native):
    """core.joint.many_ranks, with one rank"""

    def made(self, context: RunContext, parts: tuple[Any, ...]) -> ManyRanks:
        agreement = Agreement(MemoryStore(), 0, 1, CLOCK)
        ranks = SimpleNamespace(
            rank=0,
            size=1,
            token="token",
            agreement=agreement,
            announce=lambda notice, failed: None,
            unable=set,
            silent=set,
            gone=set,
            holdings=dict,
            tell=lambda key, body: None,
            hear=lambda key, timeout: None,
        )
        joint_save = SimpleNamespace(
            portion=lambda capture, writers: capture,
            find=lambda name: None,
            save=lambda portion, order: None,
            refuse=lambda *_: None,
        )
        return ManyRanks(*parts, cast(Any, SimpleNamespace()), cast(Any, ranks), cast(Any, joint_save))


class Accelerate(Adapter):
    """adapters.accelerate.script_save"""

    def __init__(self, folder: Path, jit: JITCheckpointConfig) -> None:
        super().__init__()
        self.context = NoticeContext.beside(folder, jit)
        self.phases = Phases(self.context.events.emit)
        self.answer = Answer(self.context, self.phases)
        self.strategy = ScriptSave(self.context, self.answer, lambda: 0, lambda: exits.die_of(15))
        self._join(self.strategy)

    def _join(self, strategy: ScriptSave) -> None: ...

    def come(self) -> None:
        assert isinstance(self.strategy, ScriptSave)
        self.strategy.steps += 1
        if self.strategy.due():
            self.strategy.begin()
            self.saves += self.strategy.conclude(not self.fails)


class AccelerateRanks(Accelerate):
    """... as one of many ranks"""

    def _join(self, strategy: ScriptSave) -> None:
        strategy.join(Agreement(MemoryStore(), 0, 1, CLOCK))


class RayTrain(Adapter):
    """adapters.ray.worker.responder"""

    near = True

    def __init__(self, folder: Path, jit: JITCheckpointConfig) -> None:
        super().__init__()
        from lastcall.adapters.ray.worker.connection import RankConnection
        from lastcall.adapters.ray.worker.preemption_info import PreemptionInfoWriter
        from lastcall.adapters.ray.worker.responder import ReportSave

        self.inside = False
        writer: Any = PreemptionInfoWriter(SimpleNamespace(preemption_context=None))
        self.save = ReportSave(
            jit, RankConnection(MemoryStore(), 0, 1), writer, cast(Any, self), None, folder
        )
        self.save.save_seconds = 0.1
        self.context, self.phases = self.save.context, self.save.phases
        self.answer, self.strategy = self.save._answer, self.save

    def come(self) -> None:
        before = self.save.boundary.before
        if before is not None:
            before(sys._getframe())
        self.save.boundary.passed(sys._getframe())

    # In the place of the script's own save:

    def look(self, frame: object) -> bool:
        return True

    def position(self) -> dict[str, Any]:
        return {"looked": True, "points": True, "near": self.near}

    def enter(self, frame: object, left: Callable[[], None]) -> bool:
        self.save.begin()
        if self.fails:
            self.save.not_saved("the disk is full")
            return True
        self.saves += 1
        self.save.saved("checkpoint_000001", "is committed", EXACT)
        self.save.leave()
        return True

    def replay(self, frame: object) -> str:
        self.enter(frame, lambda: None)
        return ""


ADAPTERS: dict[str, type[Any]] = {
    "one process": Native,
    "many ranks": Together,
    "accelerate": Accelerate,
    "accelerate, many ranks": AccelerateRanks,
    **({"ray": RayTrain} if RAY else {}),
}


@pytest.fixture(autouse=True)
def still_here(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The codes and signals that the process would have been left with."""
    found: list[int] = []

    def leave(code: int) -> NoReturn:
        found.append(code)
        raise Left

    monkeypatch.setattr(exits, "leave", leave)
    monkeypatch.setattr(exits, "die_of", leave)
    return found


@pytest.fixture(params=ADAPTERS)
def make(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., Told]:
    if request.param == "ray":
        from lastcall.adapters.ray import internals

        monkeypatch.setattr(internals, "poll_seconds", lambda: 0.0)
    return lambda **jit: Told(
        ADAPTERS[request.param](tmp_path, JITCheckpointConfig(environ={}, **{"kill_wait": 0.0, **jit}))
    )


class Told:
    """An adapter that is given a notice."""

    def __init__(self, adapter: Adapter) -> None:
        self.adapter = adapter
        self.phases = adapter.phases
        self.outcome = adapter.context.outcome
        self._responder = Responder(adapter.context, adapter.answer, adapter.strategy, lambda: None)
        self._thread: threading.Thread | None = None

    def offer(self, left: float) -> Notice:
        now = CLOCK.now()
        notice = Notice("signal", "SIGTERM", now, now + left, 15)
        self.adapter.context.latch.offer(notice)
        return notice

    def notice(self, left: float = PATIENCE) -> None:
        self._thread = threading.Thread(target=self._run, args=(self.offer(left),), daemon=True)
        self._thread.start()

    def _run(self, notice: Notice) -> None:
        try:
            self._responder.run(notice)
        except Left:
            return
        except RuntimeError:
            self._responder.fault()

    def until(self, *phases: Phase) -> Phase:
        end = time.monotonic() + PATIENCE
        while self.phases.phase not in phases:
            assert time.monotonic() < end, self.phases.phase
            time.sleep(0.002)
        return self.phases.phase

    def train(self) -> None:
        """One step after another, until it is saved or will not be."""
        end = time.monotonic() + PATIENCE
        while not self.phases.concluded:
            assert time.monotonic() < end, self.phases.phase
            self.adapter.come()
            time.sleep(0.002)

    def ends(self, within: float = PATIENCE) -> None:
        assert self._thread is not None
        self._thread.join(within)
        assert not self._thread.is_alive(), self.phases.phase

    @property
    def changes(self) -> list[tuple[Phase, str]]:
        events = self.adapter.context.events
        events.flush()
        lines = map(json.loads, events.path.read_text().splitlines())
        return [(Phase(line["phase"]), line["because"]) for line in lines if line["kind"] == "phase"]


def test_training_continues_through_the_kill_wait(make: Callable[..., Told]) -> None:
    told = make(kill_wait=PATIENCE, grace=3 * PATIENCE)
    told.notice(3 * PATIENCE)
    told.until(Phase.WAITING)
    for _ in range(5):
        told.adapter.come()
    assert told.phases.phase is Phase.WAITING and told.adapter.saves == 0
    told.phases.close()
    told.ends()


def test_after_the_kill_wait_the_next_boundary_saves_and_training_leaves(
    make: Callable[..., Told], still_here: list[int]
) -> None:
    told = make()
    told.notice()
    told.train()
    told.until(Phase.LEAVING)
    told.ends()
    assert told.adapter.saves == 1 and told.outcome.value is Outcome.SAVED and not still_here
    told.adapter.come()
    assert told.adapter.saves == 1, "one answer a notice"


def test_every_change_is_an_event_and_one_that_is_allowed(make: Callable[..., Told]) -> None:
    told = make()
    told.notice()
    told.train()
    told.until(Phase.LEAVING)
    walked = [Phase.QUIET, *(phase for phase, _ in told.changes)]
    assert all(after in ALLOWED[before] for before, after in itertools.pairwise(walked))
    assert walked[1:3] == [Phase.WAITING, Phase.HOLDING] and walked[-3:] == [
        Phase.SAVING,
        Phase.COMMITTED,
        Phase.LEAVING,
    ]
    assert told.changes[0][1] == "SIGTERM" and told.changes[-2][1], "the reasons are told, too"


def test_the_kill_wait_is_cut_where_the_save_would_come_too_late(
    make: Callable[..., Told], caplog: pytest.LogCaptureFixture
) -> None:
    told = make(kill_wait=PATIENCE)
    began = time.monotonic()
    told.notice(PATIENCE - 25.0)
    told.train()
    assert told.outcome.value is Outcome.SAVED and time.monotonic() - began < PATIENCE - 25.0
    assert f"Kill wait cut from {PATIENCE:.1f}s" in caplog.text


def test_a_second_notice_that_leaves_less_time_ends_the_kill_wait(make: Callable[..., Told]) -> None:
    told = make(kill_wait=PATIENCE, grace=3 * PATIENCE)
    told.notice(3 * PATIENCE)
    told.until(Phase.WAITING)
    told.offer(0.8)
    told.until(*set(Phase) - {Phase.QUIET, Phase.WAITING})
    told.phases.close()
    told.ends()


def test_without_a_boundary_it_is_over_by_the_deadline_and_only_what_is_committed_is_called_saved(
    make: Callable[..., Told], still_here: list[int]
) -> None:
    told = make()
    began = time.monotonic()
    told.notice(2.5)
    told.ends()
    assert time.monotonic() - began < 2.5 + 1.0
    assert (told.outcome.value is Outcome.SAVED) == told.adapter.rescues == (told.adapter.saves == 1)
    assert told.phases.phase is (Phase.LEAVING if told.adapter.rescues else Phase.FAILED)
    assert still_here in ([75], [15], []), "left as saved, by the signal, or to whoever set the deadline"
    assert told.adapter.rescues == (still_here == [75])


def test_a_save_that_fails_is_not_called_saved(make: Callable[..., Told]) -> None:
    told = make()
    told.adapter.fails = True
    told.notice(3.0)
    told.train()
    assert told.until(Phase.FAILED, Phase.LEAVING) and told.outcome.value is Outcome.NOT_SAVED
    told.ends()
    assert told.adapter.saves == 0


@pytest.mark.parametrize("phase", [Phase.WAITING, Phase.BOUNDARY])
def test_whoever_finishes_meanwhile_is_not_waited_for(
    make: Callable[..., Told], still_here: list[int], phase: Phase
) -> None:
    told = make(kill_wait=PATIENCE if phase is Phase.WAITING else 0.0, grace=3 * PATIENCE)
    if isinstance(told.adapter, Native):
        told.adapter.subject.step_seconds = cast(Any, None)  # the first step takes as long as it takes
    told.notice(3 * PATIENCE)
    told.until(phase)
    told.phases.close()
    told.ends()
    assert not still_here and told.outcome.value is None and told.adapter.saves == 0


def test_after_a_fault_nobody_waits_for_the_agent(
    make: Callable[..., Told], monkeypatch: pytest.MonkeyPatch
) -> None:
    told = make()

    def broken() -> NoReturn:
        raise RuntimeError("a fault")

    monkeypatch.setattr(told.adapter.strategy, "decide", broken)
    told.notice()
    told.ends()
    done = threading.Thread(target=told.adapter.come, daemon=True)
    done.start()
    done.join(PATIENCE)
    assert not done.is_alive() and told.phases.phase is not Phase.HOLDING
