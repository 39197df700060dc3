"""One checkpoint of many ranks: every writer stages its files, and one of them commits what all have staged,
or none does.

    every writer   its files into the staging folder of this save, durable, then its receipt
    the committer  (the lowest writer) waits for all receipts, adds what is known about the missing ranks,
                   writes the manifest
                   and the record, and gives the folder its name: the one commit
    the others     wait for the committer's message, and look on the disk where none comes

The receipts are files: once the ranks have agreed what to save, losing the store or the network between them
loses nothing. Ranks that do not share the committer's directory (`directories`) send their files and their
receipt there, and learn of the commit from its message.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from lastcall import clock as clocks
from lastcall import errors, messages
from lastcall.core import timing
from lastcall.core.checkpoint import commit
from lastcall.core.checkpoint import record as records
from lastcall.core.checkpoint.catalog import Catalog
from lastcall.core.checkpoint.ownership import Fence
from lastcall.core.checkpoint.record import Entry, Record
from lastcall.core.engine import writer
from lastcall.core.ranks import partition, receipts
from lastcall.core.ranks.receipts import Part
from lastcall.core.save.saver import Request, Saver
from lastcall.core.subject import Boundary
from lastcall.core.transfer.directories import Directories
from lastcall.core.transfer.parts import PartTransfer
from lastcall.formats import manifest
from lastcall.storage import files as storage
from lastcall.types import Capture, FileRecord, Kind

log = logging.getLogger("lastcall")
_PATIENCE = 600.0  # seconds that a save without a deadline waits for the slowest rank
_LATE = 5.0  # seconds after the deadline in which the committer's message may still come
_POLL = 0.01
_MANUAL = 60.0  # seconds that run.save() waits for the other ranks, at least
_HINT = 5.0  # seconds after which the log says what run.save() waits for


@dataclass(frozen=True)
class Order:
    """A joint save. The same on every rank, or known to every rank without asking."""

    name: str  # of this save and of no other
    kind: Kind
    reason: str
    writers: tuple[int, ...]
    helpers: tuple[int, ...] = ()  # ranks that write what is their own, and nothing that others hold too
    missing: tuple[int, ...] = ()  # ranks that cannot write: another rank must write for them
    deadline: float | None = None
    patience: float = _PATIENCE  # without a deadline: seconds to wait for the others
    abandoned: Callable[[], bool] = field(default=lambda: False, repr=False, compare=False)
    paused: Callable[[], bool] = field(
        default=lambda: False, repr=False, compare=False
    )  # turns true when it must wait for something else
    same: Mapping[str, FileRecord] | None = field(default=None, repr=False, compare=False)

    @property
    def committer(self) -> int:
        return min(self.writers)


class Interrupted(Exception):
    """The order was paused. The staged files stay; complete() continues."""


class OtherRanks(Protocol):
    """The other ranks, as far as a save needs them."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    @property
    def token(self) -> str:
        """Of this incarnation."""

    def tell(self, key: str, body: dict[str, object]) -> None:
        """A fast message to the others. May be lost."""

    def hear(self, key: str, timeout: float) -> dict[str, object] | None:
        """None where no message came; returns at once when the store is lost."""

    def gone(self) -> set[int]:
        """The ranks that are known to be dead."""

    def part_of(self, rank: int, step: int, mine: Capture) -> Capture | None:
        """What a missing rank would have saved, as far as known; `mine` is this rank's own capture of that
        step."""


