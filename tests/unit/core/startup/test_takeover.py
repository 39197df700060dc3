"""Whom an incarnation waits for before it takes the directory over, and for how long."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from lastcall import errors, testing
from lastcall.core.checkpoint import departure
from lastcall.core.checkpoint.catalog import Catalog, Owner
from lastcall.core.checkpoint.departure import Departure, DepartureNote
from lastcall.core.process.identity import Process
from lastcall.core.startup import takeover
from lastcall.core.startup.takeover import Takeover
from lastcall.storage import files as storage

FAR = Process("elsewhere/1", 12, 34)  # on another machine: nobody here can look it up


class Clock(testing.FakeClock):
    """Something happens while somebody waits."""

    def __init__(self) -> None:
        super().__init__()
        self.began = self.now()
        self.events: list[tuple[float, Callable[[], None]]] = []

    @property
    def waited(self) -> float:
        return self.now() - self.began

    def sleep(self, seconds: float) -> None:
        super().sleep(seconds)
        for at, event in [event for event in self.events if event[0] <= self.waited]:
            self.events.remove((at, event))
            event()


class Locked(Catalog):
    """A directory whose lock is somebody else's until `free` is set."""

    free = True
    holder = Owner("12", "far", "elsewhere/1")

    def try_lock(self) -> bool:
        return self.free and super().try_lock()

    def owner(self) -> Owner:
        return self.holder if not self.free else super().owner()


@pytest.fixture
def cat(root: Path) -> Iterator[Locked]:
    cat = Locked(root, storage.Files())
    yield cat
    cat.close()


def says(cat: Catalog, process: Process, seconds: float, rank: int = 0) -> None:
    departure.DepartureNote(cat.private, rank).say("SIGTERM", seconds)
    path = cat.private / f"leaving-{rank}.json"
    body = path.read_text().replace(f'"host": "{Process.own().host}"', f'"host": "{process.host}"')
    path.write_text(body)
    assert departure.found(cat.private)[-1].process.host == process.host


def opened(cat: Catalog, clock: Clock, told: Callable[[], bool] = lambda: False) -> bool:
    return Takeover(cat, clock, told).open()


def test_a_directory_that_nobody_uses_is_taken_at_once(cat: Locked, caplog: pytest.LogCaptureFixture) -> None:
    clock = Clock()
    assert opened(cat, clock) and cat.held
    assert clock.waited == 0.0 and not caplog.records


def test_one_that_is_saving_is_waited_for_until_it_has_left_and_no_longer(
    cat: Locked, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    clock = Clock()
    says(cat, FAR, 60.0)
    clock.events.append((33.0, lambda: departure.forget(cat.private)))
    assert opened(cat, clock) and cat.held
    assert 33.0 <= clock.waited < 34.0
    first, last = caplog.messages
    assert (
        first.startswith("Waiting for process ")
        and "was asked to stop (SIGTERM) and may still be saving: for at most 70 s" in first
    )
    assert last.startswith("The directory is free after 33.")


def test_one_that_died_elsewhere_is_not_waited_for_longer_than_it_could_have_lived(
    cat: Locked, caplog: pytest.LogCaptureFixture
) -> None:
    clock = Clock()
    says(cat, FAR, 20.0)
    assert opened(cat, clock) and cat.held
    assert 30.0 <= clock.waited < 31.0
    assert "should have ended 10 s ago" in caplog.text
    assert departure.found(cat.private) == []  # the next one need not find this out again


def test_the_lock_of_one_that_is_saving_is_waited_for_as_long_as_its_grace(cat: Locked) -> None:
    clock = Clock()
    cat.free = False
    says(cat, FAR, 300.0)
    clock.events.append((250.0, lambda: setattr(cat, "free", True)))
    clock.events.append((250.0, lambda: departure.forget(cat.private)))
    assert opened(cat, clock) and cat.held
    assert 250.0 <= clock.waited < 251.0


def test_one_that_says_so_while_its_lock_is_waited_for_gets_its_whole_grace(cat: Locked) -> None:
    clock = Clock()
    cat.free, cat.holder = False, Owner("12", "here", Process.own().host)
    clock.events.append((8.0, lambda: says(cat, FAR, 100.0)))
    clock.events.append((90.0, lambda: setattr(cat, "free", True)))
    clock.events.append((90.0, lambda: departure.forget(cat.private)))
    assert opened(cat, clock) and 90.0 <= clock.waited < 91.0


@pytest.mark.parametrize(("host", "seconds"), [("own", takeover.PATIENCE), ("elsewhere/1", takeover.LEASE)])
def test_a_lock_whose_owner_has_not_said_that_it_leaves_is_another_run(
    cat: Locked, host: str, seconds: float, caplog: pytest.LogCaptureFixture
) -> None:
    clock = Clock()
    cat.free, cat.holder = False, Owner("12", "far", Process.own().host if host == "own" else host)
    with pytest.raises(errors.BusyError, match="in use by process 12 on far"):
        opened(cat, clock)
    assert seconds <= clock.waited < seconds + 1.0 and not cat.held
    assert (
        f"Waiting for process 12 on far, which holds {cat.root}: for at most {seconds:.0f} s" in caplog.text
    )


def test_a_lock_that_is_still_held_when_its_owner_should_be_dead_is_an_error(cat: Locked) -> None:
    clock = Clock()
    cat.free, cat.holder = False, Owner("12", "here", Process.own().host)
    says(cat, FAR, 20.0)
    with pytest.raises(errors.BusyError):
        opened(cat, clock)
    assert 39.0 < clock.waited < 41.0  # its grace, what counts as dead after it, and the patience with a lock


def test_who_is_told_to_stop_while_it_waits_does_not_take_the_directory(cat: Locked) -> None:
    clock = Clock()
    says(cat, FAR, 60.0)
    assert not opened(cat, clock, lambda: clock.waited > 5.0)
    assert clock.waited < 6.0 and not cat.held
    assert len(departure.found(cat.private)) == 1  # whoever comes next waits in turn


def test_every_rank_that_is_leaving_is_waited_for(cat: Locked) -> None:
    clock = Clock()
    says(cat, FAR, 5.0, rank=0)
    says(cat, Process("third/1", 12, 34), 40.0, rank=2)
    assert opened(cat, clock) and 50.0 <= clock.waited < 51.0


def test_nobody_waits_for_itself(cat: Locked) -> None:
    clock = Clock()
    DepartureNote(cat.private, 0).say("SIGTERM", 50.0)
    assert opened(cat, clock) and clock.waited == 0.0


def test_what_was_written_longer_ago_than_it_could_live_is_not_waited_for(
    cat: Locked, caplog: pytest.LogCaptureFixture
) -> None:
    clock = Clock()
    says(cat, FAR, 20.0)
    os.utime(cat.private / "leaving-0.json", (1e9, 1e9))
    assert opened(cat, clock) and clock.waited == 0.0
    assert "Waiting for" not in caplog.text


def test_the_words_for_a_leaver_name_its_rank_where_it_is_not_the_first() -> None:
    assert str(Departure(3, "x", 1.0, FAR, "far")) == "rank 3, process 12 on far"
