"""The mailbox of a rank: whole records whenever its writer dies, found by the survivors, swept by the next
start."""

from __future__ import annotations

import ctypes
import errno
import logging
import os
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest

from lastcall import errors
from lastcall.core.guard import mailbox
from lastcall.core.guard.mailbox import Mailbox


def made(folder: Path, run: str = "abc", incarnation: int = 3, rank: int = 1, size: int = 1) -> Mailbox:
    box = Mailbox.create(folder, run, incarnation, rank, size)
    assert box is not None
    return box


def steps(records: list[mailbox.Record]) -> list[tuple[int, str]]:
    return [(record.step, record.phase) for record in records]


def test_an_empty_mailbox_has_no_records(tmp_path: Path) -> None:
    box = made(tmp_path)
    assert box.records() == []
    assert Mailbox.open(box.path).records() == []


def test_the_last_four_records_are_there_for_everybody_who_opens_it(tmp_path: Path) -> None:
    box = made(tmp_path)
    for step in range(7):
        assert box.write(step, "B", [b"step ", str(step).encode()])
    found = Mailbox.open(box.path).records()
    assert found == box.records()
    assert [(record.step, record.data) for record in found] == [
        (step, b"step %d" % step) for step in (3, 4, 5, 6)
    ]


def test_pieces_may_be_bytes_views_and_addresses(tmp_path: Path) -> None:
    memory = ctypes.create_string_buffer(b"from memory")
    box = made(tmp_path)
    assert box.write(1, "F", [b"bytes ", memoryview(bytearray(b"view ")), (ctypes.addressof(memory), 11)])
    (record,) = box.records()
    assert record == mailbox.Record(1, "F", 1, b"bytes view from memory")


def test_a_record_of_the_same_step_and_phase_takes_the_place_of_its_predecessors(tmp_path: Path) -> None:
    """Gradient accumulation writes one for each backward: the boundary before must not be pushed out."""
    box = made(tmp_path)
    box.write(4, "F", [b"first"])
    box.write(4, "B", [b"boundary"])
    for number in range(9):
        box.write(5, "F", [b"%d" % number])
    found = box.records()
    assert steps(found) == [(4, "F"), (4, "B"), (5, "F"), (5, "F")]
    newest = mailbox.newest(found, 5, "F")
    assert newest is not None
    assert newest.data == b"8"
    assert mailbox.newest(found, 9, "F") is None


def test_a_rank_that_is_ahead_still_has_the_boundary_of_the_others(tmp_path: Path) -> None:
    box = made(tmp_path)
    for step in (5, 6):
        box.write(step, "F", [b"f"])
        box.write(step, "B", [b"b"])
    box.write(7, "F", [b"f"])
    assert steps(box.records()) == [(5, "B"), (6, "F"), (6, "B"), (7, "F")]


def test_it_grows_for_a_record_that_does_not_fit_and_keeps_the_others(tmp_path: Path) -> None:
    box = made(tmp_path)
    box.write(1, "B", [b"small"])
    large = os.urandom(300_000)
    assert box.write(2, "B", [large])
    assert box.write(3, "B", [b"small again"])
    assert [record.data for record in Mailbox.open(box.path).records()] == [b"small", large, b"small again"]
    assert list(tmp_path.iterdir()) == [box.path]


def test_a_damaged_slot_is_not_read_and_the_others_are(tmp_path: Path) -> None:
    box = made(tmp_path)
    for step in (1, 2):
        box.write(step, "B", [b"the record of step %d" % step])
    raw = bytearray(box.path.read_bytes())
    raw[raw.index(b"the record of step 2")] ^= 1
    damaged = tmp_path / "damaged"
    damaged.write_bytes(raw)
    damaged.chmod(0o600)
    assert steps(Mailbox.open(damaged).records()) == [(1, "B")]


