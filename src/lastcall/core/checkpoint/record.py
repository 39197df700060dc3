"""The commit record, `lastcall.json`: what makes a folder a checkpoint. It covers itself with a digest, and
is read as if hostile."""

from __future__ import annotations

import json
import math
import os
import re
import stat
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from lastcall import __version__, errors, installing
from lastcall.core.engine import digest
from lastcall.storage import errnos
from lastcall.types import FileRecord, Kind

NAME = "lastcall.json"
SENTINEL = "checkpoint-is-incomplete.txt"
FORMAT = 1
# A dot in front: `.metadata` of torch's distributed checkpoints. Spaces, letters of all languages: a PEFT
# adapter has the name that its user gave it.
_SAFE_NAME = re.compile(r"\.?\w(?:[\w .+,=@#%&'()\[\]\-]*[\w.+,=@#%&'()\[\]\-])?")
_LONGEST_NAME = 200  # bytes, of 255 that file systems have
LARGEST = 512 * 1024 * 1024  # bytes of a text that a checkpoint may have: a record, a receipt, a document
_MOST = 2**63  # of any count: more does not fit where it is used


@dataclass(frozen=True)
class Record:
    """One committed checkpoint. `sequence` counts the commits that its writer knew of; `recency` orders
    them."""

    sequence: int
    step: int
    kind: Kind
    reason: str
    exact: bool
    files: tuple[FileRecord, ...]
    because: str = ""
    missing: tuple[str, ...] = ()  # files that there was no time for
    run: str = ""
    incarnation: int = 1
    world: int = 1
    save: str = ""  # the ranks' name for this save, by which they find out on disk whether it was committed
    created: float = 0.0
    seconds: float = 0.0
    # bytes that went to the disk; less than the sum of the sizes where files were taken over
    written: int = 0
    metrics: dict[str, float] = field(default_factory=dict)
    algorithm: str = digest.ALGORITHM
    # why it is not exact although the whole state that was handed over is in it: see doubts.py
    doubt: str = ""
    version: str = __version__  # of lastcall; empty in records from before it was noted

    @property
    def recency(self) -> tuple[int, int, int]:
        """The greater the newer. Not by steps: a run may save one twice. Nor by `sequence` alone: a machine
        that was lost, and comes back, may have committed more often than the run has since without it. Every
        incarnation continues from the newest that it finds, so what a later one has committed counts."""
        return self.incarnation, self.sequence, self.step

    @property
    def whole(self) -> bool:
        """The state of its step as it was handed over, none of it torn or missing. Exact, unless the run
        itself is in doubt."""
        return self.exact or bool(self.doubt and self.because == self.doubt)

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
        for name in ("doubt", "version"):  # not in records from before they were known
            if not body[name]:
                del body[name]
        body["digest"] = digest.of(_canonical(body))
        return json.dumps(body).encode()

    @property
    def fingerprint(self) -> str:
        """What distinguishes it from every other."""
        return digest.of(self.to_json())


def read(folder: Path) -> Record:
    """The record of a checkpoint, with every field checked. CheckpointError says what is wrong."""
    return parse(read_regular(folder / NAME, LARGEST))


def parse(data: bytes) -> Record:
    """CheckpointError where it is damaged; FormatError where it is not, and was written by another
    version."""
    try:
        body = json.loads(data)
        if not isinstance(body, dict):
            raise TypeError("not an object")
        _check_format(body)
        stated = body.pop("digest")
        if body["algorithm"] not in digest.ALGORITHMS and _is_newer(body):
            raise errors.FormatError(
                f"digests of the kind {body['algorithm']!r:.50} cannot be checked here. "
                f"{_remedy(body, FORMAT)}"
            )
        if digest.named(_text(body["algorithm"]))(_canonical(body)) != stated:
            raise errors.CheckpointError(f"{NAME} does not match its own digest")
        del body["format"]
        _check_names(body)
        files = tuple(file_from(item) for item in body.pop("files"))
        kind = Kind(body.pop("kind"))
        missing = tuple(_text(name) for name in body.pop("missing"))
        record = Record(kind=kind, files=files, missing=missing, **{"version": "", **body})
        _check(record)
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        if isinstance(error, errors.CheckpointError):
            raise
        raise errors.CheckpointError(f"{NAME} cannot be read: {type(error).__name__}: {error}") from error
    return record


def _check_format(body: dict[str, Any]) -> None:
    found = body["format"]
    if found == FORMAT and type(found) is int:
        return
    if type(found) is not int:
        raise errors.CheckpointError(f"{NAME} has no format number, but {found!r:.50}")
    raise errors.FormatError(
        f"{NAME} is of format {found}, and lastcall {__version__} reads format "
        f"{FORMAT}. {_remedy(body, found)}"
    )


