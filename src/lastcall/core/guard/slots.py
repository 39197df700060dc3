"""Slots in a file of shared memory, which outlives the process, with a commit word each.

A slot is unmarked, filled, and marked with one aligned store: SIGKILL at any instant leaves the other slots
as they are, and this one empty or whole. The file is a page of words, then the slots:

    0, 1   magic
    2      bytes of a slot
    3      the owner's
    4...   for each slot: its commit word (0: nothing usable here), and what the owner says of it
"""

from __future__ import annotations

import mmap
import os
import stat
from pathlib import Path
from typing import ClassVar, Self

from lastcall import errors, memory

PAGE = 4096
_FIRST = 4


def whole_pages(nbytes: int) -> int:
    return -(-nbytes // PAGE) * PAGE


class Slots:
    """A mapped file of them; what is in a slot is for the subclass."""

    WHAT: ClassVar[str]
    MAGIC: ClassVar[bytes]
    COUNT: ClassVar[int]
    WORDS: ClassVar[int]  # of a slot, the commit word first

    def __init__(self, path: Path, fd: int, size: int) -> None:
        self.path = path
        self._map = mmap.mmap(fd, size)
        self._view = memoryview(self._map)
        self._words = self._view[:PAGE].cast("Q")
        self._base = memory.address_of(self._map)
        self.room = int(self._words[2])  # bytes of a slot

    @classmethod
    def size(cls, room: int) -> int:
        """Bytes of a file whose slots have so many."""
        return PAGE + cls.COUNT * room

    @classmethod
    def made(cls, path: Path, fd: int, room: int, own: int = 0) -> Self:
        """In a new file. Every page is allocated now: a full /dev/shm is ENOSPC here, and SIGBUS later."""
        os.posix_fallocate(fd, 0, cls.size(room))
        slots = cls(path, fd, cls.size(room))
        slots.room = slots._words[2] = room
        slots._words[3] = own
        slots._map[: len(cls.MAGIC)] = cls.MAGIC
        return slots

    @classmethod
    def attach(cls, path: Path) -> Self:
        """Another process's. CheckpointError where it is none."""
        try:
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
            try:
                info = os.fstat(fd)
                private = info.st_uid == os.geteuid() and not stat.S_IMODE(info.st_mode) & 0o077
                if not stat.S_ISREG(info.st_mode) or not private:
                    # any user may make a file of that name in /dev/shm
                    raise ValueError("it does not belong to this user alone")
                if info.st_size < PAGE:
                    raise ValueError(f"it has {info.st_size} bytes")
                slots = cls(path, fd, info.st_size)
            finally:
                os.close(fd)
        except (OSError, ValueError, OverflowError) as error:
            raise errors.CheckpointError(f"{path} cannot be mapped: {error}") from error
        if slots._map[: len(cls.MAGIC)] != cls.MAGIC or cls.size(slots.room) > info.st_size:
            raise errors.CheckpointError(f"{path} is not {cls.WHAT}")
        return slots

    def begin(self, slot: int) -> int:
        """Where the slot is in the file."""
        return PAGE + slot * self.room

    def commits(self) -> list[int]:
        """The commit word of each slot: 0, or the number of what is in it."""
        return self._words[_FIRST : _FIRST + self.COUNT * self.WORDS : self.WORDS].tolist()

    def unmark(self, slot: int) -> int:
        """Before it is filled. Returns where it begins."""
        self._words[_FIRST + slot * self.WORDS] = 0
        return self.begin(slot)

    def mark(self, slot: int, commit: int, *words: int) -> None:
        at = _FIRST + slot * self.WORDS
        for number, word in enumerate(words, at + 1):
            self._words[number] = word
        self._words[at] = commit  # one aligned store

    def marked(self, slot: int) -> list[int]:
        """The words of a slot."""
        at = _FIRST + slot * self.WORDS
        return self._words[at : at + self.WORDS].tolist()
