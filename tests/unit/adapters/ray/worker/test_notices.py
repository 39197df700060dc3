"""Where a train worker's notices come from, and which of them Ray's controller and the other ranks learn."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from lastcall.adapters.ray import internals
from lastcall.adapters.ray.worker.connection import RankConnection
from lastcall.adapters.ray.worker.notices import WorkerNotices
from lastcall.core.context import NoticeContext
from lastcall.core.notice.answer import Answer
from lastcall.core.notice.inbox import Inbox
from lastcall.core.store.memory import MemoryStore
from lastcall.settings import JITCheckpointConfig
from lastcall.testing import FakeClock
from lastcall.types import Notice

PATIENCE = 60.0


class Worker:
    """One rank of two, without an agent. `written`: what Ray's controller learns."""

    def __init__(self, store: MemoryStore, rank: int) -> None:
        self.clock = FakeClock()
        jit = JITCheckpointConfig(grace=30.0, environ={})
        self.context = NoticeContext.beside(None, jit, rank, self.clock)
        self.inbox = Inbox(self.context)
        self.connection = RankConnection(store.clone(), rank, 2)
        self.written: list[tuple[float, dict[str, Any]]] = []
        writer: Any = SimpleNamespace(write=lambda left, nodes: self.written.append((left, dict(nodes))))
        answer = Answer(self.context, self.inbox.phases)
        self.notices = WorkerNotices(self.context, self.inbox, answer, self.connection, writer)

    def announce(self) -> None:
        """As the agent does."""
        assert self.context.latch.notice is not None
        self.notices.announce(self.context.latch.notice)

    def announced(self) -> dict[str, Any] | None:
        return self.connection.clone().agreement.heard(0.0)

    def hear(self) -> None:
        """As the listener does, until there is a notice."""
        self.notices.listen()
        assert self.context.latch.wait(PATIENCE)


@pytest.fixture
def workers(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Worker]]:
    monkeypatch.setattr(internals, "node_id", lambda: "node")
    store = MemoryStore()
    made = [Worker(store, rank) for rank in range(2)]
    yield made
    for worker in made:
        worker.inbox.phases.close()


def test_a_signal_is_written_for_the_controller_and_announced_with_the_node(workers: list[Worker]) -> None:
    one, other = workers
    one.notices.on_signal(15, 1)
    one.announce()
    assert one.written == [(30.0, {"node": [0]})]
    news = other.announced()
    assert news is not None and (news["reason"], news["nodes"], news["drain"]) == (
        "SIGTERM",
        {"node": [0]},
        False,
    )


def test_a_drain_comes_from_ray_and_is_not_written_back(workers: list[Worker]) -> None:
    one, other = workers
    one.notices.on_drain(12.0, {"node": [0, 1]})
    one.announce()
    assert one.written == [] and one.context.latch.notice == Notice(
        "drain", "node drain", one.clock.now(), one.clock.now() + 12.0
    )
    news = other.announced()
    assert news is not None and news["drain"] is True


def test_a_drain_without_a_deadline_gets_the_grace_that_is_configured(workers: list[Worker]) -> None:
    workers[0].notices.on_drain(None, {"node": [0]})
    notice = workers[0].context.latch.notice
    assert notice is not None and notice.deadline == workers[0].clock.now() + 30.0


def test_an_announced_notice_is_written_for_the_controller_and_not_announced_again(
    workers: list[Worker], caplog: pytest.LogCaptureFixture
) -> None:
    one, other = workers
    one.notices.on_signal(15, 1)
    one.announce()
    other.hear()
    notice = other.context.latch.notice
    assert notice is not None and (notice.source, notice.reason) == ("rank 0", "SIGTERM")
    with caplog.at_level("INFO", "lastcall"):
        other.announce()
    assert "Rank 0 announced SIGTERM: rank 1 saves too" in caplog.text
    agreement = other.connection.clone().agreement
    assert agreement.heard(0.0) is not None and agreement.heard(0.0) is None, "one announcement for both"


def test_only_a_deadline_that_comes_forward_is_written_again(workers: list[Worker]) -> None:
    one = workers[0]
    for left in (30.0, 60.0, 5.0):
        now = one.clock.now()
        one.notices.on_notice(Notice("stop file", "stop", now, now + left))
    assert [left for left, _ in one.written] == [30.0, 5.0]


def test_after_the_end_no_notice_is_taken(workers: list[Worker]) -> None:
    one = workers[0]
    one.inbox.phases.close()
    one.notices.on_signal(15, 1)
    assert not one.context.latch.raised and one.written == []
