from __future__ import annotations

import logging
import os
import signal
import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from lastcall import clock as clocks
from lastcall import errors
from lastcall.core.outcome import OutcomeCell
from lastcall.core.process import exits
from lastcall.core.sync.latch import Latch
from lastcall.settings import JITCheckpointConfig
from lastcall.shield.listening import Protection
from lastcall.types import Notice, Outcome


class Session:
    """As much of a context and its inbox as a Protection looks at."""

    def __init__(self) -> None:
        self.clock = clocks.Clock()
        self.latch = Latch()
        self.outcome = OutcomeCell()
        self.came = threading.Event()
        self.notices: list[Notice] = []
        self.again_please = errors.Preempted(75, "saved and stopped")

    def notify(self, notice: Notice) -> None:
        self.notices.append(notice)
        self.latch.offer(notice)
        self.came.set()


@pytest.fixture
def session() -> Session:
    return Session()


@pytest.fixture(autouse=True)
def _handlers_as_before() -> Iterator[None]:
    numbers = signal.SIGTERM, signal.SIGUSR1, signal.SIGINT
    before = {number: signal.getsignal(number) for number in numbers}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def protection(session: Session, **more: Any) -> Protection:
    jit = JITCheckpointConfig(**{"signals": ("SIGUSR1",), **more}, environ={})
    context = SimpleNamespace(jit=jit, clock=session.clock, latch=session.latch, outcome=session.outcome)
    return Protection(context, session)  # type: ignore[arg-type]


def leave(shield: Protection, session: Session, left: BaseException | None) -> BaseException | None:
    return shield.leave(left, lambda: session.again_please)


def wait_for(session: Session, notices: int) -> None:
    until = time.monotonic() + 30
    while len(session.notices) < notices and time.monotonic() < until:
        session.came.wait(0.01)
    assert len(session.notices) == notices


def test_a_signal_becomes_a_notice_with_the_grace_as_its_deadline(session: Session) -> None:
    shield = protection(session, grace=12.0)
    shield.begin()
    try:
        before = session.clock.now()
        os.kill(os.getpid(), signal.SIGUSR1)
        wait_for(session, 1)
    finally:
        shield.let_go()
    (notice,) = session.notices
    assert (notice.source, notice.reason, notice.signum) == ("signal", "SIGUSR1", signal.SIGUSR1)
    assert (
        before <= notice.at and notice.deadline is not None and abs(notice.deadline - notice.at - 12.0) < 1e-6
    )


def test_afterwards_the_handlers_are_what_they_were(session: Session) -> None:
    def theirs(number: int, frame: object) -> None: ...

    signal.signal(signal.SIGUSR1, theirs)
    shield = protection(session)
    shield.begin()
    assert signal.getsignal(signal.SIGUSR1) is not theirs
    shield.let_go()
    assert signal.getsignal(signal.SIGUSR1) is theirs
    again = protection(session)  # and the next run of this process can begin
    again.begin()
    again.let_go()


@pytest.mark.usefixtures("leaving")
def test_who_has_saved_and_is_on_its_way_out_ignores_the_second_signal(session: Session) -> None:
    shield = protection(session)
    shield.begin()
    shield.let_go(ignore=True)
    os.kill(os.getpid(), signal.SIGUSR1)
    time.sleep(0.05)
    assert session.notices == []


def test_a_second_ctrl_c_leaves_at_once(session: Session, ends: list[tuple[str, int]]) -> None:
    shield = protection(session, signals=("SIGINT",))
    shield.begin()
    try:
        os.kill(os.getpid(), signal.SIGINT)
        wait_for(session, 1)
        assert ends == []
        os.kill(os.getpid(), signal.SIGINT)
        wait_for(session, 2)
        assert ends == [("left", 128 + signal.SIGINT)]
    finally:
        shield.let_go()


def test_two_runs_at_once_are_one_too_many_and_the_first_goes_on(session: Session) -> None:
    first, second = protection(session), protection(Session())
    logger = logging.getLogger("lastcall")
    first.begin()
    try:
        filters = list(logger.filters)
        with pytest.raises(errors.BusyError, match="already"):
            second.begin()
        assert logger.filters == filters
        os.kill(os.getpid(), signal.SIGUSR1)
        wait_for(session, 1)
    finally:
        first.let_go()
    second = protection(Session())
    second.begin()
    second.let_go()


def test_a_misspelt_variable_is_said(
    session: Session, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("LASTCALL_GRACE_SECOND", "3")
    monkeypatch.setenv("LASTCALL_RUN_ID", "exp1")
    shield = protection(session)
    shield.begin()
    shield.let_go()
    messages = [record.getMessage() for record in caplog.records]
    assert messages == [
        "LASTCALL_GRACE_SECOND is not a setting of lastcall and is ignored. Did you mean "
        "LASTCALL_GRACE_SECONDS?"
    ]


def test_where_signals_cannot_be_had_the_run_goes_on_without(
    session: Session, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(self: object) -> None:
        raise RuntimeError("not here")

    monkeypatch.setattr("lastcall.notices.signals.SignalListener.start", refuse)
    shield = protection(session)
    shield.begin()
    shield.rearm()
    shield.let_go()
    assert "Cannot listen to signals: not here. Notices must come from another source" in caplog.text


# ---- the way out -------------------------------------------------------------------------------------------


@pytest.fixture
def ends(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """How the process would have ended."""
    found: list[tuple[str, int]] = []
    monkeypatch.setattr(exits, "die_of", lambda number: found.append(("died", number)))
    monkeypatch.setattr(exits, "leave", lambda code: found.append(("left", code)))
    return found


def told(session: Session, signum: int | None) -> None:
    session.latch.offer(Notice("signal" if signum else "request", "SIGTERM", 0.0, None, signum))


def test_a_notice_that_could_not_be_answered_is_died_of(
    session: Session, ends: list[tuple[str, int]]
) -> None:
    told(session, signal.SIGTERM)
    session.outcome.decide(Outcome.NOT_SAVED)
    leave(protection(session), session, None)
    assert ends == [("died", signal.SIGTERM)]


@pytest.mark.parametrize(
    "outcome", [None, *(outcome for outcome in Outcome if outcome is not Outcome.NOT_SAVED)]
)
def test_any_other_end_returns(
    session: Session, ends: list[tuple[str, int]], outcome: Outcome | None
) -> None:
    told(session, signal.SIGTERM)
    if outcome is not None:
        session.outcome.decide(outcome)
    for left in (ValueError(), errors.Preempted(75, "saved")):
        assert leave(protection(session), session, left) is left
    assert leave(protection(session), session, None) is (
        session.again_please if outcome is Outcome.SAVED else None
    )
    assert ends == []


def test_a_notice_that_was_no_signal_is_nothing_to_die_of(
    session: Session, ends: list[tuple[str, int]]
) -> None:
    session.outcome.decide(Outcome.NOT_SAVED)
    leave(protection(session), session, None)
    told(session, None)
    leave(protection(session), session, errors.Preempted(1, "not saved"))
    assert ends == []


def test_on_a_side_thread_the_process_is_left_with_the_code(
    session: Session, ends: list[tuple[str, int]]
) -> None:
    session.outcome.decide(Outcome.SAVED)
    shield = protection(session)
    for left in (errors.Preempted(75, "saved"), ValueError()):
        thread = threading.Thread(target=leave, args=(shield, session, left))
        thread.start()
        thread.join()
    assert ends == [("left", 75)]
