"""Who takes part in a save_state() of many ranks: all of them, or only those that a condition of the script's
lets through.

Where a condition around the call is about the rank, each that comes saves by itself. Where none is, all are
waited for before anything is written. One that does not come shows that a condition was about the rank after
all: that is decided once, by the first who has waited long enough, and for all; from then on nobody waits,
and the script's saves are as they would be without us.
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
_PATIENCE = 10.0  # seconds that the others are waited for before the save: they take the same steps
_LONG = 600.0  # ... and while they write
_POLL = 0.02
_ABOUT_RANKS = re.compile(
    r"\b((is|on)_(local_)?(main|last)_process|(local_)?process_index|\w*rank)\b", re.IGNORECASE
)


class Meeting(Protocol):
    """One save."""

    token: str
    leads: bool

    def take_part(self, write: Callable[[], None], publish: Callable[[], None]) -> None:
        """Returns when the save is published. Whatever is raised leaves nothing published."""


class Alone:
    leads = True

    def __init__(self) -> None:
        self.token = str(os.getpid())

    def take_part(self, write: Callable[[], None], publish: Callable[[], None]) -> None:
        write()
        publish()


class Company:
    """The ranks around one call of save_state(). `count` is how many saves they have begun together."""

    def __init__(self, rank: int = 0, size: int = 1, store: Store | None = None) -> None:
        self._rank, self._size, self._store = rank, size, store
        self._count = 0
        self._apart = False
        self._guarded = False

    def called_from(self, frame: FrameType | None) -> Company:
        self._guarded = self._size > 1 and _is_guarded(frame)
        return self

    def meet(self) -> Meeting | None:
        """None: written in place, since nobody knows who else writes there."""
        if self._size == 1 or self._guarded:
            return Alone()
        if self._store is None or self._apart:
            return None
        try:
            self._count += 1
            gathered = _Gathered(self._rank, self._size, self._store, self._count)
            if gathered.all_come():
                return gathered
        except errors.StoreLost:
            log.warning("The other ranks cannot be heard any more: save_state() writes in place")
        self._apart = True
        return None


class _Gathered:
    def __init__(self, rank: int, size: int, store: Store, number: int) -> None:
        self._rank, self._size, self._store = rank, size, store
        self._key = f"save/{number}"
        self.leads = rank == 0
        self.token = f"{store.claim('save/token', uuid.uuid4().hex[:12].encode()).decode()}-{number}"

    def all_come(self) -> bool:
        self._store.set(f"{self._key}/here/{self._rank}", b"1")
        all_here = None not in self._hear("here", _PATIENCE)
        together = self._store.claim(f"{self._key}/how", b"together" if all_here else b"apart") == b"together"
        if not together:
            log.warning("Not all ranks call save_state(): it writes in place, as it would without lastcall")
        return together

    def take_part(self, write: Callable[[], None], publish: Callable[[], None]) -> None:
        try:
            write()
        except BaseException:
            self._store.set(f"{self._key}/laid/{self._rank}", b"failed")
            if self.leads:
                self._store.set(f"{self._key}/published", b"failed")
            raise
        self._store.set(f"{self._key}/laid/{self._rank}", b"done")
        if self.leads:
            self._lead(publish)
        elif self._store.get(f"{self._key}/published", _LONG) != b"done":
            raise errors.SaveError("rank 0 did not publish what all ranks have written")

    def _lead(self, publish: Callable[[], None]) -> None:
        said = b"failed"
        try:
            laid = self._hear("laid", _LONG)
            if any(word != b"done" for word in laid):
                raise errors.SaveError("a rank could not write its part: nothing is published")
            publish()
            said = b"done"
        finally:
            self._store.set(f"{self._key}/published", said)

    def _hear(self, what: str, patience: float) -> list[bytes | None]:
        """What each rank has said; nobody is waited for any more once one has failed."""
        keys = [f"{self._key}/{what}/{rank}" for rank in range(self._size)]
        end = time.monotonic() + patience
        while (
            None in (words := self._store.get_many(keys))
            and b"failed" not in words
            and time.monotonic() < end
        ):
            time.sleep(_POLL)
        return words


def _is_guarded(frame: FrameType | None) -> bool:
    """Whether a condition around a call, in whatever frame, is about the rank."""
    while frame is not None:
        if any(_ABOUT_RANKS.search(test) for test in _conditions(frame)):
            return True
        if frame.f_code.co_name == "<module>" and frame.f_globals.get("__name__") == "__main__":
            return False  # what is above started the script
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
