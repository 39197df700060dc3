from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from lastcall import errors
from lastcall.core.guard.slots import PAGE, Slots, whole_pages


class Three(Slots):
    """Slots of a page, each with a word of its own."""

    WHAT, MAGIC, COUNT, WORDS = "a file of three", b"three slots 1\0\0\0", 3, 2


def made(path: Path, room: int = PAGE) -> Three:
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        return Three.made(path, fd, room, own=5)
    finally:
        os.close(fd)


def fill(slots: Three, slot: int, text: bytes) -> None:
    begin = slots.unmark(slot)
    slots._view[begin : begin + len(text)] = text


def test_a_new_file_has_room_for_all_its_slots_and_nothing_in_them(tmp_path: Path) -> None:
    made(tmp_path / "file", 2 * PAGE)
    slots = Three.attach(tmp_path / "file")
    assert slots.commits() == [0, 0, 0] and slots.room == 2 * PAGE and slots._words[3] == 5
    assert [slots.begin(slot) for slot in range(3)] == [PAGE, 3 * PAGE, 5 * PAGE]
    info = os.stat(tmp_path / "file")
    assert info.st_size == 7 * PAGE and info.st_blocks * 512 >= info.st_size


def test_what_is_marked_is_seen_by_another_and_what_is_not_is_not(tmp_path: Path) -> None:
    writer, reader = made(tmp_path / "file"), Three.attach(tmp_path / "file")
    fill(writer, 1, b"one")
    assert reader.commits() == [0, 0, 0]
    writer.mark(1, 1, 3)
    assert reader.commits() == [0, 1, 0] and reader.marked(1) == [1, 3]
    assert bytes(reader._view[reader.begin(1) :][:3]) == b"one"


def test_a_slot_that_is_being_filled_is_empty_and_the_others_are_as_they_were(tmp_path: Path) -> None:
    writer, reader = made(tmp_path / "file"), Three.attach(tmp_path / "file")
    for slot in range(3):
        fill(writer, slot, b"text")
        writer.mark(slot, slot + 1, 4)
    fill(writer, 0, b"half")
    assert reader.commits() == [0, 2, 3]


def readable_by_all(path: Path) -> None:
    made(path)
    path.chmod(0o644)


def of_another_kind(path: Path) -> None:
    made(path)._map[:1] = b"X"


def cut_off(path: Path) -> None:
    made(path)
    os.truncate(path, 2 * PAGE)


def without_a_page(path: Path) -> None:
    path.touch(0o600)


def a_link(path: Path) -> None:
    made(path.with_name("target"))
    path.symlink_to("target")


def a_pipe(path: Path) -> None:
    os.mkfifo(path, 0o600)


@pytest.mark.parametrize("make", [readable_by_all, of_another_kind, cut_off, without_a_page, a_link, a_pipe])
def test_what_may_be_anybodys_is_not_mapped(tmp_path: Path, make: Callable[[Path], None]) -> None:
    make(tmp_path / "file")
    with pytest.raises(errors.CheckpointError, match=r"cannot be mapped|is not a file of three"):
        Three.attach(tmp_path / "file")


@pytest.mark.parametrize(("nbytes", "pages"), [(0, 0), (1, 1), (PAGE, 1), (PAGE + 1, 2)])
def test_whole_pages(nbytes: int, pages: int) -> None:
    assert whole_pages(nbytes) == pages * PAGE
