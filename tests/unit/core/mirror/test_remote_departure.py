"""Whom an incarnation with a new directory waits for before it fetches, and for how long."""

from __future__ import annotations

import json
import os
from dataclasses import asdict
from pathlib import Path

import pytest

from helpers.core import mirrors
from helpers.core.mirrors import Held, Watched
from lastcall import testing
from lastcall.core.checkpoint.catalog import Catalog
from lastcall.core.checkpoint.departure import Departure
from lastcall.core.mirror import remote_departure
from lastcall.core.mirror.remote_catalog import RemoteCatalog
from lastcall.core.mirror.remote_departure import RemoteDepartureNote
from lastcall.core.process.identity import Process
from lastcall.storage import files as storage

FAR = Process("elsewhere/1", 12, 34)  # on another machine: nobody here can look it up


class Clock(testing.FakeClock):
    """After so many seconds of waiting, something happens."""

    def __init__(self) -> None:
        super().__init__()
        self.began = self.now()
        self.at, self.event = float("inf"), lambda: None

    @property
    def waited(self) -> float:
        return self.now() - self.began

    def sleep(self, seconds: float) -> None:
        super().sleep(seconds)
        if self.waited >= self.at:
            self.at = float("inf")
            self.event()


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def word(tmp_path: Path, place: Watched, clock: Clock) -> RemoteDepartureNote:
    return RemoteDepartureNote(RemoteCatalog(place.url, Catalog(tmp_path / "run", storage.Files())), clock)


def says(place: Watched, process: Process = FAR, seconds: float = 60.0) -> None:
    place.write(
        remote_departure.NAME, json.dumps(asdict(Departure(0, "SIGTERM", seconds, process, "far"))).encode()
    )


def there(place: Watched) -> bool:
    return remote_departure.NAME in place.names()


def test_where_nobody_leaves_nobody_waits(word: RemoteDepartureNote, place: Watched, clock: Clock) -> None:
    assert word.wait_for_the_one_before(lambda: False)
    assert clock.waited == 0.0 and place.done("remove") == []


def test_one_that_copies_is_waited_for_until_it_takes_its_word_back(
    word: RemoteDepartureNote, place: Watched, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    says(place)
    clock.at, clock.event = 33.0, lambda: place.remove([remote_departure.NAME])
    assert word.wait_for_the_one_before(lambda: False)
    assert 33.0 <= clock.waited < 35.0
    assert (
        caplog.text.count(
            "Waiting for process 12 on far, which was asked to stop (SIGTERM) and may still be uploading to"
        )
        == 1
    )
    assert "for at most 70 s" in caplog.text


def test_one_that_never_takes_it_back_is_not_waited_for_longer_than_it_could_have_lived(
    word: RemoteDepartureNote, place: Watched, clock: Clock
) -> None:
    says(place, seconds=20.0)
    assert word.wait_for_the_one_before(lambda: False)
    assert 30.0 <= clock.waited < 32.0
    assert not there(place)  # the next one need not find this out again


def test_a_later_one_gets_its_own_time(word: RemoteDepartureNote, place: Watched, clock: Clock) -> None:
    says(place, seconds=20.0)
    clock.at, clock.event = 15.0, lambda: says(place, Process("third/1", 5, 6), 100.0)
    assert word.wait_for_the_one_before(lambda: False)
    assert 124.0 <= clock.waited < 128.0


def test_what_was_written_longer_ago_than_it_could_live_is_not_waited_for(
    word: RemoteDepartureNote, place: Watched, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    says(place)
    os.utime(place.root / remote_departure.NAME, (1e9, 1e9))
    assert word.wait_for_the_one_before(lambda: False)
    assert clock.waited == 0.0 and not caplog.records and not there(place)


def test_a_process_that_is_known_to_be_gone_is_not_waited_for(
    word: RemoteDepartureNote, place: Watched, clock: Clock
) -> None:
    says(place, Process(Process.own().host, 2**22 + 1, 1))
    assert word.wait_for_the_one_before(lambda: False)
    assert clock.waited == 0.0 and not there(place)


def test_nobody_waits_for_itself(word: RemoteDepartureNote, place: Watched, clock: Clock) -> None:
    says(place, Process.own())
    assert word.wait_for_the_one_before(lambda: False)
    assert clock.waited == 0.0


def test_who_is_told_to_stop_while_it_waits_leaves_the_word_for_the_next(
    word: RemoteDepartureNote, place: Watched, clock: Clock
) -> None:
    says(place)
    assert not word.wait_for_the_one_before(lambda: clock.waited > 5.0)
    assert clock.waited < 8.0 and there(place)


@pytest.mark.parametrize("data", [b"", b"\xff", b"[]", b'{"seconds": 1}', b"[" * 60_000])
def test_what_is_no_word_is_not_waited_for(
    word: RemoteDepartureNote, place: Watched, clock: Clock, data: bytes
) -> None:
    place.write(remote_departure.NAME, data)
    assert word.wait_for_the_one_before(lambda: False)
    assert clock.waited == 0.0 and not there(place)


def test_a_word_without_an_end_is_none(word: RemoteDepartureNote, place: Watched, clock: Clock) -> None:
    says(place, seconds=float("inf"))
    assert word.wait_for_the_one_before(lambda: False)
    assert clock.waited == 0.0


def test_it_is_said_and_taken_back(word: RemoteDepartureNote, place: Watched) -> None:
    word.say("SIGTERM", 30.0)
    word.unsay(mirrors.PATIENCE)
    assert place.done("write") == [remote_departure.NAME] and not there(place)
    place.calls.clear()
    word.unsay(mirrors.PATIENCE)  # there is nothing to take back
    assert place.calls == []


def test_a_store_that_does_not_answer_keeps_nobody_who_says_it_or_takes_it_back(
    word: RemoteDepartureNote, place: Watched
) -> None:
    place.hook = held = Held("write", remote_departure.NAME)
    word.say("SIGTERM", 30.0)
    held.wait()
    word.unsay(0.01)
    assert place.done("remove") == []
    held.let_go()
    mirrors.until(lambda: bool(place.done("remove")))  # never before it was said
