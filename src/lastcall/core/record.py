"""The commit record, `lastcall.json`: what makes a folder a checkpoint. It covers itself with a digest, and is read as if hostile."""

from __future__ import annotations

import json
import os
import re
import stat
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from lastcall import errors
from lastcall.core import digest
from lastcall.types import FileRecord, Kind

NAME = "lastcall.json"
SENTINEL = "checkpoint-is-incomplete.txt"
FORMAT = 1
# A dot in front: `.metadata` of torch's distributed checkpoints. Spaces, letters of all languages: a PEFT adapter has the name that
# its user gave it.
_SAFE_NAME = re.compile(r"\.?\w(?:[\w .+,=@#%&'()\[\]\-]*[\w.+,=@#%&'()\[\]\-])?")
_LONGEST_NAME = 200  # bytes, of 255 that file systems have
_LARGEST = 512 * 1024 * 1024


@dataclass(frozen=True)
class Record:
    """One committed checkpoint. `sequence` counts the commits that its writer knew of; `recency` orders them."""

    sequence: int
    step: int
    kind: Kind
    reason: str
    exact: bool
    files: tuple[FileRecord, ...]
    because: str = ""
    missing: tuple[str, ...] = ()  # files that the time did not suffice for
    run: str = ""
    incarnation: int = 1
    world: int = 1
    save: str = ""  # what the ranks called this save, by which they find out on disk whether it was committed
    created: float = 0.0
    seconds: float = 0.0
    written: int = 0  # bytes that went to the disk; less than the sum of the sizes where files were taken over
    metrics: dict[str, float] = field(default_factory=dict)
    algorithm: str = digest.ALGORITHM

    @property
    def recency(self) -> tuple[int, int, int]:
        """The greater the newer. Not by steps: a run may save one twice. Nor by `sequence` alone: a machine that was lost, and comes
        back, may have committed more often than what the run has done since without it. Every incarnation goes on from the newest
        that it finds, so what a later one has committed counts."""
        return self.incarnation, self.sequence, self.step

    @property
    def complete(self) -> bool:
        return not self.missing

    @property
    def size(self) -> int:
        return sum(file.size for file in self.files)

    def file(self, name: str) -> FileRecord | None:
        return next((file for file in self.files if file.name == name), None)

    def to_json(self) -> bytes:
        body: dict[str, Any] = {"format": FORMAT, **asdict(self), "kind": self.kind.value}
        body["digest"] = digest.of(_canonical(body))
        return json.dumps(body).encode()

    @property
    def fingerprint(self) -> str:
        """What tells it from every other."""
        return digest.of(self.to_json())


def read(folder: Path) -> Record:
    """The record of a checkpoint, with every field checked. CheckpointError says what is wrong."""
    return parse(read_regular(folder / NAME, _LARGEST))


def parse(data: bytes) -> Record:
    try:
        body = json.loads(data)
        if not isinstance(body, dict):
            raise TypeError("not an object")
        if body.pop("format") != FORMAT:
            raise errors.CheckpointError(f"{NAME} has another format than {FORMAT}. Was it written by a newer lastcall?")
        stated = body.pop("digest")
        if digest.named(_text(body["algorithm"]))(_canonical({"format": FORMAT, **body})) != stated:
            raise errors.CheckpointError(f"{NAME} does not match its own digest")
        files = tuple(file_from(item) for item in body.pop("files"))
        kind = Kind(body.pop("kind"))
        missing = tuple(_text(name) for name in body.pop("missing"))
        record = Record(kind=kind, files=files, missing=missing, **body)
        _check(record)
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        if isinstance(error, errors.CheckpointError):
            raise
        raise errors.CheckpointError(f"{NAME} cannot be read: {type(error).__name__}: {error}") from error
    return record


def read_regular(path: Path, largest: int) -> bytes:
    """The bytes of a plain file, never through a link, never more than `largest`."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise errors.CheckpointError(f"{path.name} cannot be opened: {error.strerror}") from error
    try:
        info = os.fstat(fd)
        if not stat.S_ISREG(info.st_mode):
            raise errors.CheckpointError(f"{path.name} is not a plain file")
        if info.st_size > largest:
            raise errors.CheckpointError(f"{path.name} has {info.st_size} bytes, more than the {largest} that are read")
        with os.fdopen(fd, "rb", closefd=False) as file:
            return file.read(info.st_size)
    except OSError as error:
        raise errors.CheckpointError(f"{path.name} cannot be read: {error.strerror}") from error
    finally:
        os.close(fd)


def is_plain(name: str) -> bool:
    """Whether a file of this name may be part of a checkpoint."""
    parts = name.split("/")
    if parts[0] in (NAME, SENTINEL) or ".." in name or len(parts) > 8:
        return False
    return all(_SAFE_NAME.fullmatch(part) and len(part.encode(errors="replace")) <= _LONGEST_NAME for part in parts)


def _canonical(body: dict[str, Any]) -> bytes:
    return json.dumps(body, sort_keys=True).encode()


def _check(record: Record) -> None:
    names = [file.name for file in record.files]
    if len(set(names)) != len(names):
        raise ValueError("a file is named twice")
    for number in (record.sequence, record.step, record.incarnation, record.world, record.written):
        if type(number) is not int or number < 0:
            raise ValueError(f"{number!r} is not a count")
    if type(record.exact) is not bool or not isinstance(record.metrics, dict):
        raise TypeError("a field has the wrong type")
    for text in (record.reason, record.because, record.run, record.save):
        _text(text)
    for value in (record.created, record.seconds, *record.metrics.values()):
        if type(value) not in (int, float):
            raise TypeError(f"{value!r} is not a number")
    function = digest.named(record.algorithm)
    for file in record.files:
        if file.digest != digest.over(file.chunks, function):
            raise ValueError(f"{file.name}: its digest is not the one over its chunks")


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{value!r} is not text")
    return value


def file_from(item: dict[str, Any]) -> FileRecord:
    file = FileRecord(**{**item, "chunks": tuple(_text(chunk) for chunk in item["chunks"])})
    if not is_plain(_text(file.name)):
        raise errors.CheckpointError(f"{NAME} names the file {file.name!r}, which is not a plain name in its folder")
    if type(file.size) is not int or type(file.chunk) is not int or file.size < 0 or file.chunk <= 0:
        raise ValueError(f"{file.name}: size {file.size!r}, chunk {file.chunk!r}")
    if len(file.chunks) != -(-file.size // file.chunk):
        raise ValueError(f"{file.name}: {len(file.chunks)} digests for {file.size} bytes")
    return file
