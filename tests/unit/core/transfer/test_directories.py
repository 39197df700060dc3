from __future__ import annotations

import os
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import pytest

from helpers.ranks.thread_ranks import at_once
from lastcall import clock as clocks
from lastcall.core.checkpoint.catalog import Catalog
from lastcall.core.ranks.rendezvous import Rendezvous
from lastcall.core.ranks.world import World
from lastcall.core.store.memory import MemoryStore
from lastcall.core.transfer import directories
from lastcall.core.transfer.directories import FIRST, Directories
from lastcall.storage import files as storage


def test_one_directory_for_all_is_led_by_the_first_rank() -> None:
    found = [Directories(rank) for rank in range(3)]
    assert [one.opens_it for one in found] == [True, False, False]
    assert not any(one.spread or one.elsewhere for one in found)
    assert found[2].shares_with(0) and found[0].shares_with(2)


@pytest.mark.parametrize(
    ("rank", "apart", "leader", "neighbours"),
    [
        (0, False, 0, [0, 2]),
        (1, True, 1, [1, 3]),
        (2, False, 0, [0, 2]),
        (3, True, 1, [1, 3]),
        (4, True, 4, [4]),
    ],
)
def test_each_of_several_directories_has_a_leader(
    rank: int, apart: bool, leader: int, neighbours: list[int]
) -> None:
    found = Directories(rank, [FIRST, "b", FIRST, "b", "c"])
    assert found.spread and found.elsewhere is apart
    assert found.leader == leader and found.opens_it is (rank == leader)
    assert found.leaders == [1, 4]
    assert [other for other in range(5) if found.shares_with(other)] == neighbours


def found(folders: Sequence[Path]) -> list[Directories]:
    """As ranks with these directories find each other. Rank 0 has made its mark."""
    store, clock = MemoryStore(), clocks.Clock()
    directories.mark(folders[0], 0).mkdir(parents=True)

    def one(rank: int) -> Directories:
        world = World(rank, len(folders), store.clone)
        catalog = Catalog(folders[rank], storage.Files(), rank)
        return directories.find(
            Rendezvous(world, clock, lambda: False), world, catalog, folders[rank], True, clock
        )

    return [
        result
        for result in at_once(*(partial(one, rank) for rank in range(len(folders))))
        if isinstance(result, Directories)
    ]


def test_those_that_see_one_directory_share_it_whatever_they_call_it(tmp_path: Path) -> None:
    for name in ("a", "b", "c"):
        (tmp_path / name).mkdir()
    os.symlink(tmp_path / "b", tmp_path / "link")
    names = [FIRST, "1", "2", "1", FIRST, "1"]
    all_of_them = found([tmp_path / name for name in ("a", "b", "c", "link", "a", "b")])
    assert [(one.rank, list(one.names)) for one in all_of_them] == [(rank, names) for rank in range(6)]


def test_where_all_see_the_first_mark_nobody_makes_another(tmp_path: Path) -> None:
    assert found([tmp_path / "a"] * 3) == [Directories(rank) for rank in range(3)]
    assert os.listdir(tmp_path / "a") == ["home-0"]


def test_a_rank_that_sees_the_first_mark_late_has_that_directory_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A network file system may take longer than anybody waits."""
    monkeypatch.setattr(directories, "_seen", lambda mark, clock: False)
    assert found([tmp_path / "a"] * 2) == [Directories(rank) for rank in range(2)]
