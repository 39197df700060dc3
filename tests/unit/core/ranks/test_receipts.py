from __future__ import annotations

import json
from pathlib import Path

import pytest

from lastcall import errors
from lastcall.core.checkpoint import filenames
from lastcall.core.ranks import receipts
from lastcall.core.ranks.receipts import Part
from lastcall.storage import files as storage
from lastcall.testing import Fault, FaultyFiles
from lastcall.types import FileRecord

PART = Part(
    3,
    120,
    (FileRecord("model-00003.safetensors", 5, "ab" * 16, 4, ("ab" * 16, "cd" * 16)),),
    written=5,
    exact=False,
    because="the time",
    metrics={"loss": 0.1},
    tensors={"model": {"w": {"dtype": "U8", "shape": [5], "pieces": []}}},
)


def test_a_receipt_comes_back_as_it_was_written(tmp_path: Path) -> None:
    receipts.write(storage.Files(), tmp_path, PART)
    assert receipts.read(tmp_path, 3) == PART
    assert [path.name for path in tmp_path.iterdir()] == ["part-00003.json"]


def test_the_receipt_of_a_failure_says_why(tmp_path: Path) -> None:
    receipts.write(storage.Files(), tmp_path, Part(1, 7, failed="the disk is full"))
    found = receipts.read(tmp_path, 1)
    assert found is not None and (found.files, found.failed) == ((), "the disk is full")


def test_a_receipt_that_is_not_there_is_none(tmp_path: Path) -> None:
    assert receipts.read(tmp_path, 0) is None
    assert receipts.read(tmp_path / "gone", 0) is None


@pytest.mark.parametrize("operation", ["open", "pwrite", "fsync", "rename"])
def test_a_receipt_appears_whole_or_not_at_all(tmp_path: Path, operation: str) -> None:
    with pytest.raises(OSError):
        receipts.write(FaultyFiles(Fault(operation, 1)), tmp_path, PART)
    assert receipts.read(tmp_path, 3) is None


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"{",
        b"[]",
        b'{"part": {}}',
        b'{"part": {}, "digest": 1}',
        b'{"part": null, "digest": ""}',
        b"\xff",
    ],
)
def test_what_is_no_receipt_is_an_error(tmp_path: Path, text: bytes) -> None:
    (tmp_path / filenames.part(3)).write_bytes(text)
    with pytest.raises(errors.SaveError, match="receipt of rank 3"):
        receipts.read(tmp_path, 3)


def test_a_changed_receipt_is_an_error(tmp_path: Path) -> None:
    receipts.write(storage.Files(), tmp_path, PART)
    path = tmp_path / filenames.part(3)
    body = json.loads(path.read_bytes())
    body["part"]["exact"] = True
    path.write_text(json.dumps(body))
    with pytest.raises(errors.SaveError, match="does not match its digest"):
        receipts.read(tmp_path, 3)