def _check_names(body: dict[str, Any]) -> None:
    """What matches its own digest is as it was written: names that are not ours are those of another
    version."""
    known, needed = (
        {each.name for each in fields(Record)},
        {"files", "kind", "missing", "step", "sequence", "reason", "exact"},
    )
    strange = [*sorted(body.keys() - known), *(f"no {name}" for name in sorted(needed - body.keys()))]
    if not strange and body["kind"] not in [kind.value for kind in Kind]:
        strange = [f"the kind {body['kind']!r:.50}"]
    for item in body["files"] if not strange and isinstance(body["files"], list) else ():
        if isinstance(item, dict) and item.keys() != {each.name for each in fields(FileRecord)}:
            strange = [f"a file with {', '.join(sorted(map(str, item)))}"]
    if strange:
        what = (
            f"{NAME} is intact, but lastcall {__version__} does not know what it says "
            f"({', '.join(strange):.200})"
        )
        raise errors.FormatError(f"{what}. {_remedy(body, FORMAT)}")


def _version(body: dict[str, Any]) -> str:
    """Of the lastcall that has written it, as far as it says so in a way that can be pasted into a shell."""
    version = body.get("version")
    return version if isinstance(version, str) and re.fullmatch(r"[0-9][0-9A-Za-z.+-]{0,40}", version) else ""


def _is_newer(body: dict[str, Any]) -> bool:
    def numbers(version: str) -> list[int]:
        return [int(number) for number in re.findall(r"\d{1,9}", version)]

    return numbers(_version(body)) > numbers(__version__)


def _remedy(body: dict[str, Any], found: int) -> str:
    if version := _version(body):
        return (
            f"It was written by lastcall {version}, which reads it: {installing.wheel(version)} "
            "(or a newer lastcall)"
        )
    if found < FORMAT:
        return "It was written by an older lastcall: install the version that the run began with"
    return "It was written by a newer lastcall: install that one"


def read_regular(path: Path, largest: int) -> bytes:
    """The bytes of a plain file, never through a link, never more than `largest`. CheckpointError where they
    are not there, or are not plain; UnreadableError where that cannot be known (`storage.errnos`)."""
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
    fd = errnos.reading(lambda: os.open(path, flags), f"{path.name} cannot be opened")
    try:
        info = os.fstat(fd)
        if not stat.S_ISREG(info.st_mode):
            raise errors.CheckpointError(f"{path.name} is not a plain file")
        if info.st_size > largest:
            raise errors.CheckpointError(
                f"{path.name} has {info.st_size} bytes, more than the {largest} that are read"
            )
        return errnos.reading(lambda: _read(fd, info.st_size), f"{path.name} cannot be read")
    finally:
        os.close(fd)


def _read(fd: int, size: int) -> bytes:
    data = bytearray()
    while len(data) < size and (piece := os.pread(fd, size - len(data), len(data))):
        data += piece
    return bytes(data)


def is_plain(name: str) -> bool:
    """Whether a file of this name may be part of a checkpoint."""
    parts = name.split("/")
    if parts[0] in (NAME, SENTINEL) or ".." in name or len(parts) > 8:
        return False
    return all(
        _SAFE_NAME.fullmatch(part) and len(part.encode(errors="replace")) <= _LONGEST_NAME for part in parts
    )


def _canonical(body: dict[str, Any]) -> bytes:
    return json.dumps(body, sort_keys=True).encode()


def _check(record: Record) -> None:
    names = [file.name for file in record.files]
    if len(set(names)) != len(names):
        raise ValueError("a file is named twice")
    for number in (record.sequence, record.step, record.incarnation, record.world, record.written):
        if type(number) is not int or not 0 <= number < _MOST:
            raise ValueError(f"{number!r:.40} is not a count")
    if record.world < 1:
        raise ValueError("a world of no ranks")
    if type(record.exact) is not bool or not isinstance(record.metrics, dict):
        raise TypeError("a field has the wrong type")
    for text in (
        *record.metrics,
        record.reason,
        record.because,
        record.doubt,
        record.run,
        record.save,
        record.version,
    ):
        _text(text)
    for value in (record.created, record.seconds, *record.metrics.values()):
        if type(value) is not float and (type(value) is not int or abs(value) >= _MOST):
            raise TypeError(f"{value!r:.40} is not a number")
    if not (math.isfinite(record.created) and math.isfinite(record.seconds)):
        raise ValueError("a time that is none")
    function = digest.named(record.algorithm)
    for file in record.files:
        if file.digest != digest.over(file.chunks, function):
            raise ValueError(f"{file.name}: its digest is not the one over its chunks")


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{value!r:.40} is not text")
    # UnicodeEncodeError, a ValueError, for half a character: it could not be shown, nor be a name
    value.encode()
    return value


def file_from(item: dict[str, Any]) -> FileRecord:
    file = FileRecord(**{**item, "chunks": tuple(_text(chunk) for chunk in item["chunks"])})
    if not is_plain(_text(file.name)):
        raise errors.CheckpointError(
            f"{NAME} names the file {file.name!r}, which is not a plain name in its folder"
        )
    if (
        type(file.size) is not int
        or type(file.chunk) is not int
        or not 0 <= file.size < _MOST
        or not 0 < file.chunk < _MOST
    ):
        raise ValueError(f"{file.name}: size {file.size!r:.40}, chunk {file.chunk!r:.40}")
    if len(file.chunks) != -(-file.size // file.chunk):
        raise ValueError(f"{file.name}: {len(file.chunks)} digests for {file.size} bytes")
    return file


@dataclass(frozen=True)
class Entry:
    """A committed checkpoint."""

    path: Path
    record: Record
