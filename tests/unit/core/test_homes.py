from __future__ import annotations

import os
from pathlib import Path

import pytest

from lastcall.core import homes
from lastcall.core.homes import FIRST, Homes


def test_one_directory_for_all_is_led_by_the_first_rank() -> None:
    found = [Homes(rank) for rank in range(3)]
    assert [one.leads for one in found] == [True, False, False]
    assert not any(one.spread or one.apart for one in found)
    assert found[2].shares_with(0) and found[0].shares_with(2)


@pytest.mark.parametrize(
    ("rank", "apart", "leader", "neighbours"),
    [(0, False, 0, [0, 2]), (1, True, 1, [1, 3]), (2, False, 0, [0, 2]), (3, True, 1, [1, 3]), (4, True, 4, [4])],
)
def test_each_of_several_directories_has_a_leader(rank: int, apart: bool, leader: int, neighbours: list[int]) -> None:
    found = Homes(rank, [FIRST, "b", FIRST, "b", "c"])
    assert found.spread and found.apart is apart
    assert found.leader == leader and found.leads is (rank == leader)
    assert found.leaders == [1, 4]
    assert [other for other in range(5) if found.shares_with(other)] == neighbours


def test_a_directory_has_one_name_however_it_is_written(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    os.symlink(tmp_path / "a", tmp_path / "link")
    assert homes.name_of(tmp_path / "a", "m") == homes.name_of(tmp_path / "link", "m")
    assert len({homes.name_of(tmp_path / "a", "m"), homes.name_of(tmp_path / "b", "m"), homes.name_of(tmp_path / "a", "n")}) == 3
