from __future__ import annotations

import json
from pathlib import Path

import pytest

from lastcall import errors
from lastcall.core.checkpoint.ownership import NAME, Fence


def test_all_ranks_of_an_incarnation_hold_the_directory(tmp_path: Path) -> None:
    leader = Fence.take(tmp_path, 3)
    other = Fence(tmp_path, leader.token)
    assert leader.holds() and other.holds()
    other.check()
    assert json.loads((tmp_path / NAME).read_bytes())["incarnation"] == 3


def test_a_later_incarnation_shuts_the_earlier_one_out(tmp_path: Path) -> None:
    earlier = Fence.take(tmp_path, 1)
    later = Fence.take(tmp_path, 2)
    assert later.holds() and not earlier.holds()
    with pytest.raises(
        errors.SaveError, match="nothing is committed: a later incarnation of this run owns the directory"
    ):
        earlier.check()
    with pytest.raises(errors.SaveError, match="a later incarnation of this run owns the directory"):
        earlier.check_alone()
    later.check_alone()


@pytest.mark.parametrize("text", [None, b"", b"{", b"[]", b"null", b'{"incarnation": 1}', b"\xff"])
def test_a_directory_whose_owner_cannot_be_read_is_nobodys(tmp_path: Path, text: bytes | None) -> None:
    fence = Fence.take(tmp_path, 1)
    if text is None:
        (tmp_path / NAME).unlink()
    else:
        (tmp_path / NAME).write_bytes(text)
    assert not fence.holds()
    fence.check_alone()  # one that is alone has a lock, too, and loses no save over this
