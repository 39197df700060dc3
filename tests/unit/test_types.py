from __future__ import annotations

from lastcall.memory import BytesSource
from lastcall.types import Capture, Extent, File, FileLayout, Group, TensorEntry


def tensor(name: str, nbytes: int) -> TensorEntry:
    return TensorEntry(name, "U8", (nbytes,), BytesSource(bytes(nbytes)))


def file(name: str, *sizes: int, shared: bool = False) -> File:
    begins = [sum(sizes[:number]) for number in range(len(sizes))]
    extents = tuple(
        Extent(begin, BytesSource(bytes(size))) for begin, size in zip(begins, sizes, strict=True)
    )
    return File(FileLayout(name, sum(sizes), extents), shared)


def test_a_capture_has_no_files_unless_a_framework_brings_some() -> None:
    capture = Capture(1, {}, (Group("model", (tensor("a", 10), tensor("b", 3))),))
    assert (capture.files, capture.nbytes) == ((), 13)
    assert capture.sources == [entry.source for entry in capture.groups[0].entries]


def test_files_count_and_all_their_sources_are_read() -> None:
    groups = (Group("model", (tensor("a", 10),)), Group("rest", (tensor("b", 1),)))
    files = file("x.bin", 4, 5), file("sub/y.bin", 6, shared=True), file("empty")
    capture = Capture(1, {}, groups, files=files)
    assert capture.nbytes == 10 + 1 + 9 + 6
    assert [source.nbytes for source in capture.sources] == [10, 1, 4, 5, 6]
    assert [one.shared for one in capture.files] == [False, True, False]


def test_a_capture_of_nothing_is_nothing() -> None:
    capture = Capture(0, {}, ())
    assert (capture.nbytes, capture.sources, capture.exact, capture.still()) == (0, [], True, True)
