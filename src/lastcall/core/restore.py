"""From the catalog back to live state: the newest checkpoint whose digests hold, read in parallel straight into place.

Live tensors are only written to when there is a way out: an older checkpoint that would overwrite them again. The last one that is
left is checked as a whole first, so a damaged one never leaves the run with half a state.
"""

from __future__ import annotations

import json
import logging
import os
import stat
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Protocol

from lastcall import errors
from lastcall.core import digest, saving, writer
from lastcall.core import record as records
from lastcall.core.catalog import Catalog, Entry
from lastcall.formats import safetensors
from lastcall.types import FileRecord, Target

log = logging.getLogger("lastcall")
Stored = Mapping[str, Mapping[str, safetensors.Stored]]


class Loading(Protocol):
    """A restore in progress: everything fits; bytes go to `targets` (file stem, tensor name), then `finish` applies the rest."""

    @property
    def targets(self) -> Mapping[str, Mapping[str, Target]]: ...

    def finish(self) -> None: ...


class Restorable(Protocol):
    def prepare(self, document: dict[str, object], stored: Stored) -> Loading:
        """Check that the checkpoint fits, without changing anything. MismatchError if it does not."""


def newest(catalog: Catalog, engine: writer.Engine, subject: Restorable) -> Entry | None:
    """Restore the newest checkpoint that is whole. Damaged ones are set aside, with the reason logged."""
    entries = catalog.entries()
    complete = [entry for entry in entries if entry.record.complete]
    partial = [entry for entry in entries if not entry.record.complete]
    spoiled = False
    for position, entry in enumerate([*complete, *partial]):
        if spoiled and not entry.record.complete:
            break  # it would not overwrite everything that the damaged one has left
        way_out = position + 1 < len(complete)
        try:
            load(entry, engine, subject, verify_first=not way_out)
        except _Spoiled as error:
            spoiled = True
            log.warning("%s", catalog.set_aside(entry.path, str(error.__cause__)))
        except errors.CheckpointError as error:
            log.warning("%s", catalog.set_aside(entry.path, str(error)))
        else:
            return entry
    if spoiled:
        raise errors.CheckpointError(
            f"all checkpoints in {catalog.root} were damaged and have been set aside; the state in memory is overwritten in part. "
            "Start the run again to begin from the beginning."
        )
    return None


class _Spoiled(errors.CheckpointError):
    """The damage was found after live tensors had been written to."""


def load(entry: Entry, engine: writer.Engine, subject: Restorable, *, verify_first: bool) -> None:
    with ExitStack() as stack:
        opened = {file.name: _open(stack, entry.path, file) for file in entry.record.files}
        function = digest.named(entry.record.algorithm)
        document = _document(entry, function)
        headers = {
            file.name.removesuffix(".safetensors"): _header(entry.path / file.name, file.size)
            for file in entry.record.files
            if file.name.endswith(".safetensors")
        }
        if verify_first:
            engine.read([writer.Input(fd, file, (), direct, function) for file, fd, direct in opened.values()])
        loading = subject.prepare(document, headers)
        inputs = []
        for file, fd, direct in opened.values():
            stem = file.name.removesuffix(".safetensors")
            targets = loading.targets.get(stem, {})
            pieces = [writer.Piece(headers[stem][name].begin, target) for name, target in targets.items()]
            pieces.sort(key=lambda piece: piece.offset)
            if pieces or not verify_first:
                inputs.append(writer.Input(fd, file, pieces, direct, function))
        try:
            engine.read(inputs)
            loading.finish()
        except errors.CheckpointError as error:
            raise _Spoiled(str(error)) from error


def verify(entry: Entry, engine: writer.Engine) -> None:
    """Check every byte of a checkpoint against its digests. CheckpointError names the first that does not hold."""
    with ExitStack() as stack:
        function = digest.named(entry.record.algorithm)
        opened = [_open(stack, entry.path, file) for file in entry.record.files]
        engine.read([writer.Input(fd, file, (), direct, function) for file, fd, direct in opened])


def _header(path: Path, size: int) -> dict[str, safetensors.Stored]:
    data = safetensors.read_header(path)
    try:
        return safetensors.parse(data, size)[0]
    except errors.CheckpointError as error:
        raise errors.CheckpointError(f"{path.name}: {error}") from None


def _document(entry: Entry, function: digest.Digest) -> dict[str, object]:
    file = entry.record.file(saving.DOCUMENT)
    if file is None:
        raise errors.CheckpointError(f"the record names no {saving.DOCUMENT}")
    data = records.read_regular(entry.path / saving.DOCUMENT, file.size)
    chunks = [function(data[begin : begin + file.chunk]) for begin in range(0, len(data), file.chunk)]
    if tuple(chunks) != file.chunks:
        raise errors.CheckpointError(f"{saving.DOCUMENT} does not match its digest")
    try:
        document = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise errors.CheckpointError(f"{saving.DOCUMENT} is not JSON: {error}") from error
    if not isinstance(document, dict):
        raise errors.CheckpointError(f"{saving.DOCUMENT} is not an object")
    return document


def _open(stack: ExitStack, folder: Path, file: FileRecord) -> tuple[FileRecord, int, bool]:
    path = folder / file.name
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
    try:
        fd = os.open(path, flags)
    except OSError as error:
        raise errors.CheckpointError(f"{file.name} cannot be opened: {error.strerror}") from error
    stack.callback(os.close, fd)
    info = os.fstat(fd)
    if not stat.S_ISREG(info.st_mode) or info.st_size != file.size:
        raise errors.CheckpointError(f"{file.name} has {info.st_size} bytes, {file.size} were recorded")
    if file.size < writer.CHUNK or _cached(fd, file.size):
        return file, fd, False
    try:
        direct = os.open(path, flags | os.O_DIRECT)
    except OSError:
        return file, fd, False
    stack.callback(os.close, direct)
    return file, direct, True


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
