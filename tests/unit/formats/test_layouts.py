from __future__ import annotations

import pytest

from lastcall.formats import layouts
from lastcall.memory import BytesSource
from lastcall.types import Extent, FileLayout


def test_neighbouring_bytes_become_one_extent_and_empty_sources_none() -> None:
    pieces = layouts.Pieces()
    pieces.write(b"ab")
    pieces.write(b"cd")
    pieces.add(BytesSource(b""))
    pieces.add(BytesSource(b"tensor"))
    pieces.write(b"end")
    layout = pieces.layout("file")
    assert [extent.offset for extent in layout.extents] == [0, 4, 10]
    assert (layout.name, layout.size) == ("file", 13)
    assert layouts.materialize(layout) == b"abcdtensorend"


def test_no_pieces_are_an_empty_file() -> None:
    layout = layouts.Pieces().layout("empty")
    assert layout == FileLayout("empty", 0, ())
    assert layouts.materialize(layout) == b""


@pytest.mark.parametrize(
    ("size", "offsets", "message"),
    [
        (8, [0, 3], "extent 1 begins at 3, the one before ends at 4"),
        (9, [0, 5], "extent 1 begins at 5, the one before ends at 4"),
        (8, [1], "extent 0 begins at 1"),
        (9, [0, 4], "the extents end at 8, the file at 9"),
    ],
)
def test_extents_that_do_not_cover_the_file_are_caught(size: int, offsets: list[int], message: str) -> None:
    layout = FileLayout("file", size, tuple(Extent(offset, BytesSource(b"1234")) for offset in offsets))
    with pytest.raises(AssertionError, match=message):
        layouts.materialize(layout)
