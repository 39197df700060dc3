"""The agent: it sleeps until there is a notice, has it answered, and never stops looking."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from helpers.core.answers import NOW, a_notice
from helpers.core.solo import Plain
from helpers.ranks.thread_ranks import PATIENCE
from lastcall.core import timing
from lastcall.core.context import RunContext
from lastcall.core.notice.agent import Agent
from lastcall.core.notice.inbox import Inbox
from lastcall.core.notice.phases import Phase
from lastcall.core.ranks.heartbeat import HANG, LOST
from lastcall.settings import JITCheckpointConfig, PeriodicCheckpointConfig
from lastcall.testing import FakeClock
from lastcall.types import Notice


class Desk:
    """An agent whose responder writes down what it is given. Each word of `waited_for` can be waited for."""

    def __init__(self, root: Path, **jit: Any) -> None:
        config, saves = JITCheckpointConfig(**jit, environ={}), PeriodicCheckpointConfig(environ={})
        self.context = RunContext.create(root, Plain(), config, saves, clock=FakeClock(NOW))
        self.inbox = Inbox.of_run(self.context)
        self.stopping = threading.Event()
        self.log: list[tuple[Any, ...]] = []
        self.on: dict[str, Callable[[], object]] = {}
        self._changed = threading.Condition()
        responder: Any = self
        self.agent = Agent(
            self.context, self.inbox, responder, self.stopping, self._on_notice, self._look_around
        )

    def said(self, *words: Any) -> None:
        """Waits until this was written down."""
        with self._changed:
            assert self._changed.wait_for(lambda: words in self.log, PATIENCE), (words, self.log)

    def count(self, word: str) -> int:
        return sum(words[0] == word for words in self.log)

    def looked(self, times: int) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: self.count("look") >= times, PATIENCE)

    def run(self, notice: Notice, *, passing: bool = False) -> None:
        self._say("run", notice.reason, passing)

    def fault(self) -> None:
        self._say("fault")

    def _on_notice(self, notice: Notice) -> None:
        self._say("on notice", notice.reason)

    def _look_around(self) -> None:
        self._say("look")

    def _say(self, *words: Any) -> None:
        try:
            self.on.get(words[0], lambda: None)()
        finally:
            with self._changed:
                self.log.append(words)
                self._changed.notify_all()

    def end(self) -> None:
        self.stopping.set()
        self.agent.join()


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "LOOK", 0.002)


@pytest.fixture
def desk(tmp_path: Path) -> Iterator[Desk]:
    made = Desk(tmp_path)
    made.agent.start()
    yield made
    made.end()


def as_responder(desk: Desk) -> Any:
    return desk


def raising(error: Exception) -> Callable[[], object]:
    def fail() -> None:
        raise type(error)(*error.args)  # a new one each time: it keeps the frames that it came through

    return fail


def test_without_a_notice_the_agent_looks_around_and_answers_nothing(desk: Desk) -> None:
    desk.looked(3)
    assert desk.count("run") == desk.count("on notice") == 0


def test_a_notice_is_announced_and_then_answered(desk: Desk) -> None:
    desk.inbox.notify(a_notice())
    desk.said("run", "SIGTERM", False)
    assert [words for words in desk.log if words[0] != "look"] == [
        ("on notice", "SIGTERM"),
        ("run", "SIGTERM", False),
    ]


def test_a_notice_that_came_before_the_agent_is_answered_when_it_starts(tmp_path: Path) -> None:
    desk = Desk(tmp_path)
    desk.inbox.notify(a_notice())
    desk.agent.start()
    desk.said("run", "SIGTERM", False)
    desk.end()


def test_a_notice_is_answered_once_however_often_the_agent_is_woken(desk: Desk) -> None:
    desk.on["run"] = lambda: desk.inbox.phases.enter(Phase.WAITING)
    desk.inbox.notify(a_notice())
    desk.said("run", "SIGTERM", False)
    for grace in (20.0, 10.0):
        desk.inbox.notify(a_notice(grace))
        desk.looked(desk.count("look") + 2)
    assert desk.count("run") == 1


def test_the_loss_of_a_rank_is_announced_to_nobody_outside_and_answered(desk: Desk) -> None:
    desk.inbox.notify(Notice(LOST, "rank 1 is gone", NOW, NOW + 30.0))
    desk.said("run", "rank 1 is gone", False)
    assert desk.count("on notice") == 0


def test_the_loss_of_a_rank_that_comes_with_a_notice_is_what_is_answered(tmp_path: Path) -> None:
    desk = Desk(tmp_path)
    desk.inbox.notify(a_notice())
    desk.inbox.notify(Notice(LOST, "rank 1 is gone", NOW, NOW + 30.0))
    desk.agent.start()
    desk.said("run", "rank 1 is gone", False)
    desk.end()
    assert desk.count("on notice") == 1  # the next incarnation is told of the notice all the same


@pytest.mark.parametrize(
    ("source", "on_hang", "passing"), [(HANG, "save", True), (HANG, "exit", False), (LOST, "save", False)]
)
def test_training_continues_only_after_a_hang_and_only_where_that_is_wanted(
    tmp_path: Path, source: str, on_hang: str, passing: bool
) -> None:
    desk = Desk(tmp_path, on_hang=on_hang)
    desk.inbox.notify(Notice(source, "rank 1", NOW, NOW + 30.0))
    desk.agent.start()
    desk.said("run", "rank 1", passing)
    desk.end()


def test_a_notice_that_came_during_a_hang_is_answered_after_it(desk: Desk) -> None:
    def answered() -> None:
        if desk.inbox.rank_loss is not None:
            desk.inbox.notify(a_notice())
            desk.inbox.forget_rank_loss()
        else:
            desk.inbox.phases.enter(Phase.WAITING)

    desk.on["run"] = answered
    desk.inbox.notify(Notice(HANG, "rank 1 hangs", NOW, NOW + 30.0))
    desk.said("run", "SIGTERM", False)
    assert desk.count("run") == 2


def test_an_adapter_may_have_training_continue_after_every_answer(tmp_path: Path) -> None:
    desk = Desk(tmp_path)
    desk.agent = Agent(
        desk.context, desk.inbox, as_responder(desk), desk.stopping, lambda notice: None, passing=True
    )
    desk.inbox.notify(a_notice())
    desk.agent.start()
    desk.said("run", "SIGTERM", True)
    desk.end()


# ---- faults ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("moment", ["run", "on notice"])
def test_a_fault_in_the_answer_is_logged_and_told_to_the_responder(
    desk: Desk, caplog: pytest.LogCaptureFixture, moment: str
) -> None:
    desk.on[moment] = raising(ZeroDivisionError("out of the blue"))
    desk.inbox.notify(a_notice())
    desk.said("fault")
    assert (
        "Internal error in lastcall; will try to save at the next step" in caplog.text
        and "out of the blue" in caplog.text
    )
    desk.looked(desk.count("look") + 2)  # it is still there


def test_a_fault_while_it_looks_around_is_logged_and_does_not_keep_it_from_hearing(
    desk: Desk, caplog: pytest.LogCaptureFixture
) -> None:
    desk.on["look"] = raising(OSError("a folder that is gone"))
    desk.looked(2)
    assert "Internal error in lastcall; it continues to listen for notices" in caplog.text
    desk.inbox.notify(a_notice())
    desk.said("run", "SIGTERM", False)


# ---- the end -----------------------------------------------------------------------------------------------


def test_the_end_of_the_session_wakes_the_agent_and_ends_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(timing, "LOOK", PATIENCE)
    desk = Desk(tmp_path)
    desk.agent.start()
    desk.end()
    assert desk.log == []


def test_a_notice_that_comes_with_the_end_of_the_session_is_not_answered(tmp_path: Path) -> None:
    desk = Desk(tmp_path)
    desk.stopping.set()
    desk.inbox.notify(a_notice())
    desk.agent.start()
    desk.agent.join()
    assert desk.count("run") == 0
