"""A rank's receipt: what it has written of a joint checkpoint, durable when the receipt is there. Kept as a
file beside the files that it names, so that the committer needs nothing but the directory: no store, no
connection."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from lastcall import errors
from lastcall.core.checkpoint import filenames
from lastcall.core.checkpoint import record as records
from lastcall.core.engine import digest
from lastcall.storage import files as storage
from lastcall.types import FileRecord


@dataclass(frozen=True)
class Part:
    rank: int
    step: int
    files: tuple[FileRecord, ...] = ()
    written: int = 0
    exact: bool = True
    because: str = ""
    metrics: dict[str, float] = field(default_factory=dict)
    tensors: Any = None  # the pieces of shared tensors in these files, as formats.manifest describes them
    doubt: str = ""  # why it is not exact though it is whole
    failed: str = ""  # why there is nothing; then there will be no checkpoint


def packed(part: Part) -> bytes:
    body = asdict(part)
    return json.dumps({"digest": digest.of(json.dumps(body).encode()), "part": body}).encode()


def unpacked(whole: Any, rank: int) -> Part:
    """From the JSON of that rank's receipt. SaveError where it is none."""
    try:
        body = whole["part"]
        if digest.of(json.dumps(body).encode()) != whole["digest"]:
            raise errors.SaveError(f"the receipt of rank {rank} does not match its digest")
        part = Part(**{**body, "files": tuple(records.file_from(item) for item in body["files"])})
        if part.rank != rank:
            raise ValueError(f"it is that of rank {part.rank!r}")
        return part
    except (KeyError, TypeError, ValueError) as error:
        raise errors.SaveError(f"the receipt of rank {rank} cannot be read: {error}") from error


def write(files: storage.Files, folder: Path, part: Part) -> None:
    under = folder / f"{filenames.part(part.rank)}.tmp"
    storage.write_small(files, under, packed(part))
    files.rename(under, folder / filenames.part(part.rank))
    files.sync_directory(folder)


def read(folder: Path, rank: int) -> Part | None:
    """None while it is not there."""
    path = folder / filenames.part(rank)
    if not path.exists():
        return None
    try:
        return unpacked(json.loads(records.read_regular(path, records.LARGEST)), rank)
    except ValueError as error:
        raise errors.SaveError(f"the receipt of rank {rank} cannot be read: {error}") from error
