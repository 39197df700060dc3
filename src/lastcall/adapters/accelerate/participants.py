"""Which ranks take part in a save_state() of many ranks: all of them, or only those that a condition of the
script's lets through.

Where a condition around the call is about the rank, each rank that calls saves alone. Where there is none,
all ranks wait for one another before anything is written. A rank that does not come shows that a condition
was about the rank after all: the first rank that has waited long enough decides that once, for all; from then
on no rank waits, and the script's saves are as they would be without lastcall.
"""

from __future__ import annotations

import ast
import linecache
import logging
import os
import re
import time
import uuid
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Protocol

from lastcall import errors
from lastcall.core.store import Store

log = logging.getLogger("lastcall")
_PATIENCE = 10.0  # seconds to wait for the other ranks before the save: they take the same steps
_LONG = 600.0  # ... and while they write
_POLL = 0.02
_ABOUT_RANKS = re.compile(
    r"\b((is|on)_(local_)?(main|last)_process|(local_)?process_index|\w*rank)\b", re.IGNORECASE
)


class SaveGroup(Protocol):
    """The ranks that write one save."""

    token: str
    leads: bool

    def take_part(self, write: Callable[[], None], publish: Callable[[], None]) -> None:
        """Returns when the save is published. Where it raises, nothing is published."""


class OneRank:
    leads = True

    def __init__(self) -> None:
        self.token = str(os.getpid())

    def take_part(self, write: Callable[[], None], publish: Callable[[], None]) -> None:
        write()
        publish()


class Participants:
    """The ranks around one call of save_state()."""

    def __init__(self, rank: int = 0, size: int = 1, store: Store | None = None) -> None:
        self._rank, self._size, self._store = rank, size, store
        self._saves = 0  # that the ranks have begun together
        self._separate = False  # a rank did not come: each saves as it would without lastcall
        self._one_rank = False  # the call is behind a condition on the rank

    def called_from(self, frame: FrameType | None) -> Participants:
        self._one_rank = self._size > 1 and _is_about_the_rank(frame)
        return self

    def gather(self) -> SaveGroup | None:
        """None: the save is written in place, since it is not known which ranks write there."""
        if self._size == 1 or self._one_rank:
            return OneRank()
        if self._store is None or self._separate:
            return None
        try:
            self._saves += 1
            group = _AllRanks(self._rank, self._size, self._store, self._saves)
            if group.complete():
                return group
        except errors.StoreLost:
            log.warning("Lost the connection to the other ranks: save_state() writes in place")
        self._separate = True
        return None


class _AllRanks:
    def __init__(self, rank: int, size: int, store: Store, number: int) -> None:
        self._rank, self._size, self._store = rank, size, store
        self._key = f"save/{number}"
        self.leads = rank == 0
        self.token = f"{store.claim('save/token', uuid.uuid4().hex[:12].encode()).decode()}-{number}"

    def complete(self) -> bool:
        """Whether all ranks call save_state(), too."""
        self._store.set(f"{self._key}/here/{self._rank}", b"1")
        all_here = None not in self._read("here", _PATIENCE)
        together = self._store.claim(f"{self._key}/how", b"together" if all_here else b"apart") == b"together"
        if not together:
            log.warning("Not all ranks call save_state(): it writes in place, as it would without lastcall")
        return together

    def take_part(self, write: Callable[[], None], publish: Callable[[], None]) -> None:
        try:
            write()
        except BaseException:
            self._store.set(f"{self._key}/written/{self._rank}", b"failed")
            if self.leads:
                self._store.set(f"{self._key}/published", b"failed")
            raise
        self._store.set(f"{self._key}/written/{self._rank}", b"done")
        if self.leads:
            self._lead(publish)
        elif self._store.get(f"{self._key}/published", _LONG) != b"done":
            raise errors.SaveError("rank 0 did not publish what all ranks have written")

    def _lead(self, publish: Callable[[], None]) -> None:
        result = b"failed"
        try:
            if any(written != b"done" for written in self._read("written", _LONG)):
                raise errors.SaveError("a rank could not write its part: nothing is published")
            publish()
            result = b"done"
        finally:
            self._store.set(f"{self._key}/published", result)

    def _read(self, what: str, patience: float) -> list[bytes | None]:
        """What each rank has reported by then, or once one has failed."""
        keys = [f"{self._key}/{what}/{rank}" for rank in range(self._size)]
        end = time.monotonic() + patience
        while (
            None in (reports := self._store.get_many(keys))
            and b"failed" not in reports
            and time.monotonic() < end
        ):
            time.sleep(_POLL)
        return reports


def _is_about_the_rank(frame: FrameType | None) -> bool:
    """Whether a condition around a call, in any frame, is about the rank."""
    while frame is not None:
        if any(_ABOUT_RANKS.search(test) for test in _conditions(frame)):
            return True
        if frame.f_code.co_name == "<module>" and frame.f_globals.get("__name__") == "__main__":
            return False  # the frames above started the script
        frame = frame.f_back
    return False


def _conditions(frame: FrameType) -> Iterator[str]:
    """Of the statements around the line that a frame is at, and the decorators of its function."""
    source = "".join(linecache.getlines(frame.f_code.co_filename, frame.f_globals))
    if not _ABOUT_RANKS.search(source):
        return
    try:
        tree = ast.parse(source)
    except SyntaxError:
        return
    line = frame.f_lineno
    for node in ast.walk(tree):
        if not isinstance(node, ast.stmt) or not node.lineno <= line <= (node.end_lineno or node.lineno):
            continue
        if isinstance(node, ast.If | ast.While):
            yield ast.unparse(node.test)
        if isinstance(node, ast.FunctionDef):
            yield from map(ast.unparse, node.decorator_list)
