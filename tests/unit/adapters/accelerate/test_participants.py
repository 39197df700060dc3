from __future__ import annotations

import os
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import FrameType

import pytest

from helpers.ranks.thread_ranks import at_once
from lastcall import errors
from lastcall.adapters.accelerate import participants
from lastcall.adapters.accelerate.participants import Participants
from lastcall.core.store.memory import MemoryStore


def nothing() -> None: ...


def saves(
    ranks: Participants, write: Callable[[], None] = nothing, publish: Callable[[], None] = nothing
) -> str:
    group = ranks.gather()
    if group is None:
        return "in place"
    group.take_part(write, publish)
    return group.token


@pytest.fixture
def two() -> list[Participants]:
    store = MemoryStore()
    return [Participants(rank, 2, store.clone()) for rank in range(2)]


def test_what_all_ranks_write_is_published_once_after_the_last_of_them(
    two: list[Participants], tmp_path: Path
) -> None:
    published: list[list[str]] = []

    def write(rank: int) -> None:
        (tmp_path / str(rank)).touch()

    def publish() -> None:
        published.append(sorted(path.name for path in tmp_path.iterdir()))

    for number in (1, 2):
        tokens = at_once(*(partial(saves, two[rank], partial(write, rank), publish) for rank in range(2)))
        assert tokens[0] == tokens[1] and str(tokens[0]).endswith(f"-{number}")
    assert published == [["0", "1"]] * 2


def test_one_that_comes_alone_is_not_kept_waiting_twice(
    two: list[Participants], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(participants, "_PATIENCE", 0.05)
    assert saves(two[0]) == "in place"
    monkeypatch.setattr(participants, "_PATIENCE", 1e9)
    assert saves(two[0]) == "in place"
    assert saves(two[1]) == "in place"  # who comes later finds it decided


@pytest.mark.parametrize("rank", [0, 1])
def test_a_part_that_cannot_be_written_leaves_nothing_published(two: list[Participants], rank: int) -> None:
    def fail() -> None:
        raise OSError("no space")

    def publish() -> None:
        raise AssertionError("published")

    results = at_once(
        *(partial(saves, two[each], fail if each == rank else nothing, publish) for each in range(2))
    )
    assert isinstance(results[rank], OSError)
    assert isinstance(results[1 - rank], errors.SaveError)


def test_a_call_behind_a_condition_on_the_rank_is_one_ranks_own(two: list[Participants]) -> None:
    def here() -> FrameType:
        return sys._getframe(1)

    class Accelerator:
        is_main_process = True

    accelerator = Accelerator()
    if accelerator.is_main_process:
        for _ in range(1):
            assert saves(two[0].called_from(here())) == str(os.getpid())


def test_one_process_is_always_alone() -> None:
    assert saves(Participants()) == str(os.getpid())
