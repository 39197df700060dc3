"""Where notices arrive: from any thread, as files, and as the loss of a rank."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import pytest

from helpers.core.answers import NOW, a_notice
from helpers.core.solo import Plain
from lastcall.core.context import NoticeContext, RunContext
from lastcall.core.notice.inbox import Inbox
from lastcall.core.notice.launcher_link import PAUSE
from lastcall.core.notice.phases import Phase
from lastcall.core.ranks.heartbeat import HANG, LOST
from lastcall.settings import JITCheckpointConfig, PeriodicCheckpointConfig
from lastcall.testing import FakeClock
from lastcall.types import Notice


class Box:
    """An inbox, and what was heard of it."""

    def __init__(self, root: Path) -> None:
        self.clock = FakeClock(NOW)
        self.subject = Plain()
        self.hurried = 0
        self.subject.copy_every_boundary = self._hurry  # type: ignore[method-assign]
        jit, saves = JITCheckpointConfig(environ={}), PeriodicCheckpointConfig(environ={})
        self.context = RunContext.create(root, self.subject, jit, saves, clock=self.clock)
        self.context.catalog.private.mkdir(parents=True)
        self.events: list[tuple[str, dict[str, object]]] = []
        self.context.events.heard = lambda at, kind, facts: self.events.append((kind, dict(facts)))
        self.inbox = Inbox.of_run(self.context)

    def _hurry(self) -> None:
        self.hurried += 1


@pytest.fixture
def box(tmp_path: Path) -> Box:
    return Box(tmp_path)


def loss(source: str = LOST, reason: str = "rank 1 is gone") -> Notice:
    return Notice(source, reason, NOW, NOW + 30.0)


def test_an_inbox_is_empty_at_first(box: Box) -> None:
    assert not box.inbox.pending and box.inbox.rank_loss is None and not box.inbox.wait(0.0)


def test_a_notice_wakes_the_agent_once_and_stays(box: Box) -> None:
    box.inbox.notify(a_notice())
    assert box.inbox.wait(0.0) and not box.inbox.wait(0.0)
    assert box.inbox.pending and box.context.latch.notice == a_notice()


def test_a_notice_is_an_event_with_the_time_that_is_left_and_keeps_the_copy_of_the_boundary_current(
    box: Box,
) -> None:
    box.clock.advance(4.5)
    box.subject.step = 7
    box.inbox.notify(a_notice())
    assert box.events == [
        ("notice", {"source": "signal", "reason": "SIGTERM", "deadline_in": 25.5, "step": 7})
    ]
    assert box.hurried == 1


def test_a_notice_without_a_deadline_does_not_invent_one(box: Box) -> None:
    box.inbox.notify(a_notice(None))
    assert box.events[0][1]["deadline_in"] is None


def test_a_second_notice_is_an_event_only_where_it_changes_something_and_wakes_the_agent_all_the_same(
    box: Box,
) -> None:
    box.inbox.notify(a_notice(20.0))
    box.inbox.wait(0.0)
    box.inbox.notify(a_notice(60.0))
    assert len(box.events) == 1 and box.inbox.wait(0.0)
    box.inbox.notify(a_notice(5.0))
    assert [facts["deadline_in"] for _, facts in box.events] == [20.0, 5.0]


def test_a_notice_comes_from_any_thread(box: Box) -> None:
    heard: list[bool] = []
    waits = threading.Thread(target=lambda: heard.append(box.inbox.wait(30.0)))
    waits.start()
    box.inbox.notify(a_notice())
    waits.join(30.0)
    assert heard == [True]


# ---- the loss of a rank ------------------------------------------------------------------------------------


@pytest.mark.parametrize("source", [LOST, HANG])
def test_the_loss_of_a_rank_is_pending_and_in_no_latch(box: Box, source: str) -> None:
    box.inbox.notify(loss(source))
    assert box.inbox.pending and box.inbox.rank_loss == loss(source) and not box.context.latch.raised
    assert box.events == [("notice", {"source": source, "reason": "rank 1 is gone", "step": 0})]
    assert box.hurried == 1 and box.inbox.wait(0.0)


def test_of_several_losses_the_first_is_answered(box: Box) -> None:
    box.inbox.notify(loss())
    box.inbox.notify(loss(reason="rank 2 is gone"))
    assert box.inbox.rank_loss == loss() and len(box.events) == 1


@pytest.mark.parametrize("phase", [Phase.WAITING, Phase.HOLDING, Phase.SAVING])
def test_a_loss_while_a_notice_is_answered_is_left_to_the_answer(box: Box, phase: Phase) -> None:
    box.inbox.phases.enter(phase)
    box.inbox.notify(loss())
    assert (
        box.inbox.rank_loss is None and [kind for kind, _ in box.events] == ["phase"] and box.inbox.wait(0.0)
    )


def test_a_loss_that_was_answered_is_forgotten_and_the_next_one_is_news(box: Box) -> None:
    box.inbox.lose_rank(loss())
    box.inbox.forget_rank_loss()
    assert not box.inbox.pending
    box.inbox.lose_rank(loss(reason="rank 2 is gone"))
    assert box.inbox.rank_loss == loss(reason="rank 2 is gone")


@pytest.mark.parametrize("source", [LOST, HANG])
def test_after_an_answered_hang_a_rank_that_was_lost_meanwhile_is_answered_and_another_hang_is_not(
    box: Box, source: str
) -> None:
    """The other ranks report the same hang; a rank that is gone does not come back."""
    box.inbox.notify(loss(HANG))
    box.inbox.phases.enter(Phase.HOLDING)
    box.inbox.notify(loss(source, "rank 2 is gone"))
    assert box.inbox.rank_loss == loss(HANG) and box.inbox.wait(0.0)
    box.inbox.forget_rank_loss()
    expected = loss(source, "rank 2 is gone") if source == LOST else None
    assert box.inbox.rank_loss == expected and box.inbox.wait(0.0) is (source == LOST)


@pytest.mark.parametrize("notified", [False, True])
def test_a_notice_that_waited_for_a_hang_to_be_answered_is_answered_next(box: Box, notified: bool) -> None:
    box.inbox.lose_rank(loss(HANG))
    if notified:
        box.inbox.notify(a_notice())
    box.inbox.wait(0.0)
    box.inbox.forget_rank_loss()
    assert box.inbox.wait(0.0) is notified and box.inbox.pending is notified


def test_after_an_answer_that_lets_training_continue_until_the_kill_later_notices_are_not_pending(
    box: Box,
) -> None:
    box.inbox.notify(a_notice(20.0))
    box.inbox.mute()
    box.inbox.notify(a_notice(5.0))
    assert not box.inbox.pending and [facts["deadline_in"] for _, facts in box.events] == [20.0, 5.0]


def test_a_signal_is_a_notice_with_the_configured_grace(box: Box) -> None:
    box.inbox.notify_signal(15)
    assert box.context.latch.notice == Notice("signal", "SIGTERM", NOW, NOW + 30.0, 15)


# ---- without a session -------------------------------------------------------------------------------------


def test_an_inbox_without_a_launcher_finds_no_file_and_informs_no_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    registry = tmp_path / "registry"
    registry.mkdir()
    monkeypatch.setenv("LASTCALL_REGISTRY", str(registry))
    inbox = Inbox(NoticeContext.beside(tmp_path, JITCheckpointConfig(environ={}), clock=FakeClock(NOW)))
    (tmp_path / PAUSE).write_text(json.dumps({}))
    inbox.link.tell(step=3)
    inbox.look()
    assert not inbox.pending and not inbox.link.launched
    assert list(registry.iterdir()) == []


def test_a_notice_of_a_loop_without_a_session_is_an_event_with_its_step(tmp_path: Path) -> None:
    context = NoticeContext.beside(tmp_path, JITCheckpointConfig(environ={}), clock=FakeClock(NOW))
    events: list[dict[str, object]] = []
    context.events.heard = lambda at, kind, facts: events.append(dict(facts))
    inbox = Inbox(context)
    inbox.notify(a_notice())
    assert events[0]["step"] == 0
    context.progress.where = lambda: 7
    inbox.notify(a_notice(5.0))
    assert events[1]["step"] == 7


# ---- files -------------------------------------------------------------------------------------------------


def pause(box: Box) -> None:
    (box.context.catalog.private / PAUSE).write_text(json.dumps({}))


def test_a_pause_is_found_by_a_look(box: Box) -> None:
    box.inbox.look()
    assert not box.inbox.pending
    pause(box)
    box.inbox.look()
    assert box.context.latch.notice == Notice("pause", "pause", NOW, NOW + 30.0)


def test_nobody_looks_for_files_after_a_notice_where_no_launcher_could_say_more(
    box: Box, monkeypatch: pytest.MonkeyPatch
) -> None:
    box.inbox.notify(a_notice())
    monkeypatch.setattr(box.inbox.link, "notice", lambda: pytest.fail("looked"))
    box.inbox.look()


def test_a_launcher_may_bring_the_deadline_forward_while_a_notice_is_answered(
    box: Box, monkeypatch: pytest.MonkeyPatch
) -> None:
    box.inbox.notify(a_notice(20.0))
    box.inbox.link.launched = True
    monkeypatch.setattr(box.inbox.link, "notice", lambda: a_notice(5.0))
    box.inbox.look()
    assert box.context.latch.notice is not None and box.context.latch.notice.deadline == NOW + 5.0


def test_waits_before_the_first_step_look_for_files_by_themselves(box: Box) -> None:
    assert not box.inbox.stop_requested()
    pause(box)
    assert box.inbox.stop_requested()


def test_every_change_of_a_phase_is_an_event(box: Box) -> None:
    box.inbox.phases.enter(Phase.WAITING, "SIGTERM")
    assert box.events == [("phase", {"phase": "waiting", "because": "SIGTERM"})]
