"""One incarnation, as real processes."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from helpers.processes import scripts as processes
from helpers.processes.forkserver import until
from lastcall.drill.incarnation import Incarnation
from lastcall.drill.options import DrillOptions

JOIN = """
import os, sys, time
from pathlib import Path
from lastcall.core.process.registry import Membership
membership = Membership(Path(os.environ["LASTCALL_REGISTRY"]), Path("here"))
membership.update(step=4, resumed=3)
print("joined", flush=True)
time.sleep(600)
"""


@pytest.fixture
def lives() -> Iterator[list[Incarnation]]:
    started: list[Incarnation] = []
    yield started
    for life in started:
        life.kill_rest()


def start(lives: list[Incarnation], folder: Path, *command: str) -> Incarnation:
    """A life with a registry and a log of its own."""
    book = folder / f"life-{len(lives)}"
    book.mkdir()
    lives.append(
        Incarnation(
            DrillOptions(command), "/bin/sh" if command[0] == "sh" else command[0], book, folder / "log"
        )
    )
    return lives[-1]


def watched(life: Incarnation) -> bool:
    life.look()
    return bool(life.members)


def test_a_training_process_is_known_by_its_word(
    lives: list[Incarnation], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(processes.SOURCES))
    life = start(lives, tmp_path, sys.executable, "-c", JOIN)
    assert life.step() is None and not life.stepping and not life.finished
    until(lambda: watched(life), "a member")
    assert (life.step(), life.stepping, life.finished) == (4, True, False)
    assert life.roots == [Path("here").absolute()] and [member.pid for member in life.unaware] == [
        life.process.pid
    ]


def test_the_registry_of_a_launcher_in_between_is_found_in_the_environment(
    lives: list[Incarnation], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(processes.SOURCES))
    other = tmp_path / "launcher"
    other.mkdir()
    script = tmp_path / "join.py"
    script.write_text(JOIN)
    life = start(
        lives, tmp_path, "sh", "-c", f"LASTCALL_REGISTRY='{other}' '{sys.executable}' '{script}'; true"
    )
    until(lambda: watched(life), "a member")
    for path in other.glob("member-*"):
        path.unlink()  # as the launcher does at its end
    life.look()
    assert life.step() == 4 and life.members[0].pid != life.process.pid


def test_the_last_lines_are_those_of_this_life_only(lives: list[Incarnation], tmp_path: Path) -> None:
    (tmp_path / "log").write_text("from before\n")
    quiet = start(lives, tmp_path, "sh", "-c", "true")
    quiet.process.wait()
    assert not quiet.has_spoken and quiet.tail() == []
    life = start(lives, tmp_path, "sh", "-c", "for i in 1 2 3 4; do echo line $i; done; echo error >&2")
    life.process.wait()
    assert life.has_spoken and life.tail(3) == ["line 3", "line 4", "error"]
    (tmp_path / "log").unlink()
    assert life.tail() == [] and not life.has_spoken


def test_what_hides_in_a_session_of_its_own_is_killed_too(lives: list[Incarnation], tmp_path: Path) -> None:
    life = start(lives, tmp_path, "sh", "-c", "setsid sh -c 'trap : TERM; sleep 600; true' & wait")
    until(lambda: len(life.tree()) >= 3, "the tree")
    pids = set(life.tree())
    life.kill_rest()
    assert all(processes.gone(pid) for pid in pids) and life.process.returncode == -signal.SIGKILL


def test_processes_that_were_there_before_are_left_alone(lives: list[Incarnation], tmp_path: Path) -> None:
    first = start(lives, tmp_path, "sh", "-c", "sleep 600")
    second = start(lives, tmp_path, "sh", "-c", "sleep 600")
    second.kill_rest()
    assert first.process.poll() is None and not processes.gone(first.process.pid)


def test_it_is_told_once(lives: list[Incarnation], tmp_path: Path) -> None:
    life = start(
        lives, tmp_path, "sh", "-c", "trap 'echo told' TERM; echo ready; while :; do sleep 0.05; done"
    )
    until(lambda: "ready" in life.tail(), "the trap")
    first = life.tell(signal.SIGTERM, "child")
    assert first[2] == [life.process.pid]
    assert life.tell(signal.SIGTERM, "child") is first
    until(lambda: "told" in life.tail(), "the signal")
    os.kill(life.process.pid, signal.SIGTERM)
    until(
        lambda: life.tail().count("told") == 2,
        "the other signal: one of the drill's was all there was before",
    )


def test_who_is_told_where_no_training_has_joined_is_the_command(
    lives: list[Incarnation], tmp_path: Path
) -> None:
    life = start(lives, tmp_path, "sh", "-c", "sleep 600")
    assert life.tell(signal.SIGTERM, "training")[2] == [life.process.pid]
    assert life.process.wait() == -signal.SIGTERM
    assert life.step() is None and life.unaware == []
