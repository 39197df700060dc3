from __future__ import annotations

import logging
import os
import queue
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from helpers.processes.forkserver import PATIENCE, until
from lastcall.notices import files
from lastcall.types import Notice


class Watched(files.StopFile):
    """Looks often, and counts."""

    interval = 0.01
    looks = 0

    def look(self) -> float:
        delay = super().look()
        self.looks += 1
        return delay

    def wait_for_looks(self, more: int = 3) -> None:
        goal = self.looks + more
        until(lambda: self.looks >= goal, "further looks")


@contextmanager
def listening(path: Path) -> Iterator[tuple[Watched, queue.Queue[Notice]]]:
    source, heard = Watched(path), queue.Queue[Notice]()
    source.start(heard.put)
    try:
        yield source, heard
    finally:
        source.stop()


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "stop"


def test_a_file_that_appears_is_one_notice_without_a_deadline(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with listening(path) as (source, heard):
        source.wait_for_looks()
        assert heard.empty()
        before = time.monotonic()
        path.touch()
        notice = heard.get(timeout=PATIENCE)
        assert (notice.source, notice.reason, notice.deadline) == ("stop-file", f"stop file {path}", None)
        assert before <= notice.at <= time.monotonic()
        source.wait_for_looks()
        assert heard.empty()
    assert not warnings(caplog)


@pytest.mark.parametrize(
    ("content", "grace", "reason"),
    [
        ("30", 30.0, ""),
        (" 2.5\n", 2.5, ""),
        ("0", 0.0, ""),
        ('{"grace": 45}', 45.0, ""),
        ('{"grace": 45, "reason": "node\\n drain"}', 45.0, " (node drain)"),
        ('{"reason": "maintenance"}', None, " (maintenance)"),
        ("{}", None, ""),
    ],
)
def test_its_content_is_the_grace_and_the_reason(
    path: Path, content: str, grace: float | None, reason: str
) -> None:
    with listening(path) as (_, heard):
        path.write_text(content)
        notice = heard.get(timeout=PATIENCE)
    assert notice.reason == f"stop file {path}{reason}"
    assert notice.deadline == (None if grace is None else notice.at + grace)


@pytest.mark.parametrize(
    "content",
    [b"soon", b"\xff\xfe", b"-5", b"nan", b"NaN", b"Infinity", b"true", b"[30]", b'"30"', b'{"grace": "30"}', b'{"grace": null}',  # noqa: E501
     b"1e999", b"[" * 60_000, b"9" * 70_000],
)  # fmt: skip
def test_content_that_makes_no_sense_is_a_notice_without_a_deadline_and_a_warning(
    path: Path, content: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    with listening(path) as (_, heard):
        path.write_bytes(content)
        assert heard.get(timeout=PATIENCE).deadline is None
    assert (
        len(warnings(caplog)) == 1
        and str(path) in warnings(caplog)[0]
        and '{"grace": 30}' in warnings(caplog)[0]
    )


def test_content_that_is_written_just_after_the_file_was_created_is_not_missed(path: Path) -> None:
    with listening(path) as (source, heard):
        read = source._read

        def slow() -> files.Content:
            content = read()
            if content == files.Content():
                path.write_text("30")  # as a shell does: created first, written then
            return content

        source._read = slow  # type: ignore[method-assign]
        path.touch()
        notice = heard.get(timeout=PATIENCE)
    assert notice.deadline == notice.at + 30.0


def touch(path: Path) -> None:
    os.utime(path)


def write(path: Path) -> None:
    path.write_text("7")


def create_anew(path: Path) -> None:
    fresh = path.with_suffix(".new")
    fresh.touch()
    os.replace(fresh, path)


def remove_and_create(path: Path) -> None:
    path.unlink()
    path.touch()


@pytest.mark.parametrize("change", [touch, write, create_anew, remove_and_create])
def test_a_leftover_counts_only_once_it_is_changed(
    path: Path, change: Callable[[Path], None], caplog: pytest.LogCaptureFixture
) -> None:
    path.touch()
    os.utime(path, (1e9, 1e9))
    with listening(path) as (source, heard):
        source.wait_for_looks()
        assert heard.empty()
        assert len(warnings(caplog)) == 1 and f"rm '{path}'" in warnings(caplog)[0]
        change(path)
        assert heard.get(timeout=PATIENCE).source == "stop-file"


def test_a_later_change_is_told_too_so_that_the_grace_can_be_shortened(path: Path) -> None:
    with listening(path) as (_, heard):
        path.write_text("300")
        first = heard.get(timeout=PATIENCE)
        path.write_text("5")
        second = heard.get(timeout=PATIENCE)
    assert first.deadline is not None and second.deadline is not None and second.deadline < first.deadline


@pytest.mark.parametrize("make", [Path.mkdir, os.mkfifo])
def test_what_is_no_file_is_a_notice_with_a_warning_and_blocks_nothing(
    path: Path, make: Callable[[Path], None], caplog: pytest.LogCaptureFixture
) -> None:
    with listening(path) as (_, heard):
        make(path)
        assert heard.get(timeout=PATIENCE).deadline is None
    assert "not a regular file" in warnings(caplog)[0]


def test_a_folder_that_does_not_exist_yet_is_no_trouble(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "not" / "yet" / "stop"
    with listening(path) as (source, heard):
        source.wait_for_looks()
        path.parent.mkdir(parents=True)
        path.touch()
        assert heard.get(timeout=PATIENCE)
    assert not warnings(caplog)


def test_a_file_that_cannot_be_looked_for_is_warned_of_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    loop = tmp_path / "loop"
    loop.symlink_to(loop)
    with caplog.at_level(logging.DEBUG, "lastcall"), listening(loop / "stop") as (_, heard):
        until(
            lambda: len([line for line in caplog.messages if "cannot be checked" in line]) >= 3,
            "three failures",
        )
        loop.unlink()
        loop.mkdir()
        (loop / "stop").touch()
        assert heard.get(timeout=PATIENCE)
    assert len(warnings(caplog)) == 1


def test_stop_ends_the_thread_and_the_notices(path: Path) -> None:
    with listening(path) as (source, heard):
        thread = source._thread
        assert thread is not None and thread.daemon
    assert not thread.is_alive()
    path.touch()
    source.stop()  # harmless when stopped already
    assert heard.empty()


# ---- a file that the environment names ---------------------------------------------------------------------


def test_a_file_that_was_written_since_the_container_began_is_news_though_it_was_there_first(
    path: Path,
) -> None:
    path.write_text('{"grace": 20, "reason": "preStop"}')
    source, heard = Watched(path, since=time.time() - 60), queue.Queue[Notice]()
    source.start(heard.put)
    try:
        notice = heard.get(timeout=PATIENCE)
        assert notice.reason == f"stop file {path} (preStop)" and notice.deadline == notice.at + 20
        source.wait_for_looks()
        assert heard.empty()
    finally:
        source.stop()


def test_a_file_that_is_older_than_the_container_is_a_leftover(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path.write_text("20")
    os.utime(path, (time.time() - 60, time.time() - 60))
    source, heard = Watched(path, since=time.time() - 30), queue.Queue[Notice]()
    source.start(heard.put)
    try:
        source.wait_for_looks()
        assert heard.empty() and "existed before this run" in caplog.text
        path.touch()
        assert heard.get(timeout=PATIENCE).deadline is not None
    finally:
        source.stop()