class JointSave:
    def __init__(
        self,
        catalog: Catalog,
        saver: Saver,
        fence: Fence,
        others: OtherRanks,
        clock: clocks.Clock,
        directories: Directories | None = None,
        part_transfer: PartTransfer | None = None,
        grace: float = 0.0,
    ) -> None:
        """`part_transfer`: where not all ranks share a directory."""
        self._catalog = catalog
        self._files = catalog.files
        self._saver = saver
        self._fence = fence
        self._others = others
        self._clock = clock
        self.directories = directories or Directories(others.rank)
        self.part_transfer = part_transfer
        self._manual = max(_MANUAL, grace)
        # the last save of a boundary that all ranks saved, and how often it was
        self._latest, self._again = "", 0
        self.holder_of_newest: int | None = None  # ... the rank whose directory has the newest checkpoint
        self.elsewhere: set[str] = set()  # ... the names of those that this rank does not see

    def portion(self, capture: Capture, writers: tuple[int, ...] | None = None) -> Capture:
        """What of a capture this rank writes, where all ranks write (or only some do)."""
        rank = self._others.rank
        everybody = tuple(range(self._others.size)) if writers is None else writers
        files = (
            capture.files
            if rank == min(everybody)
            else tuple(file for file in capture.files if not file.shared)
        )
        return dataclasses.replace(
            capture, groups=partition.portion(capture.groups, rank, everybody), files=files
        )

    def write(self, capture: Capture, request: Request, boundary: Boundary) -> Entry:
        """Commit this boundary, which all ranks save without having to agree on it first."""
        name = f"{request.kind.value}-{sum(boundary)}-{self._others.token[:8]}"
        # Messages and receipts of an earlier save must not count for this one.
        self._again = self._again + 1 if name == self._latest else 1
        self._latest = name
        order = Order(
            f"{name}-{self._again}", request.kind, request.reason, tuple(range(self._others.size)),
            deadline=request.deadline, abandoned=request.abandoned, same=request.same,
        )  # fmt: skip
        # a rank that does not call run.save() must not hold the others up for long
        if request.kind is Kind.MANUAL:
            order = dataclasses.replace(order, patience=self._manual)
        return self.save(capture, order)

    def save(self, capture: Capture, order: Order) -> Entry:
        """Take part in a save; `capture` is what this rank writes of it (`portion`). Returns when the
        checkpoint is committed. SaveError, on every rank, if it is not."""
        return self.complete(capture, self.contribute(capture, order), order)

    def contribute(self, capture: Capture, order: Order) -> Part:
        """Stage this rank's part. A part that could not be staged is one, too: it says why."""
        return self._contribute(self._catalog.staging / order.name, capture, order)

    def complete(self, capture: Capture, part: Part, order: Order) -> Entry:
        """From the parts to the commit. Interrupted when the order is paused; then it may be called again."""
        folder = self._catalog.staging / order.name
        if self._others.rank == order.committer:
            entry = self._commit(folder, capture, order, part)
        else:
            try:
                entry = self.outcome(order, part.failed)
            except errors.SaveError:
                self._clear_away(folder, order, part.files)
                raise
            self._clear_away(folder, order, part.files)
        self._saver.saw(entry)
        self._note(entry, order)
        return entry

    def _note(self, entry: Entry, order: Order) -> None:
        """Where it is."""
        if self.directories.spread:
            self.holder_of_newest = order.committer
        if not self.directories.shares_with(order.committer):
            self.elsewhere.add(entry.path.name)

    def has(self, name: str) -> bool:
        """Whether there is a checkpoint of this name in a directory that this rank does not see."""
        return name in self.elsewhere

    @property
    def newest_is_here(self) -> bool:
        """Whether the newest checkpoint is in this rank's directory: elsewhere it may be lost with its
        machine."""
        return self.holder_of_newest is None or self.directories.shares_with(self.holder_of_newest)

    def close(self) -> None:
        if self.part_transfer is not None:
            self.part_transfer.close()

    def find(self, save: str) -> Entry | None:
        """The result of a save, as far as this rank can see: on the disk or, where that is not the
        committer's, from its message."""
        if (entry := self._catalog.find(save)) is not None or not self.directories.spread:
            return entry
        word = self._others.hear(f"outcome/{save}", 0.0)
        return None if word is None or "path" not in word else self._entry_of(word)

    # ---- every writer --------------------------------------------------------------------------------------

    def _contribute(self, folder: Path, capture: Capture, order: Order) -> Part:
        rank = self._others.rank
        laid = None
        try:
            folder.mkdir(parents=True, exist_ok=True)
            request = Request(order.kind, order.reason, order.deadline, order.abandoned, order.same)
            laid = self._saver.lay(folder, capture, request)
            tensors = manifest.describe(rank, capture.groups)
            part = Part(
                rank,
                capture.step,
                laid.files,
                laid.written,
                not laid.because,
                laid.because,
                capture.metrics,
                tensors,
                laid.doubt,
            )
            self._hand_in(folder, part, order)
        except (errors.LastcallError, OSError) as error:
            part = self._fail(folder, order, capture.step, str(error) or type(error).__name__)
            if laid is not None:
                self._clear_away(folder, order, laid.files)
        return part

    def _hand_in(self, folder: Path, part: Part, order: Order) -> None:
        """The receipt goes where the committer looks for it; the files that it names are there by then."""
        if self.directories.shares_with(order.committer):
            receipts.write(self._files, folder, part)
            return
        assert self.part_transfer is not None
        until = None if order.deadline is None else order.deadline - timing.COMMIT

        def check() -> None:
            if order.abandoned() or (until is not None and self._clock.now() >= until):
                raise errors.DeadlineError("the deadline passed while it was being sent")

        self.part_transfer.send_part(order.committer, order.name, folder, part, check)

    def _clear_away(self, folder: Path, order: Order, files: Sequence[FileRecord]) -> None:
        """Files that were meant for the committer are of no use here, except as spare space."""
        if self.directories.shares_with(order.committer):
            return
        for file in files:
            if not (file.name.endswith(".safetensors") and self._catalog.spares.give(folder / file.name)):
                with contextlib.suppress(OSError):  # the next start removes it
                    (folder / file.name).unlink()
        below = {folder} | {
            parent
            for file in files
            for parent in (folder / file.name).parents
            if parent.is_relative_to(folder)
        }
        for empty in sorted(below, reverse=True):
            with contextlib.suppress(OSError):  # files of another rank
                empty.rmdir()

    def refuse(self, order: Order, because: str) -> None:
        """This rank has no part in this save: then the save fails on every rank."""
        self._fail(self._catalog.staging / order.name, order, 0, because)
        if self._others.rank == order.committer:
            self._no_more(order)
            self._others.tell(f"outcome/{order.name}", {"because": because})

    def _fail(self, folder: Path, order: Order, step: int, because: str) -> Part:
        part = Part(self._others.rank, step, failed=because)
        try:
            if self.directories.shares_with(order.committer):
                folder.mkdir(parents=True, exist_ok=True)
                receipts.write(self._files, folder, part)
        except OSError:  # a full disk: then the message must suffice
            log.debug("Could not write the receipt of a failed part")
        self._others.tell(f"failed/{order.name}/{part.rank}", {"because": because})
        return part

    # ---- the committer -------------------------------------------------------------------------------------

    def _commit(self, folder: Path, capture: Capture, order: Order, mine: Part) -> Entry:
        began = self._clock.now()
        try:
            parts = self._parts(folder, order, mine)
            parts += [
                part
                for rank in order.missing
                if (part := self._speak_for(folder, rank, capture, order)) is not None
            ]
            record = self._record(folder, parts, order, began)
            self._own()
            path = self._catalog.publish(folder, record.step)
        except (errors.LastcallError, OSError) as error:
            self._no_more(order)
            self._others.tell(f"outcome/{order.name}", {"because": str(error)})
            self._abandon(folder)
            if isinstance(error, errors.SaveError):
                raise
            raise errors.SaveError(str(error)) from error
        word: dict[str, object] = {"path": path.name}
        if self.directories.spread:  # not every rank can read it
            word["record"] = dataclasses.replace(record, files=()).to_json().decode()
        self._others.tell(f"outcome/{order.name}", word)
        return Entry(path, record)

    def _parts(self, folder: Path, order: Order, mine: Part) -> list[Part]:
        parts = {mine.rank: mine}
        began, told = self._clock.now(), False
        until = began + order.patience if order.deadline is None else order.deadline - timing.COMMIT
        pause = _POLL
        while True:
            for failed in (part for part in parts.values() if part.failed):
                raise errors.SaveError(f"rank {failed.rank} could not write its part: {failed.failed}")
            waiting = [rank for rank in (*order.writers, *order.helpers) if rank not in parts]
            if not waiting:
                return [parts[rank] for rank in sorted(parts)]
            dead = self._others.gone() & set(waiting)
            for rank in waiting:
                if (part := receipts.read(folder, rank)) is not None:
                    parts[rank] = part
                elif rank in dead:  # looked at after its death: there will be none
                    raise errors.SaveError(f"rank {rank} died before it had written its part")
            self._look_for_failures(order, waiting)
            if order.paused():
                raise Interrupted
            if order.abandoned():
                raise errors.DeadlineError("abandoned while it was being written")
            late = [rank for rank in waiting if rank not in parts]
            if late and order.kind is Kind.MANUAL and not told and self._clock.now() >= began + _HINT:
                told = True
                log.warning(
                    "run.save() is waiting for rank %s: every rank must call it, at the same step",
                    ", ".join(map(str, late)),
                )
            if late and self._clock.now() >= until:
                raise errors.DeadlineError(f"no receipt came in time from rank {', '.join(map(str, late))}")
            self._clock.sleep(pause)
            pause = min(pause * 1.5, 0.1)

    def _look_for_failures(self, order: Order, waiting: list[int]) -> None:
        for rank in waiting:
            word = self._others.hear(f"failed/{order.name}/{rank}", 0.0)
            if word is not None:
                raise errors.SaveError(f"rank {rank} could not write its part: {word.get('because')}")

    def _speak_for(self, folder: Path, rank: int, mine: Capture, order: Order) -> Part | None:
        """Stage what a missing rank would have written: its randomness, its place in the data."""
        found = self._others.part_of(rank, mine.step, mine)
        if found is None:
            return None
        saver = self._saver.for_rank(rank)
        laid = saver.lay(folder, found, Request(order.kind, order.reason))
        return Part(rank, found.step, laid.files, laid.written, found.exact, found.because, doubt=found.doubt)

    def _record(self, folder: Path, parts: list[Part], order: Order, began: float) -> Record:
        unspoken = sorted(set(range(self._others.size)) - {part.rank for part in parts})
        because = [f"rank {part.rank}: {part.because}" for part in parts if part.because]
        if unspoken:
            because.append(
                "nothing is known about the randomness and the data position of rank "
                f"{', '.join(map(str, unspoken))}"
            )
        doubt = _doubt(parts)
        names = collections.Counter(file.name for part in parts for file in part.files)
        # readers refuse a record that names a file twice
        if twice := sorted(name for name, count in names.items() if count > 1):
            raise errors.SaveError(
                f"several ranks have written {', '.join(twice)}: it can hold the data of only one of them"
            )
        data = manifest.merge([part.tensors for part in parts if part.tensors is not None])
        storage.write_small(self._files, folder / manifest.NAME, data)
        writing = [part for part in parts if part.rank not in order.missing]
        record = Record(
            sequence=self._saver.next_sequence(),
            step=max(part.step for part in writing),
            kind=order.kind,
            reason=order.reason,
            exact=not (because or doubt),
            because="; ".join(because) or doubt,
            doubt=doubt,
            files=(writer.recorded(manifest.NAME, data), *(file for part in parts for file in part.files)),
            run=self._saver.run,
            incarnation=self._saver.incarnation,
            world=self._others.size,
            save=order.name,
            created=self._clock.wall(),
            seconds=round(self._clock.now() - began, 4),
            written=sum(part.written for part in parts),
            metrics=writing[0].metrics,
        )
        commit.seal(self._files, folder, record, scaffold=folder.glob("part-*.json*"))
        return record

    def _own(self) -> None:
        """The committer must own the directory, by the lock or, where the leader of this incarnation still
        has that, by the token."""
        if not self._catalog.held:
            self._catalog.try_lock()
        # removed during the run, and not taken since
        if self._catalog.make_again() and not self._fence.marked():
            self._fence.adopt(self._saver.incarnation)
        self._fence.check()

    def _no_more(self, order: Order) -> None:
        """Parts that others still send are refused from now on."""
        if self.part_transfer is not None:
            self.part_transfer.over(order.name)

    def _abandon(self, folder: Path) -> None:
        try:
            if folder.exists():
                storage.remove_tree(self._files, folder)
        except OSError as error:
            log.debug("Could not remove %s; the next start will: %s", folder.name, error)

    # ---- the others ----------------------------------------------------------------------------------------

    def outcome(self, order: Order, failed: str = "") -> Entry:
        """The result, from the committer's message or, without one, from the disk."""
        until = (
            self._clock.now() + order.patience + 60.0 if order.deadline is None else order.deadline + _LATE
        )
        while True:
            word = self._others.hear(f"outcome/{order.name}", 0.25)
            if word is not None and "path" not in word:
                # what was written after the committer had cleared it away
                self._abandon(self._catalog.staging / order.name)
                raise errors.SaveError(str(word.get("because")))
            # looked at before the disk: the dead commit nothing more
            dead = order.committer in self._others.gone()
            if (entry := self._committed(order, word)) is not None:
                self._note(entry, order)
                return entry
            if order.paused():
                raise Interrupted
            if dead or self._clock.now() >= until or order.abandoned():
                why = "died before the commit" if dead else "has not committed it in time"
                raise errors.SaveError(
                    failed or f"rank {order.committer}, which was to commit {order.name}, {why}"
                )
            if word is None:
                self._clock.sleep(0.02)

    def _committed(self, order: Order, word: Mapping[str, object] | None) -> Entry | None:
        """The checkpoint of this save on disk. A network file system may show it a moment after the
        message."""
        if not self.directories.shares_with(order.committer):
            return None if word is None else self._entry_of(word)
        if word is not None:
            path = self._catalog.root / Path(str(word["path"])).name
            try:
                return Entry(path, records.read(path))
            except errors.CheckpointError:
                return None
        if (self._catalog.staging / order.name).exists():
            return None
        return self._catalog.find(order.name)

    def _entry_of(self, word: Mapping[str, object]) -> Entry | None:
        """A checkpoint in a directory that this rank does not see. Its files are not used here."""
        try:
            return Entry(
                self._catalog.root / Path(str(word["path"])).name,
                records.parse(str(word.get("record")).encode()),
            )
        except errors.CheckpointError:
            return None


def _doubt(parts: list[Part]) -> str:
    """Of all ranks. Most doubt the same thing."""
    ranks: dict[str, list[int]] = {}
    for part in parts:
        if part.doubt:
            ranks.setdefault(part.doubt, []).append(part.rank)
    return "; ".join(
        doubt if len(those) == len(parts) else f"{messages.named(those)}: {doubt}"
        for doubt, those in ranks.items()
    )
