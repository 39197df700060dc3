"""What one that leaves has written down, and how long it still has."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
from pathlib import Path

import pytest

from lastcall.core.checkpoint import departure
from lastcall.core.checkpoint.departure import Departure, DepartureNote
from lastcall.core.process.identity import Process


def dead() -> Process:
    """A process of this machine that has ended."""
    with subprocess.Popen(["true"]) as child:
        child.wait()
    return dataclasses.replace(Process.own(), pid=child.pid, started=1)


def write(private: Path, leaver: Departure, ago: float = 0.0) -> None:
    path = private / f"leaving-{leaver.rank}.json"
    path.write_text(json.dumps(dataclasses.asdict(leaver)))
    written = path.stat().st_mtime - ago
    os.utime(path, (written, written))


def test_who_leaves_says_so_until_it_is_gone(tmp_path: Path) -> None:
    mine = DepartureNote(tmp_path, 0)
    mine.say("SIGTERM", 25.0)
    (found,) = departure.found(tmp_path)
    assert (found.rank, found.reason, found.seconds, found.process) == (0, "SIGTERM", 25.0, Process.own())
    assert str(found) == f"process {os.getpid()} on {os.uname().nodename}"
    mine.unsay()
    mine.unsay()
    assert departure.found(tmp_path) == [] and list(tmp_path.iterdir()) == []


def test_one_that_never_said_it_takes_nothing_back(tmp_path: Path) -> None:
    DepartureNote(tmp_path, 0).say("SIGTERM", 25.0)
    DepartureNote(tmp_path, 0).unsay()
    assert len(departure.found(tmp_path)) == 1


def test_a_forked_child_does_not_speak_for_its_parent(tmp_path: Path) -> None:
    mine = DepartureNote(tmp_path, 0)
    mine.say("SIGTERM", 25.0)
    child = os.fork()
    if child == 0:
        mine.unsay()
        os._exit(0)
    os.waitpid(child, 0)
    assert len(departure.found(tmp_path)) == 1


def test_every_rank_says_it_for_itself(tmp_path: Path) -> None:
    for rank in (0, 3):
        DepartureNote(tmp_path, rank).say("SIGTERM", 5.0)
    assert [leaver.rank for leaver in departure.found(tmp_path)] == [0, 3]
    departure.forget(tmp_path)
    assert departure.found(tmp_path) == []


def test_the_time_that_is_left_is_counted_from_when_it_was_written(tmp_path: Path) -> None:
    write(tmp_path, Departure(0, "SIGTERM", 30.0, Process("elsewhere/1", 1, 1), "far"), ago=10.0)
    (found,) = departure.found(tmp_path)
    assert 15.0 < departure.left(tmp_path, found) <= 20.01
    assert os.listdir(tmp_path) == ["leaving-0.json"]


def test_a_directory_that_cannot_be_written_to_is_no_reason_not_to_save(tmp_path: Path) -> None:
    DepartureNote(tmp_path / "none", 0).say("SIGTERM", 5.0)
    DepartureNote(tmp_path / "none", 0).unsay()


@pytest.mark.parametrize(
    "change",
    [
        {"rank": "0"},
        {"process": {"host": "h", "pid": "1", "started": 1}},
        {"process": 7},
        {"seconds": 1e999},
        {"seconds": "NaN"},
        {"x": 1},
    ],
)
def test_what_makes_no_sense_is_waited_for_by_nobody(tmp_path: Path, change: dict[str, object]) -> None:
    whole = dataclasses.asdict(Departure(0, "x", 1.0, Process("h", 1, 1), "m"))
    (tmp_path / "leaving-0.json").write_text(json.dumps(whole))
    assert len(departure.found(tmp_path)) == 1
    (tmp_path / "leaving-0.json").write_text(json.dumps({**whole, **change}))
    assert departure.found(tmp_path) == []


@pytest.mark.parametrize("text", [b"", b"[]", b"{}", b"\xff", b'{"rank": 0'])
def test_half_a_file_is_waited_for_by_nobody(tmp_path: Path, text: bytes) -> None:
    (tmp_path / "leaving-0.json").write_bytes(text)
    assert departure.found(tmp_path) == []


def test_it_is_gone_when_its_process_is_and_not_before(tmp_path: Path) -> None:
    mine = Process.own()
    assert Departure(0, "x", 1.0, dead(), "m").gone(mine, locked=False)
    assert not Departure(0, "x", 1.0, mine, "m").gone(mine, locked=False)
    assert not Departure(0, "x", 1.0, Process("elsewhere/1", 1, 1), "m").gone(mine, locked=True)


def test_the_lock_proves_it_of_the_first_rank_of_another_container_on_this_machine(tmp_path: Path) -> None:
    mine = Process.own()
    neighbour = Process(f"{mine.host.partition('/')[0]}/1", 1, 1)
    assert Departure(0, "x", 1.0, neighbour, "m").gone(mine, locked=True)
    assert not Departure(0, "x", 1.0, neighbour, "m").gone(mine, locked=False)
    assert not Departure(1, "x", 1.0, neighbour, "m").gone(mine, locked=True)  # it never had the lock
