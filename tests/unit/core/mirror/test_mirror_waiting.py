"""A mirror that does not answer, or is not there: said while it is waited for, and never replaced by
something else."""

from __future__ import annotations

import logging
import threading
from pathlib import Path

import pytest

from helpers.core import mirrors
from helpers.core.mirrors import Watched
from lastcall import clock as clocks
from lastcall import errors, testing
from lastcall.core.checkpoint.catalog import Catalog
from lastcall.core.checkpoint.retention import Keep
from lastcall.core.mirror.mirror import Mirror
from lastcall.events import EventLog
from lastcall.storage import files as storage
from lastcall.storage import mounts, objects, patience


def mirror(root: Path, place: Watched) -> Mirror:
    catalog = Catalog(root, storage.Files())
    return Mirror(place.url, catalog, clocks.Clock(), EventLog(root / "events", clocks.Clock()), Keep)


def test_c9_a_mirror_that_hangs_at_the_start_is_said_every_few_seconds(
    root: Path, place: Watched, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(patience, "SILENT", 0.05)
    said = threading.Event()

    class Counting(logging.Handler):
        lines = 0

        def emit(self, record: logging.LogRecord) -> None:
            self.lines += "Still waiting" in record.getMessage()
            if self.lines == 3:
                said.set()

    place.hook = lambda operation, name: said.wait(mirrors.PATIENCE) and None
    counting = Counting()
    logging.getLogger("lastcall").addHandler(counting)
    try:
        assert mirror(root, place).take_over(lambda: False)
    finally:
        logging.getLogger("lastcall").removeHandler(counting)
    assert said.is_set()
    line = next(record.getMessage() for record in caplog.records if "Still waiting" in record.getMessage())
    assert place.url in line and "reading .lastcall/" in line and "unset LASTCALL_MIRROR" in line


def test_c9_a_place_that_answers_is_not_spoken_of(caplog: pytest.LogCaptureFixture) -> None:
    clock = testing.FakeClock()
    asked = patience.Asked(clock)
    with asked.asking("reading a") as heard:
        for _ in range(10):
            clock.advance(patience.SILENT - 1)
            asked.say("s3://bucket")
            heard()  # bytes come
    clock.advance(100)
    asked.say("s3://bucket")
    assert asked.silent() is None and not caplog.records


# ---- F20 ---------------------------------------------------------------------------------------------------


def test_f20_a_mirror_whose_parent_is_missing_is_refused_and_nothing_is_made(
    tmp_path: Path, root: Path
) -> None:
    place = Watched(tmp_path / "mnt" / "runs" / "exp1")
    with pytest.raises(
        errors.StorageRefused,
        match=r"mnt/runs does not exist\. Is its disk mounted.*mkdir "
        r"-p",
    ):
        place.write("a", b"")
    with pytest.raises(errors.ConfigError, match="LASTCALL_MIRROR: file://.*does not exist"):
        Mirror(
            place.url,
            Catalog(root, storage.Files()),
            clocks.Clock(),
            EventLog(root / "events", clocks.Clock()),
            Keep,
        ).take_over(lambda: False)
    assert not (tmp_path / "mnt").exists()


def test_f20_a_disk_that_fstab_names_must_be_mounted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "with space").mkdir()
    table = tmp_path / "fstab"
    table.write_text(
        f"# a comment\nserver:/x {tmp_path}/with\\040space nfs rw 0 0\n/dev/sda1 / ext4 rw 0 1\n"
    )
    monkeypatch.setattr(mounts, "FSTAB", table)
    place = objects.opened(f"file://{tmp_path}/with space/exp1")
    with pytest.raises(
        errors.StorageRefused,
        match="lists a disk for .*/with space, but none is mounted there. Mount it: mount",
    ):
        place.read("a", 1)
    assert not (tmp_path / "with space" / "exp1").exists()
    mounted = tmp_path / "mountinfo"
    mounted.write_text(f"36 35 98:0 / {tmp_path}/with\\040space rw - nfs server:/x rw\n")
    monkeypatch.setattr(mounts, "MOUNTED", mounted)
    assert place.read("a", 1) is None


def test_f20_a_disk_that_goes_while_the_run_is_at_work_is_not_replaced(tmp_path: Path) -> None:
    place = objects.FolderStore(tmp_path / "place")
    place.write("a", b"1")
    place._device = 12345  # as if a disk had been mounted there
    for ask in (lambda: place.write("b", b"2"), lambda: place.names(), lambda: place.read("a", 10)):
        with pytest.raises(errors.StorageRefused, match="another file system than before"):
            ask()
    (tmp_path / "place" / "a").unlink()
    (tmp_path / "place").rmdir()
    with pytest.raises(errors.StorageRefused, match="Mount its disk again"):
        place.write("b", b"2")


def test_f20_a_folder_that_was_removed_is_made_again_on_the_same_disk(tmp_path: Path) -> None:
    place = objects.FolderStore(tmp_path / "place")
    assert place.names() == {} and (tmp_path / "place").is_dir()
    (tmp_path / "place").rmdir()
    place.write("checkpoint-1/a", b"1")
    assert place.names() == {"checkpoint-1/a": 1}
