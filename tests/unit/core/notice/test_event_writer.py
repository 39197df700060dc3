"""Events and progress are written on a thread of their own, and the launcher is informed."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import pytest

from helpers.ranks.thread_ranks import PATIENCE
from lastcall.core.context import NoticeContext
from lastcall.core.notice import event_writer
from lastcall.core.notice.event_writer import EventWriter
from lastcall.settings import JITCheckpointConfig

JIT = JITCheckpointConfig(environ={})


class Link:
    """Notes what the launcher is informed of."""

    def __init__(self) -> None:
        self.told: list[dict[str, object]] = []
        self.informed = threading.Event()

    def tell(self, **changes: object) -> None:
        self.told.append(changes)
        self.informed.set()


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(event_writer, "_EVERY", 0.002)


def kinds(context: NoticeContext) -> list[str]:
    return [json.loads(line)["kind"] for line in context.events.path.read_text().splitlines()]


def test_events_are_written_while_training_runs_and_the_launcher_learns_the_step(tmp_path: Path) -> None:
    context, link, stopping = NoticeContext.beside(tmp_path, JIT), Link(), threading.Event()
    context.progress.where = lambda: 7
    context.events.emit("start")
    writer = EventWriter(context, as_link(link), stopping)
    writer.start()
    assert link.informed.wait(PATIENCE)
    assert kinds(context) == ["start"] and link.told[0] == {"step": 7}
    stopping.set()
    writer.join(PATIENCE)


def test_the_last_events_are_written_at_the_end(tmp_path: Path) -> None:
    context, stopping = NoticeContext.beside(tmp_path, JIT), threading.Event()
    writer = EventWriter(context, as_link(Link()), stopping)
    stopping.set()
    context.events.emit("stop")
    writer.start()
    writer.join(PATIENCE)
    assert kinds(context) == ["stop"]


def test_a_process_that_is_about_to_end_writes_them_itself_however_often(tmp_path: Path) -> None:
    context = NoticeContext.beside(tmp_path, JIT)
    writer = EventWriter(context, as_link(Link()), threading.Event())
    context.events.emit("stop")
    writer.close()
    writer.close()
    assert kinds(context) == ["stop"]


def test_without_a_folder_nothing_is_written_and_nothing_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    context = NoticeContext.beside(None, JIT)
    context.progress.update(3)
    context.events.emit("stop")
    EventWriter(context, as_link(Link()), threading.Event()).close()
    assert list(tmp_path.iterdir()) == [] and context.progress.document is not None


def as_link(link: Link) -> Any:
    return link
