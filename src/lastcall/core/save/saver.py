"""From a capture to a committed checkpoint: files built in a staging folder, made durable, and published in
one step, in the order of `checkpoint.commit`."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import json
import logging
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from lastcall import clock as clocks
from lastcall import errors, memory
from lastcall.core import timing
from lastcall.core.checkpoint import commit, filenames
from lastcall.core.checkpoint import record as records
from lastcall.core.checkpoint.catalog import Catalog
from lastcall.core.checkpoint.ownership import Fence
from lastcall.core.checkpoint.record import Entry, Record
from lastcall.core.engine import digest, writer
from lastcall.core.save.budget import Budget
from lastcall.core.save.spare_space import Method
from lastcall.core.subject import Boundary
from lastcall.formats import safetensors
from lastcall.storage import files as storage
from lastcall.types import Capture, Extent, FileLayout, FileRecord, Group, Kind

log = logging.getLogger("lastcall")
DOCUMENT = filenames.DOCUMENT
ATTEMPTS = 3


@dataclass(frozen=True)
class Request:
    """The name of the checkpoint, and its deadline."""

    kind: Kind
    reason: str
    deadline: float | None = None
    abandoned: Callable[[], bool] = lambda: False  # turns true when the checkpoint is no longer wanted
    # What unchanged() found before training continued: taken over as it is, never read again, since it may
    # change by now.
    same: Mapping[str, FileRecord] | None = None


@dataclass(frozen=True)
class StagedFiles:
    """The files of a capture, durable in a folder."""

    files: tuple[FileRecord, ...]
    written: int  # bytes that went to the disk
    missing: tuple[str, ...]  # files that there was no time for
    because: str  # why it is not the exact state of its step; empty if it is
    doubt: str = ""  # ... and of the capture: why it is not exact all the same


class Saver:
    """Builds and publishes checkpoints, one at a time. The caller holds the catalog's lock.

    With a `rank` it writes that rank's files of a joint checkpoint (`lay`); `joint.save` commits them as one.
    """

    def __init__(
        self,
        catalog: Catalog,
        engine: writer.Engine,
        budget: Budget,
        clock: clocks.Clock,
        *,
        run: str,
        incarnation: int,
        rank: int | None = None,
    ) -> None:
        self._rank = rank
        self.newest_is_here = True
        self._document = filenames.document(rank)
        self._catalog = catalog
        self._files = catalog.files
        self._engine = engine
        self._budget = budget
        self._clock = clock
        self.run = run
        self.incarnation = incarnation
        self._sequence = 0
        self._layouts: dict[str, tuple[Group, FileLayout]] = {}
        self._steady: dict[str, bool] = {}  # files that were the same, or not, when last compared
        self.method = Method.DIRECT
        # of an incarnation that is alone; many ranks check theirs where they commit
        self.fence: Fence | None = None
        self.last: Entry | None = None  # the newest committed one: unchanged files are taken over from it

    def follow(self, entries: list[Entry], resumed: Entry | None) -> None:
        """Continue after the existing checkpoints."""
        self._sequence = max((entry.record.sequence for entry in entries), default=0)
        self.last = resumed

    def portion(self, capture: Capture) -> Capture:
        """One process writes everything."""
        return capture

    def write(self, capture: Capture, request: Request, boundary: Boundary) -> Entry:
        return self.save(capture, request)

    def has(self, name: str) -> bool:
        """Whether there is a checkpoint of this name somewhere else."""
        return False

    def save(self, capture: Capture, request: Request) -> Entry:
        """Commit this capture. Tries again after an I/O error, with other files, while there is time.
        SaveError if it cannot."""
        began = self._clock.now()
        for attempt in range(1, ATTEMPTS + 1):
            folder = self._catalog.staging / f"checkpoint-{capture.step}"
            try:
                built = self._build(folder, capture, request, recycled=attempt == 1, began=began)
                if self.fence is not None:
                    self.fence.check_alone()
                path = self._catalog.publish(folder, capture.step)
                break
            except (OSError, errors.SaveError) as error:
                self._abandon(folder)
                if isinstance(error, errors.SaveError):
                    raise
                self._give_up_or_go_on(error, attempt, capture, request)
        self.last = Entry(path, built)
        if attempt == 1 and built.complete:
            self._budget.observe(built.written, built.seconds)
        return self.last

    def lay(self, folder: Path, capture: Capture, request: Request) -> StagedFiles:
        """This rank's files of a checkpoint of many, durable. Tries again as save() does."""
        began = self._clock.now()
        for attempt in range(1, ATTEMPTS + 1):
            try:
                laid = self._lay(folder, capture, request, recycled=attempt == 1)
                self._files.sync_directory(folder)
                break
            except OSError as error:
                self._give_up_or_go_on(error, attempt, capture, request)
        if attempt == 1 and not laid.missing:
            self._budget.observe(laid.written, self._clock.now() - began)
        return laid

    def for_rank(self, rank: int) -> Saver:
        """A saver that stages the files of another rank, for the rank that writes them for it."""
        return Saver(
            self._catalog,
            self._engine,
            self._budget,
            self._clock,
            run=self.run,
            incarnation=self.incarnation,
            rank=rank,
        )

    def saw(self, entry: Entry) -> None:
        """A checkpoint was committed, by this rank or another."""
        self._sequence = max(self._sequence, entry.record.sequence)
        self.last = entry

    def next_sequence(self) -> int:
        self._sequence += 1
        return self._sequence

    def sizes(self, capture: Capture) -> list[int]:
        """The sizes of the files that it becomes."""
        return [self._layout(group).size for group in capture.groups] + [
            file.layout.size for file in capture.files
        ]

    def unchanged(self, groups: tuple[Group, ...]) -> dict[str, FileRecord]:
        """The groups whose bytes are those of the newest committed checkpoint, by digest. Only those are
        compared that can be expected to be: frozen ones, until seen to change, and ones that were the same
        last time."""
        if self.last is None or self.last.record.algorithm != digest.ALGORITHM or not self._there(self.last):
            return {}
        same: dict[str, FileRecord] = {}
        for group in groups:
            name = filenames.tensors(group.name, self._rank)
            before = self.last.record.file(name)
            layout = self._layout(group)
            if before is None or before.size != layout.size or not self._steady.get(name, group.frozen):
                continue
            output = writer.Output(layout, None)
            self._engine.write([output])
            now = output.record
            self._steady[name] = now is not None and now.chunks == before.chunks
            if self._steady[name]:
                same[group.name] = before
        return same

    def _there(self, entry: Entry) -> bool:
        """Whether the folder still is that checkpoint: a save of the same step that failed late may have put
        another in its place."""
        try:
            return records.read(entry.path).files == entry.record.files
        except errors.CheckpointError:
            return False

    def _same(self, capture: Capture, request: Request, *, recycled: bool) -> Mapping[str, FileRecord]:
        if request.same is None:
            return self.unchanged(capture.groups) if recycled else {}
        for file in request.same.values():
            if self.last is None or self.last.record.file(file.name) != file or not self._there(self.last):
                raise errors.SaveError(
                    f"checkpoint-{capture.step} could not be saved: {file.name} was to be linked from a "
                    "checkpoint that is gone"
                )
        return request.same

    def _build(
        self, folder: Path, capture: Capture, request: Request, *, recycled: bool, began: float
    ) -> Record:
        self._catalog.make_again()
        if not self._catalog.staging.is_dir():
            self._files.mkdir(self._catalog.staging)
        if folder.exists():
            storage.remove_tree(self._files, folder)
        commit.stage(self._files, folder)
        laid = self._lay(folder, capture, request, recycled=recycled)
        record = Record(
            sequence=self.next_sequence(),
            step=capture.step,
            kind=request.kind,
            reason=request.reason,
            exact=not (laid.because or laid.doubt),
            because=laid.because or laid.doubt,
            doubt=laid.doubt,
            missing=laid.missing,
            files=laid.files,
            run=self.run,
            incarnation=self.incarnation,
            created=self._clock.wall(),
            seconds=round(self._clock.now() - began, 4),
            written=laid.written,
            metrics=capture.metrics,
        )
        commit.seal(self._files, folder, record)
        return record

    def _lay(self, folder: Path, capture: Capture, request: Request, *, recycled: bool) -> StagedFiles:
        same = self._same(capture, request, recycled=recycled)
        taken = [self._take_over(folder, before) for before in same.values()]
        groups = sorted(
            (group for group in capture.groups if group.name not in same), key=lambda group: group.rank
        )
        document = json.dumps(capture.document).encode()
        layouts = [FileLayout(self._document, len(document), (Extent(0, memory.BytesSource(document)),))]
        layouts += [self._layout(group) for group in groups]
        layouts += [file.layout for file in capture.files]
        for name in (layout.name for layout in layouts if not records.is_plain(layout.name)):
            # An unreadable record is no commit: the other ranks would wait for a checkpoint that is there.
            raise errors.SaveError(
                f"the framework's save has written {name!r}, which is not a valid file name in a checkpoint"
            )
        self._make_folders(folder, layouts)
        written = self._write(folder, layouts, request, recycled=recycled)
        missing = tuple(
            layout.name for layout in layouts if layout.name not in {file.name for file in written}
        )
        if missing:
            self._check_worth(missing, capture, request)
        self._learn(written)
        return StagedFiles(
            (*written, *taken),
            sum(file.size for file in written),
            missing,
            _shortcoming(capture, missing),
            capture.doubt,
        )

    def _make_folders(self, folder: Path, layouts: list[FileLayout]) -> None:
        """A framework's checkpoint may have folders in it."""
        for below in sorted(
            {parent for layout in layouts for parent in Path(layout.name).parents if parent.name}
        ):
            if not (folder / below).is_dir():
                # another rank, which also has files in it, was faster
                with contextlib.suppress(FileExistsError):
                    self._files.mkdir(folder / below)

    def _write(
        self, folder: Path, layouts: list[FileLayout], request: Request, *, recycled: bool
    ) -> list[FileRecord]:
        outputs: list[writer.Output] = []
        with contextlib.ExitStack() as opened:  # closes them all, also when closing one fails
            for layout in layouts:
                output = self._open(folder / layout.name, layout, recycled=recycled)
                assert output.fd is not None
                opened.callback(self._files.close, output.fd)
                outputs.append(output)
            stop_at = None if request.deadline is None else request.deadline - timing.COMMIT

            def cancelled() -> bool:
                return (stop_at is not None and self._clock.now() >= stop_at) or request.abandoned()

            self._engine.write(outputs, cancelled)
            done = []
            for output in outputs:
                assert output.fd is not None
                if (record := output.record) is not None:
                    self._files.truncate(output.fd, output.layout.size)
                    self._files.fsync(output.fd)
                    done.append(record)
                else:
                    self._files.unlink(folder / output.layout.name)
        for below in {(folder / layout.name).parent for layout in layouts} - {folder}:
            self._files.sync_directory(below)
        return done

    def _open(self, path: Path, layout: FileLayout, *, recycled: bool) -> writer.Output:
        large = writer.is_large(layout)
        spare = large and recycled and self._catalog.spares.take(layout.size, path)
        output = writer.opened(
            self._files, path, layout, direct=self.method is Method.DIRECT, allocate=not spare
        )
        if large and not output.direct:
            output.flags = self.method.flags
        return output

    def _layout(self, group: Group) -> FileLayout:
        cached = self._layouts.get(group.name)
        if cached is not None and (cached[0] is group or cached[0].entries == group.entries):
            return cached[1]
        layout = safetensors.layout(
            filenames.tensors(group.name, self._rank), group.entries, {"format": "pt"}
        )
        self._layouts[group.name] = (group, layout)
        return layout

    def _take_over(self, folder: Path, file: FileRecord) -> FileRecord:
        """The file of the previous checkpoint, under a second name: pruning that one leaves this one
        whole."""
        assert self.last is not None
        old, new = self.last.path / file.name, folder / file.name
        if os.path.lexists(new):  # left by an attempt that failed
            self._files.unlink(new)
        try:
            self._files.link(old, new)
        except OSError as error:
            if error.errno not in (
                errno.EXDEV,
                errno.EPERM,
                errno.EMLINK,
                errno.ENOTSUP,
                errno.EACCES,
                errno.ENOSYS,
            ):
                raise
            storage.copy_file(old, new)
            storage.make_durable(self._files, new)
        return file

    def _learn(self, written: list[FileRecord]) -> None:
        """A file that was unexpectedly the same is worth comparing next time."""
        if self.last is None:
            return
        for file in written:
            before = self.last.record.file(file.name)
            if file.name != self._document and before is not None:
                self._steady[file.name] = before.chunks == file.chunks

    def _check_worth(self, missing: tuple[str, ...], capture: Capture, request: Request) -> None:
        if request.abandoned():
            raise errors.DeadlineError(f"step {capture.step} was abandoned while it was being written")
        wanted = {filenames.tensors(group.name, self._rank) for group in capture.groups if group.rank == 0}
        # of many ranks, of a framework: it is whole or not at all
        together = self._rank is not None or bool(capture.files)
        if together or self._document in missing or not wanted or wanted & set(missing):
            raise errors.DeadlineError(
                f"the deadline passed while step {capture.step} was written; the previous checkpoint stays"
            )

    def _abandon(self, folder: Path) -> None:
        with contextlib.suppress(OSError):
            storage.remove_tree(self._files, folder)

    def _shortage(self, error: OSError, capture: Capture) -> str:
        """Which resource is exhausted. The errno is the same for bytes and for inodes, and for a quota of
        either."""
        root, files = self._catalog.root, self._catalog.files
        if files.free_inodes(root) == 0:
            return (
                f"The file system has no inodes left, although it may have free space (df -i {root}): remove "
                "some files."
            )
        free = files.free_bytes(root)
        quota = " The quota of this user is used up (quota -s)." if error.errno == errno.EDQUOT else ""
        return (
            f"It needs {capture.nbytes / 1e6:.1f} MB, {free / 1e6:.1f} MB are free: make room in "
            f"{root}.{quota}"
        )

    def _give_up_or_go_on(self, error: OSError, attempt: int, capture: Capture, request: Request) -> None:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        late = request.deadline is not None and self._clock.now() >= request.deadline - timing.COMMIT
        if attempt == ATTEMPTS or late:
            kept = "nothing was committed before" if self.last is None else f"{self.last.path.name} is intact"
            what = f"checkpoint-{capture.step} could not be saved ({error.strerror or error}); {kept}"
            if full:
                raise errors.NoSpaceError(f"{what}. {self._shortage(error, capture)}") from error
            raise errors.SaveError(what) from error
        if error.errno in (errno.EINVAL, errno.ENOTSUP):
            # some file systems open a file for direct writes and then refuse them
            self.method = Method.BUFFERED
        freed = self._catalog.spares.clear() if full else 0
        note = f"; released {freed / 1e6:.0f} MB of spare space" if freed else ""
        log.warning("Saving step %d failed (%s)%s; retrying", capture.step, error.strerror or error, note)


def _shortcoming(capture: Capture, missing: tuple[str, ...]) -> str:
    """Why what has been written is not the exact state of its step; empty if it is."""
    if missing:
        return f"there was no time to write {', '.join(missing)}"
    if not capture.exact:
        return capture.because or "the caller does not guarantee it"
    return (
        "" if capture.still() else "the state was changed outside optimizer.step() while it was being saved"
    )


def with_groups(capture: Capture, groups: tuple[Group, ...]) -> Capture:
    return dataclasses.replace(capture, groups=groups)
