"""A loop without a session: the same agent answers its notices, and its events are written the same way."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import pytest

from helpers.core.answers import a_notice
from helpers.ranks.thread_ranks import PATIENCE
from lastcall import errors
from lastcall.core import timing
from lastcall.core.context import NoticeContext
from lastcall.core.notice.answer import Answer
from lastcall.core.notice.inbox import Inbox
from lastcall.core.notice.phases import Phase
from lastcall.core.notice.responder import Where
from lastcall.core.notice.service import NoticeService
from lastcall.settings import JITCheckpointConfig
from lastcall.testing import FakeClock
from lastcall.types import Notice, Outcome


class Script:
    """A strategy of which everything is decided: there is nothing to save."""

    def __init__(self) -> None:
        self.error: Exception | None = None
        self.faults = threading.Event()

    def __getattr__(self, name: str) -> Any:
        return lambda *_: False

    def needs(self, deadline: float) -> float:
        return 0.0

    def decide(self) -> Where:
        if self.error is not None:
            raise self.error
        return Where(dismissed=True, because="it saves itself")

    def fault(self) -> None:
        self.faults.set()


class Loop:
    def __init__(self, folder: Path) -> None:
        jit = JITCheckpointConfig(kill_wait=0.0, environ={})
        self.context = NoticeContext.beside(folder, jit, clock=FakeClock())
        self.context.progress.where = lambda: 7
        self.inbox = Inbox(self.context)
        self.script = Script()
        self.noticed: list[Notice] = []
        answer, strategy = Answer(self.context, self.inbox.phases), self.script
        self.service = NoticeService(self.context, self.inbox, answer, strategy, self.noticed.append)

    def notify(self) -> None:
        now = self.context.clock.now()
        self.inbox.notify(Notice("signal", "SIGTERM", now, now + 30.0, 15))

    def events(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.context.events.path.read_text().splitlines()]


@pytest.fixture
def loop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Loop:
    monkeypatch.setattr(timing, "LOOK", 0.002)
    return Loop(tmp_path)


def test_a_notice_is_answered_by_the_agent_and_every_step_of_it_is_an_event(loop: Loop) -> None:
    loop.service.start("checkpoint-3")
    loop.notify()
    assert loop.inbox.phases.wait_while(set(Phase) - {Phase.DISMISSED}, PATIENCE) is Phase.DISMISSED
    loop.context.outcome.decide(Outcome.LEFT)
    loop.service.stop()
    events = loop.events()
    assert [event["kind"] for event in events] == ["start", "notice", "phase", "phase", "phase", "stop"]
    assert events[0]["resumed"] == "checkpoint-3" and events[1]["step"] == 7
    assert (events[-1]["outcome"], events[-1]["step"]) == (Outcome.LEFT.value, 7)
    assert [notice.reason for notice in loop.noticed] == ["SIGTERM"]


def test_a_store_that_is_lost_is_a_warning_and_the_strategy_is_asked_to_let_training_go(
    loop: Loop, caplog: pytest.LogCaptureFixture
) -> None:
    loop.script.error = errors.StoreLost("the controller is gone")
    loop.service.start(None)
    loop.notify()
    assert loop.script.faults.wait(PATIENCE)
    assert "Could not answer the notice together with the other ranks: the controller is gone" in caplog.text
    assert "Internal error" not in caplog.text
    loop.service.stop()


def test_it_stops_from_any_thread_and_no_thread_waits_any_longer(loop: Loop) -> None:
    loop.service.start(None)
    waits = threading.Thread(target=loop.inbox.phases.wait_closed, args=(PATIENCE,))
    waits.start()
    stops = threading.Thread(target=loop.service.stop)
    stops.start()
    stops.join(PATIENCE)
    waits.join(PATIENCE)
    assert not stops.is_alive() and not waits.is_alive()


def test_a_notice_that_comes_after_the_end_is_not_answered(loop: Loop) -> None:
    loop.service.start(None)
    loop.service.stop()
    loop.inbox.notify(a_notice())
    assert loop.inbox.phases.phase is Phase.QUIET and loop.noticed == []
