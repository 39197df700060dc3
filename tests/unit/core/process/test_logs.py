"""Lines of side threads never wait for a handler that the main thread is stuck in."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator

import pytest

from lastcall.core.process import logs

log = logging.getLogger("lastcall")


class Stuck(logging.Handler):
    """A handler on a pipe that nobody reads: whoever is inside holds its lock."""

    def __init__(self) -> None:
        super().__init__()
        self.let_go = threading.Event()
        self.inside = threading.Event()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if record.getMessage() == "main":
            self.inside.set()
            self.let_go.wait(30)
        self.lines.append(record.getMessage())


@pytest.fixture
def stuck() -> Iterator[Stuck]:
    handler = Stuck()
    log.addHandler(handler)
    yield handler
    handler.let_go.set()
    log.removeHandler(handler)


def on_a_side_thread(text: str) -> threading.Thread:
    thread = threading.Thread(target=lambda: log.warning("%s", text))
    thread.start()
    return thread


def test_a_side_thread_logs_while_a_handler_is_stuck(stuck: Stuck) -> None:
    with logs.Visible("INFO"):
        holder = threading.Thread(
            target=lambda: stuck.handle(log.makeRecord("lastcall", logging.INFO, "", 0, "main", None, None))  # type: ignore[arg-type]
        )
        holder.start()  # stands for the main thread: it is inside the handler, with its lock
        assert stuck.inside.wait(30)
        side = on_a_side_thread("rescuing")
        side.join(30)
        assert not side.is_alive()
        assert "rescuing" not in stuck.lines
        stuck.let_go.set()
        holder.join()
        logs.drain(10)
    assert stuck.lines == ["main", "rescuing"]


def test_lines_of_the_main_thread_go_straight_out(stuck: Stuck) -> None:
    with logs.Visible("INFO"):
        log.info("at once")
        assert stuck.lines == ["at once"]


def test_what_is_queued_is_written_before_the_session_ends(stuck: Stuck) -> None:
    with logs.Visible("INFO"):
        for number in range(100):
            on_a_side_thread(str(number)).join()
    assert stuck.lines == [str(number) for number in range(100)]
    on_a_side_thread("afterwards").join()
    assert stuck.lines[-1] == "afterwards"


def test_arguments_are_those_of_the_time_of_the_call(stuck: Stuck) -> None:
    numbers = [1]
    with logs.Visible("INFO"):
        thread = threading.Thread(target=lambda: (log.warning("%s", numbers), numbers.append(2)))
        thread.start()
        thread.join()
    assert stuck.lines == ["[1]"]


def test_a_handler_that_stays_stuck_does_not_keep_a_session_from_ending(
    stuck: Stuck, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logs, "_DRAIN_SECONDS", 0.1)
    with logs.Visible("INFO"):
        on_a_side_thread("main").join()
        assert stuck.inside.wait(30)
    assert stuck.lines == []
    began = time.monotonic()
    logs.drain(30)
    assert time.monotonic() - began < 30