@pytest.mark.parametrize("data", [b"", b"x" * 100, b"y" * 8192, mailbox.MAGIC + b"\xff" * 8176])
def test_a_file_that_is_no_mailbox_is_refused(
    tmp_path: Path, data: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    box = made(tmp_path)
    box.path.write_bytes(data)
    with pytest.raises(errors.CheckpointError, match="lastcall-"):
        Mailbox.open(box.path)
    with caplog.at_level(logging.WARNING, "lastcall"):
        assert mailbox.read(tmp_path, "abc", 3, 1) == []
    assert "last state of rank 1" in caplog.text


def test_survivors_find_the_mail_of_a_rank_of_their_run_and_incarnation(tmp_path: Path) -> None:
    box = made(tmp_path)
    box.write(1, "B", [b"here"])
    assert mailbox.find(tmp_path, "abc", 3, 1) == box.path
    assert [record.data for record in mailbox.read(tmp_path, "abc", 3, 1)] == [b"here"]
    for run, incarnation, rank in (("abd", 3, 1), ("abc", 2, 1), ("abc", 3, 2), ("../abc", 3, 1)):
        assert mailbox.find(tmp_path, run, incarnation, rank) is None
        assert mailbox.read(tmp_path, run, incarnation, rank) == []


def test_only_its_owner_may_read_it_and_a_reader_cannot_write(tmp_path: Path) -> None:
    box = made(tmp_path)
    assert stat.S_IMODE(box.path.stat().st_mode) == 0o600
    reader = Mailbox.open(box.path)
    assert not reader.write(1, "B", [b"forged"])
    reader.close()
    assert box.path.exists()
    assert box.write(1, "B", [b"real"])


def test_it_is_gone_when_the_rank_ends_in_order(tmp_path: Path) -> None:
    box = made(tmp_path)
    box.write(1, "B", [b"x"])
    box.close()
    box.close()
    assert list(tmp_path.iterdir()) == []
    assert not box.write(2, "B", [b"y"])
    assert box.records() == []


def test_a_forked_child_does_not_take_the_mailbox_away(tmp_path: Path) -> None:
    box = made(tmp_path)
    child = os.fork()
    if child == 0:
        box.close()
        os._exit(0)
    os.waitpid(child, 0)
    assert box.path.exists()


def test_without_a_folder_there_is_no_mailbox_and_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "lastcall"):
        assert Mailbox.create(tmp_path / "missing", "abc", 1, 0) is None
    assert "LASTCALL_GUARD_FOLDER" in caplog.text


def test_a_full_folder_ends_the_mail_with_one_warning_and_no_exception(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    box = made(tmp_path)

    def full(fd: int, offset: int, size: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with caplog.at_level(logging.WARNING, "lastcall"):
        assert not box.write(1, "B", [bytes(300_000)])
        assert not box.write(2, "B", [bytes(300_000)])
        assert Mailbox.create(tmp_path, "abc", 3, 2) is None
    assert len(caplog.records) == 2
    assert list(tmp_path.iterdir()) == []


def test_a_sweep_removes_earlier_incarnations_and_dead_runs_only(tmp_path: Path) -> None:
    kept = [
        made(tmp_path, incarnation=4),
        made(tmp_path, incarnation=4, rank=2),
        made(tmp_path, "other", 1, 0),
    ]
    left = made(tmp_path, incarnation=3)
    dead_of_living = tmp_path / mailbox._name("other", 1, 1)  # its survivors may be about to read it
    dead, unfinished = tmp_path / mailbox._name("dead", 9, 0), tmp_path / f"{mailbox._name('dead', 9, 1)}.tmp"
    foreign = tmp_path / "lastcall-0-mail-notes.txt"
    for path in (dead_of_living, dead, unfinished, foreign):
        path.write_bytes(b"x")
    mailbox.sweep(tmp_path, "abc", 4)
    assert set(tmp_path.iterdir()) == {box.path for box in kept} | {dead_of_living, foreign}
    assert left.write(1, "B", [b"still no exception"])
    mailbox.sweep(tmp_path / "missing", "abc", 4)


WRITER = """
import sys
from pathlib import Path
from lastcall.core.guard.mailbox import Mailbox
box = Mailbox.create(Path(sys.argv[1]), "killed", 1, 0)
step = 0
while True:
    step += 1
    size = 100 if step % 50 else 40_000 + 400 * step  # grows now and then
    for phase in ("F", "B"):
        box.write(step, phase, [b"%8d" % step * (size // 8)] * 3)
    if step == 20:
        print("writing", flush=True)
"""


@pytest.mark.parametrize("delay", [0.0, 0.003, 0.011, 0.03])
def test_sigkill_at_any_instant_leaves_whole_records_of_the_last_steps(tmp_path: Path, delay: float) -> None:
    writer = subprocess.Popen([sys.executable, "-c", WRITER, str(tmp_path)], stdout=subprocess.PIPE)
    assert writer.stdout is not None
    with writer, writer.stdout:
        assert writer.stdout.readline() == b"writing\n"
        time.sleep(delay)  # where it is killed is the point, not when
        writer.send_signal(signal.SIGKILL)
    found = mailbox.read(tmp_path, "killed", 1, 0)
    assert len(found) >= 3
    for record in found:
        assert {record.data[at : at + 8] for at in range(0, len(record.data), 8)} == {b"%8d" % record.step}
    numbers = [(record.step, record.phase == "B") for record in found]
    assert numbers == sorted(numbers)
    assert numbers[-1][0] - numbers[0][0] <= 2
    mailbox.sweep(tmp_path, "another", 1)
    assert list(tmp_path.iterdir()) == []
