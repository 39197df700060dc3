"""From the catalog back to live state: the newest checkpoint whose digests hold, read in parallel straight
into place.

Live tensors are only written to when there is a fallback: an older checkpoint that would overwrite them
again. The last remaining one is checked first, so a damaged one never leaves the run with half a state. One
process checks every byte of it; of many ranks each checks what it needs.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import stat
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from pathlib import Path

from lastcall import errors
from lastcall.core.checkpoint.catalog import Catalog
from lastcall.core.checkpoint.record import Entry
from lastcall.core.engine import digest, writer
from lastcall.core.restore.contents import Contents, Wanted
from lastcall.core.subject import Loading, Restorable
from lastcall.storage import errnos
from lastcall.types import FileRecord

log = logging.getLogger("lastcall")
# files that are open at a time: a process may have 1024, and a checkpoint has several for each rank
_AT_ONCE = 256


class PartlyLoaded(errors.CheckpointError):
    """The damage was found after live tensors had been written to."""


def newest(catalog: Catalog, engine: writer.Engine, subject: Restorable) -> Entry | None:
    """Restore the newest checkpoint that is whole. Damaged ones are set aside, with the reason logged."""
    spoiled = False
    for entry, has_fallback in order(catalog.entries()):
        if spoiled and not entry.record.complete:
            break  # it would not overwrite everything that the damaged one has written
        try:
            attempt(entry, engine, subject, has_fallback)
        except errors.UncheckedError as error:
            raise type(error)(f"{entry.path}: {error}") from error
        except errors.CheckpointError as error:
            spoiled = spoiled or isinstance(error, PartlyLoaded)
            log.warning("%s", catalog.set_aside(entry.path, str(error)))
        else:
            return entry
    if spoiled:
        raise errors.CheckpointError(
            f"all checkpoints in {catalog.root} were damaged and have been set aside; the state in memory is "
            "partly overwritten. "
            "Start the run again to begin from scratch."
        )
    return None


def order(entries: Iterable[Entry]) -> list[tuple[Entry, bool]]:
    """The entries (newest first) in the order in which to try them, and whether each has a fallback: a
    complete one after it."""
    found = list(entries)
    complete = [entry for entry in found if entry.record.complete]
    partial = [entry for entry in found if not entry.record.complete]
    return [(entry, position + 1 < len(complete)) for position, entry in enumerate([*complete, *partial])]


def attempt(
    entry: Entry,
    engine: writer.Engine,
    subject: Restorable,
    has_fallback: bool,
    rank: int = 0,
    size: int = 1,
    ready: Callable[[], None] = lambda: None,
) -> None:
    """Restore this one. CheckpointError where it is damaged (PartlyLoaded: live tensors were written to),
    MismatchError where it does not fit. `ready` is called when the checks are done and no live byte has
    changed; when it raises, none will. Here many ranks wait for each other, so that none loads what another
    found damaged."""
    load(entry, engine, subject, verify_first=not has_fallback, rank=rank, size=size, ready=ready)


def load(
    entry: Entry,
    engine: writer.Engine,
    subject: Restorable,
    *,
    verify_first: bool,
    rank: int = 0,
    size: int = 1,
    ready: Callable[[], None] = lambda: None,
) -> None:
    alone = size == 1
    # Where a framework loads the files itself, the bytes that are read here for the digests stay in the page
    # cache for it.
    direct = not subject.loads_by_itself
    everything = [Wanted(file) for file in entry.record.files]
    if alone:
        for wanted in everything:
            _check(entry.path, wanted.file)
    contents = Contents(entry, rank)
    if alone and verify_first:
        read(entry, engine, everything, whole=True, direct=direct)
    try:
        loading = subject.prepare(contents.document, contents.stored)
    except errors.MismatchError:
        # a name that was damaged in a header looks like another model
        read(entry, engine, contents.headers())
        raise
    _check_step(entry, loading)
    plan = contents.plan(loading.targets)
    # no other code checks the files that a framework reads itself: the ranks share the work
    if loading.whole and not alone:
        read(entry, engine, everything[rank::size], whole=True, direct=direct)
    if verify_first and not alone:
        read(entry, engine, [Wanted(wanted.file, wanted.chunks) for wanted in plan])
    ready()
    try:
        if alone and not verify_first:  # no other rank checks the rest
            known = {wanted.file.name for wanted in plan}
            plan += [wanted for wanted in everything if wanted.file.name not in known]
        read(entry, engine, plan, whole=alone and not verify_first, direct=direct)
        loading.finish()
    except errors.UncheckedError:
        raise
    except errors.CheckpointError as error:
        raise PartlyLoaded(str(error)) from error


def again(
    entry: Entry,
    engine: writer.Engine,
    subject: Restorable,
    wanted: Callable[[str, str], bool],
    rank: int = 0,
) -> None:
    """Restore a part of what was restored before: bytes are read for the tensors (group, name) that are
    `wanted`."""
    contents = Contents(entry, rank)
    loading = subject.prepare(contents.document, contents.stored)
    targets: dict[str, dict[str, object]] = {}
    for group, named in loading.targets.items():
        if chosen := {name: target for name, target in named.items() if wanted(group, name)}:
            targets[group] = chosen
    read(entry, engine, contents.plan(targets))
    loading.finish()


def _check_step(entry: Entry, loading: Loading) -> None:
    """Two files name the step. If they disagree, the folder was assembled from two checkpoints and cannot be
    trusted. Of many ranks, one may have reached its end before the others: its own state is of an earlier
    step, and never of a later one."""
    step = loading.saved_step
    if step is not None and (
        step > entry.record.step or (step < entry.record.step and entry.record.world == 1)
    ):
        raise errors.CheckpointError(
            f"its record says step {entry.record.step}, and its state says step {step}: they do not belong "
            "together"
        )


def verify(entry: Entry, engine: writer.Engine) -> None:
    """Check every byte of a checkpoint against its digests. CheckpointError names the first that does not
    hold."""
    read(entry, engine, [Wanted(file) for file in entry.record.files], whole=True)


def read(
    entry: Entry, engine: writer.Engine, plan: Iterable[Wanted], *, whole: bool = False, direct: bool = True
) -> None:
    """Read the wanted parts of these files into their targets. `whole`: read all of each, for the digests;
    `direct`: past the page cache where it is not there yet."""
    function = digest.named(entry.record.algorithm)
    left = iter(plan)
    while batch := list(itertools.islice(left, _AT_ONCE)):
        with ExitStack() as stack:
            inputs = []
            for wanted in batch:
                fd, past = stack.enter_context(_opened(entry.path, wanted.file, direct))
                inputs.append(
                    writer.Input(
                        fd, wanted.file, wanted.pieces, past, function, None if whole else wanted.chunks
                    )
                )
            engine.read(inputs)


_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK


def _check(folder: Path, file: FileRecord) -> None:
    os.close(_open(folder / file.name, file))


def _open(path: Path, file: FileRecord) -> int:
    if any(folder.is_symlink() for folder in list(path.parents)[: file.name.count("/")]):
        raise errors.CheckpointError(f"{file.name} lies behind a link")
    fd = errnos.reading(lambda: os.open(path, _FLAGS), f"{file.name} cannot be opened")
    info = os.fstat(fd)
    if not stat.S_ISREG(info.st_mode) or info.st_size != file.size:
        os.close(fd)
        raise errors.CheckpointError(f"{file.name} has {info.st_size} bytes, {file.size} were recorded")
    return fd


@contextlib.contextmanager
def _opened(folder: Path, file: FileRecord, wanted: bool) -> Iterator[tuple[int, bool]]:
    """The open file, and whether it goes past the page cache."""
    fd = _open(folder / file.name, file)
    direct = False
    try:
        if wanted and file.size >= writer.CHUNK and not _cached(fd, file.size):
            with contextlib.suppress(OSError):
                past = os.open(folder / file.name, _FLAGS | os.O_DIRECT)
                os.close(fd)
                fd, direct = past, True
        yield fd, direct
    finally:
        os.close(fd)


def _cached(fd: int, size: int) -> bool:
    """Whether the file lies in the page cache already: then going past it would be slower."""
    hits = 0
    samples = [size * n // 8 // 4096 * 4096 for n in range(8)]
    for offset in samples:
        try:
            hits += os.preadv(fd, [bytearray(512)], offset, os.RWF_NOWAIT) > 0
        except OSError:
            continue
    return hits >= 6
