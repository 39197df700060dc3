"""Nobody leaves before the checkpoint is in the mirror: neither the rank that copies nor those that would be
taken for failed."""

from __future__ import annotations

import atexit
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from helpers.core import mirrors
from helpers.core.mirrors import Held, Watched
from helpers.ranks.sessions import Crew, periodic, saved, strategy
from helpers.ranks.thread_ranks import Told
from lastcall.core.notice import responder
from lastcall.core.process import exits
from lastcall.types import Capture, Outcome


@pytest.fixture
def at_exit(monkeypatch: pytest.MonkeyPatch) -> list[Callable[[], object]]:
    """What would be called at the end of the process."""
    found: list[Callable[[], object]] = []
    monkeypatch.setattr(atexit, "register", found.append)
    return found


def crew(
    tmp_path: Path,
    place: Watched,
    size: int,
    hook: Callable[[int, int], None] = lambda rank, step: None,
    **jit: Any,
) -> Crew:
    return Crew(tmp_path / "run", size, hook, mirror=place.url, **jit)


def told_at(step: int, notify: Callable[[], None]) -> Callable[[int, int], None]:
    def hook(rank: int, at: int) -> None:
        if rank == 0 and at == step:
            notify()

    return hook


def test_no_rank_leaves_before_the_one_that_copies_has_copied(tmp_path: Path, place: Watched) -> None:
    place.hook = held = Held("send", "checkpoint-")
    made = crew(tmp_path, place, 3)
    made.hook = told_at(4, lambda: made.notify(1))
    over = threading.Event()
    results: list[object] = []

    def train() -> None:
        results.extend(made.train(1000))
        over.set()

    threading.Thread(target=train, daemon=True).start()
    held.wait()
    for session in made.sessions.values():
        assert not session._stopping.wait(0.3)
    held.let_go()
    assert over.wait(mirrors.PATIENCE)
    saved(results)
    assert len(place.checkpoints()) == 1


def test_a_rank_that_does_not_copy_waits_no_longer_than_its_deadline(tmp_path: Path, place: Watched) -> None:
    place.hook = held = Held("send", "checkpoint-")
    made = crew(tmp_path, place, 2)
    made.hook = told_at(4, lambda: made.notify(0, grace=3.0))
    saved(made.train(1000))
    assert place.checkpoints() == []
    held.let_go()


def apart(tmp_path: Path, place: Watched) -> tuple[Crew, Held, threading.Thread]:
    """Two machines. Training fails on the first inside a step, and the second has committed and copies.
    Returns while it does."""

    def hook(rank: int, step: int) -> None:
        if (rank, step) == (0, 4):
            made.subjects[0].gate.enter()
            raise ValueError("a bad batch")

    place.hook = held = Held("send", "checkpoint-")
    made = Crew([tmp_path / "a", tmp_path / "b"], 2, hook, mirror=place.url, grace=600.0)
    training = threading.Thread(target=made.train, args=(1000,), daemon=True)
    training.start()
    held.wait()
    return made, held, training


def test_no_rank_leaves_before_the_one_that_has_committed_elsewhere_has_copied(
    tmp_path: Path, place: Watched
) -> None:
    made, held, training = apart(tmp_path, place)
    for session in made.sessions.values():
        assert not session._stopping.wait(0.3)
    held.let_go()
    training.join(mirrors.PATIENCE)
    assert (
        all(session._stopping.is_set() for session in made.sessions.values())
        and len(place.checkpoints()) == 1
    )


def test_nobody_waits_for_a_copy_of_one_that_is_gone(tmp_path: Path, place: Watched) -> None:
    made, held, training = apart(tmp_path, place)
    strategy(made.sessions[0])._ranks.peers = Told({1})
    assert made.sessions[0]._stopping.wait(mirrors.PATIENCE)
    held.let_go()
    training.join(mirrors.PATIENCE)


def test_ranks_that_begin_with_an_empty_directory_go_on_from_the_copy(
    tmp_path: Path, place: Watched, at_exit: list[Callable[[], object]]
) -> None:
    first = crew(tmp_path, place, 2)
    first.hook = told_at(4, lambda: first.notify(0))
    saved(first.train(1000))
    shutil.rmtree(tmp_path / "run")
    second = crew(tmp_path, place, 2)
    assert second.train(first.subjects[0].step + 3) == [first.subjects[0].step + 3] * 2
    assert [subject.resumed for subject in second.subjects] == [
        {"rank": rank, "step": first.subjects[0].step} for rank in (0, 1)
    ]
    assert len(at_exit) == 1  # only one of them takes the rest along


def test_who_has_finished_and_is_told_to_stop_before_its_end_is_copied_asks_to_be_started_again(
    tmp_path: Path, place: Watched, at_exit: list[Callable[[], object]]
) -> None:
    """It waited for a place that does not answer until it was killed; as finished nobody would have started
    it again."""
    place.hook = held = Held("send", "checkpoint-")
    made = Crew([tmp_path / "a", tmp_path / "b"], 2, mirror=place.url)
    results: list[object] = []
    training = threading.Thread(target=lambda: results.extend(made.train(5)), daemon=True)
    training.start()
    held.wait()
    made.notify(0, grace=1.0)
    training.join(mirrors.PATIENCE)
    held.let_go()
    assert results == [5, 5] and place.checkpoints() == [] and at_exit == []
    assert made.outcomes == [Outcome.SAVED, Outcome.FINISHED]
    again = Crew([tmp_path / "a", tmp_path / "b"], 2, mirror=place.url)
    assert again.train(5) == [5, 5] and place.checkpoints() == ["checkpoint-5"]
    assert again.outcomes == [Outcome.FINISHED] * 2


def test_training_that_raises_waits_for_its_copy_and_takes_nothing_along(
    tmp_path: Path, place: Watched, at_exit: list[Callable[[], object]]
) -> None:
    def fail(rank: int, step: int) -> None:
        if step == 4:
            periodic(made.sessions[0]).begin("test")
            raise ValueError("a bad batch")

    made = crew(tmp_path, place, 1, fail)
    (result,) = made.train(1000)
    assert isinstance(result, ValueError)
    assert place.checkpoints() == ["checkpoint-4"] and at_exit == []


def test_a_training_thread_that_waits_for_the_mirror_is_not_taken_for_one_that_is_stuck(
    tmp_path: Path, place: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    left, coming = threading.Event(), threading.Event()

    def leave(code: int) -> None:
        left.set()
        raise RuntimeError("the process would be gone")

    monkeypatch.setattr(responder, "_LEAVE", 0.1)
    monkeypatch.setattr(exits, "leave", leave)
    place.hook = held = Held("send", "checkpoint-")
    made = crew(tmp_path, place, 1)
    subject, gate = made.subjects[0], made.contexts[0].gate

    def no_boundary(rank: int, step: int) -> None:
        if step == 4:
            made.notify(0)
            mirrors.until(lambda: bool(gate.closed))
            coming.set()  # and is held at the gate until the rescue is over

    def rescue() -> Capture:
        assert coming.wait(mirrors.PATIENCE) and not left.wait(0.2)
        return subject.capture()

    made.hook = no_boundary
    monkeypatch.setattr(subject, "rescue", rescue)
    results: list[object] = []
    training = threading.Thread(target=lambda: results.extend(made.train(1000)), daemon=True)
    training.start()
    held.wait()
    assert not left.wait(1.0)  # the agent has looked by now
    held.let_go()
    training.join(mirrors.PATIENCE)
    assert not left.is_set()  # the script's own way out is left to it
    saved(results)
    assert place.checkpoints() == ["checkpoint-4"]
