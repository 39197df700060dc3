"""From a capture to a committed checkpoint, for every reason to save: one at a time, with what must follow a
commit.

Alone or together: a `Writer` commits. What only some sessions have (a guard, a mirror, a launcher) listens
through `on_save` and `on_commit`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Protocol

from lastcall.core.checkpoint.record import Entry
from lastcall.core.context import RunContext
from lastcall.core.save.saver import Request
from lastcall.core.subject import Boundary
from lastcall.types import Capture, Kind


class Writer(Protocol):
    """Commits, alone or together with the other ranks."""

    @property
    def newest_is_here(self) -> bool:
        """Whether the newest checkpoint is in this rank's directory."""

    def has(self, name: str) -> bool:
        """Whether there is a checkpoint of this name in a directory that this process does not see."""

    def portion(self, capture: Capture) -> Capture:
        """What of a capture this rank writes."""

    def write(self, capture: Capture, request: Request, boundary: Boundary) -> Entry:
        """Commit this portion of a boundary, which all ranks save."""


OnSave = Callable[[Capture, Kind, float | None], None]
OnCommit = Callable[[Entry, Capture], None]


class Checkpointer:
    """`committed`: the boundary that the checkpoint holds which was resumed from."""

    def __init__(
        self,
        context: RunContext,
        writer: Writer,
        committed: Boundary | None,
        on_save: Sequence[OnSave] = (),
        on_commit: Sequence[OnCommit] = (),
    ) -> None:
        self._context = context
        self._writer = writer
        self._committed = committed  # the boundary that the newest checkpoint holds exactly
        self._on_save = on_save
        self._on_commit = on_commit
        # of the newest checkpoint that this incarnation committed
        self._document: dict[str, object] | None = None
        self.lock = threading.RLock()  # one save at a time, whichever thread asks for it
        self.expected_bytes = 0

    # ---- what is saved -------------------------------------------------------------------------------------

    @property
    def up_to_date(self) -> bool:
        """Whether the newest checkpoint holds this very boundary."""
        return self._committed == self._context.subject.boundary

    @property
    def covers_now(self) -> bool:
        """... and nothing has changed since."""
        return self.up_to_date and self._context.subject.untouched()

    @property
    def keeps_boundary(self) -> bool:
        """... and is where this rank finds it again."""
        return self.up_to_date and self._writer.newest_is_here

    @property
    def resumed_only(self) -> bool:
        """Whether this incarnation has committed nothing yet."""
        return self._document is None

    def same_document(self, capture: Capture) -> bool:
        """Whether the newest checkpoint of this incarnation is the same in everything that is not a
        tensor."""
        return capture.document == self._document

    def forget_resumed(self) -> None:
        """Training does not continue from the checkpoint that was restored."""
        self._committed = None

    def has(self, name: str) -> bool:
        """Whether there is a checkpoint of this name, here or where the ranks have committed it."""
        return self._writer.has(name) or (self._context.catalog.root / name).is_dir()

    # ---- how long it takes ---------------------------------------------------------------------------------

    def seconds(self) -> float:
        return self._context.budget.seconds(self.expected_bytes)

    def seconds_until_safe(self, deadline: float) -> float:
        """... with what follows the save before the process may be killed."""
        return self._context.budget.until_safe(self.expected_bytes, deadline)

    # ---- saving --------------------------------------------------------------------------------------------

    def portion(self, capture: Capture) -> Capture:
        """What of a capture this rank writes, where all ranks write."""
        return self._writer.portion(capture)

    def write(self, portion: Capture, request: Request, boundary: Boundary) -> Entry:
        """Commit what this rank writes of this boundary. The caller says afterwards that it is
        `now_committed`."""
        return self._writer.write(portion, request, boundary)

    def save(self, capture: Capture, kind: Kind, reason: str, deadline: float | None = None) -> Entry:
        """Commit this capture now. The caller holds the lock."""
        request = Request(kind, reason, deadline)
        return self._commit(
            capture, kind, deadline, lambda boundary: self.write(self.portion(capture), request, boundary)
        )

    def save_agreed(self, capture: Capture, kind: Kind, write: Callable[[], Entry]) -> Entry:
        """Commit what the ranks have agreed to save, by `write`."""
        return self._commit(capture, kind, None, lambda boundary: write())

    def _commit(
        self, capture: Capture, kind: Kind, deadline: float | None, write: Callable[[Boundary], Entry]
    ) -> Entry:
        context = self._context
        began, boundary = context.clock.now(), context.subject.boundary
        context.events.emit("save-begins", save=kind.value, step=capture.step, bytes=capture.nbytes)
        for tell in self._on_save:
            tell(capture, kind, deadline)
        entry = write(boundary)
        self.now_committed(entry, capture, boundary, context.clock.now() - began)
        return entry

    def now_committed(self, entry: Entry, capture: Capture, boundary: Boundary, seconds: float) -> None:
        record = entry.record
        self._document = capture.document
        if record.whole and record.complete:
            self._committed = boundary
        self._context.events.emit(
            "committed",
            save=record.kind.value,
            step=record.step,
            exact=record.exact,
            because=record.because,
            seconds=seconds,
            written=record.written,
            path=entry.path.name,
        )
        for tell in self._on_commit:
            tell(entry, capture)
