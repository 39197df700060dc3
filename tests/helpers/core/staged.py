"""A training in a thread of its own that goes as far as a test says, so that the test's thread is the side
thread of what it asks of a subject.

The training thread stops at places: "forward", the end of a forward; "mutation", inside of an optimizer step
that has changed something; "stepped", after it; "boundary", where it calls Session.at_boundary.
"""

from __future__ import annotations

import abc
import hashlib
import queue
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, TypeVar, cast
from unittest import mock

from helpers.ranks.thread_ranks import PATIENCE
from lastcall.core import session as sessions
from lastcall.core.checkpoint.record import Entry
from lastcall.core.context import RunContext
from lastcall.core.notice.inbox import Inbox
from lastcall.core.session import Session
from lastcall.core.subject import Subject
from lastcall.formats import layouts
from lastcall.settings import JITCheckpointConfig
from lastcall.types import Capture, Extent, FileLayout, Kind, Source

T = TypeVar("T")
_here = threading.local()


class Over(Exception):
    """The test has seen enough: raised in the training thread."""


def reach(place: str) -> None:
    """The training of this thread is at this place."""
    training: Staged | None = getattr(_here, "training", None)
    if training is not None:
        training._reach(place)


def quiet() -> JITCheckpointConfig:
    """Nothing but what a test asks for: no signals, and no save where the training is ended."""
    return JITCheckpointConfig(
        enabled=True, signals=(), kill_wait=0.0, spare=False, huge_pages=False, threads=1, on_error="leave",
        run_id="staged",
    )  # fmt: skip


class Staged(abc.ABC):
    """`seed`: of the state as the script builds it. `wide`: it builds another shape. `joined`: as rank `rank`
    of two, whose ranks keep in this folder what the others must know."""

    subject: Subject
    session: Session
    context: RunContext
    epochs = True  # the end of an epoch is a boundary
    reports: frozenset[str] = frozenset()  # the metrics that it reports

    def __init__(
        self, root: Path, *, seed: int = 0, wide: bool = False, joined: Path | None = None, rank: int = 0
    ) -> None:
        self.root, self.seed, self.wide, self.rank = root, seed, wide, rank
        self._joined = joined
        self.barred_at_start = ""  # what unrescuable() said before the first boundary
        self._awaited = "boundary"
        self._told: queue.Queue[tuple[str, object]] = queue.Queue()
        self._work: queue.Queue[Callable[[], object]] = queue.Queue()
        self._patched = ExitStack()
        self._thread = threading.Thread(target=self._run, daemon=True)

    # ---- what a training is ------------------------------------------------------------------------------

    @abc.abstractmethod
    def train(self) -> None:
        """On the training thread: for as many steps as are wanted."""

    @abc.abstractmethod
    def live(self) -> Mapping[str, object]:
        """All that training changes, as the script sees it."""

    @abc.abstractmethod
    def be(self, rank: int, size: int) -> None:
        """Tell the subject which rank it is."""

    # ---- what a test asks --------------------------------------------------------------------------------

    def start(self) -> None:
        """As far as to its first boundary."""
        begin, at_boundary = sessions.begin, Session.at_boundary

        def begun(context: RunContext, inbox: Inbox) -> Session:
            self.context, self.subject = context, context.subject
            self.session = begin(context, inbox)
            if self._joined is not None:
                self.be(self.rank, 2)
                self.subject.join("run", 1, self._joined)
            self.barred_at_start = self.subject.unrescuable()
            return self.session

        def arrived(session: Session, *, epoch_end: bool = False) -> None:
            reach("boundary")
            at_boundary(session, epoch_end=epoch_end)

        self._patched.enter_context(mock.patch.object(sessions, "begin", begun))
        self._patched.enter_context(mock.patch.object(Session, "at_boundary", arrived))
        self._thread.start()
        self._wait("reached")

    def until(self, place: str) -> None:
        self._awaited = place
        self._work.put(_go_on)
        self._wait("reached")

    def step(self) -> None:
        """To the next boundary."""
        self.subject.stop_at_next_boundary()
        self.until("boundary")

    def to_step(self, step: int) -> None:
        while self.subject.step < step:
            self.step()

    def do(self, work: Callable[[], T]) -> T:
        """Done by the training thread, where it is."""
        self._work.put(work)
        return cast(T, self._wait("done"))

    def digest(self) -> str:
        return hashed(self.live())

    def save(self, capture: Capture) -> Entry:
        """Commit it, on this thread, as the agent does."""
        with self.session.no_other_save():
            return self.session.save(capture, Kind.MANUAL, "test")

    def close(self) -> None:
        if self._thread.is_alive():
            self._work.put(_end)
            self._thread.join(PATIENCE)
        self._patched.close()
        assert not self._thread.is_alive(), "the training does not end"

    # ---- both threads ------------------------------------------------------------------------------------

    def _wait(self, wanted: str) -> object:
        said, value = self._told.get(timeout=PATIENCE)
        if isinstance(value, BaseException):
            raise value
        assert said == wanted, f"{said} instead of {wanted}"
        return value

    def _run(self) -> None:
        _here.training = self
        try:
            self.train()
            self._told.put(("over", None))
        except Over:
            pass
        except BaseException as error:
            self._told.put(("over", error))

    def _reach(self, place: str) -> None:
        if place != self._awaited:
            return
        self._awaited = ""
        self._told.put(("reached", None))
        while (work := self._work.get()) is not _go_on:
            if work is _end:
                raise Over
            try:
                self._told.put(("done", work()))
            except Exception as error:
                self._told.put(("done", error))


def _go_on() -> None: ...
def _end() -> None: ...


@contextmanager
def staged(training: Staged) -> Iterator[Staged]:
    """It trains, and is at its first boundary."""
    try:
        training.start()
        yield training
    finally:
        training.close()


# ---- digests -----------------------------------------------------------------------------------------------


def hashed(value: object) -> str:
    return hashlib.sha256(repr(_plain(value)).encode()).hexdigest()


def _plain(value: Any) -> object:
    if hasattr(value, "full_tensor"):
        value = value.full_tensor()
    if hasattr(value, "detach"):
        return str(value.dtype), tuple(value.shape), value.detach().contiguous().numpy().tobytes()
    if isinstance(value, Mapping):
        return [(key, _plain(value[key])) for key in sorted(value, key=repr)]
    return [_plain(item) for item in value] if isinstance(value, list | tuple) else value


def content(capture: Capture) -> dict[str, bytes]:
    """Every byte of a capture that is saved: by tensor, and by file."""
    named = [(group.name, entry) for group in capture.groups for entry in group.entries]
    found = {f"{group}/{entry.name}": _read(entry.source) for group, entry in named}
    for file in capture.files:
        found[file.layout.name] = layouts.materialize(file.layout)
    return found


def _read(source: Source) -> bytes:
    return layouts.materialize(FileLayout("", source.nbytes, (Extent(0, source),))) if source.nbytes else b""
