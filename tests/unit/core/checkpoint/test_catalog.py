from __future__ import annotations

import errno
import fcntl
import logging
import math
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from helpers.processes.scripts import Script, eventually, gone
from lastcall import clock, errors, testing
from lastcall.core.checkpoint import record as records
from lastcall.core.checkpoint import retention
from lastcall.core.checkpoint.catalog import Catalog
from lastcall.core.checkpoint.record import Entry
from lastcall.core.checkpoint.retention import Keep
from lastcall.core.engine import digest
from lastcall.storage import files as storage
from lastcall.types import Kind


@pytest.fixture
def cat(root: Path) -> Catalog:
    return Catalog(root, storage.Files())


def record(sequence: int, step: int = 0, kind: Kind = Kind.PERIODIC, **more: object) -> records.Record:
    return records.Record(sequence, step, kind, "test", True, (), **more)  # type: ignore[arg-type]


def folder(path: Path, sequence: int, step: int = 0, **more: object) -> Path:
    """A committed checkpoint without files, and one large enough to be kept as a spare."""
    path.mkdir(parents=True)
    (path / "model.safetensors").write_bytes(b"m" * 100)
    (path / records.NAME).write_bytes(record(sequence, step, **more).to_json())  # type: ignore[arg-type]
    return path


def names(root: Path) -> set[str]:
    return {name for name in os.listdir(root) if name != ".lastcall"}


# ---- which there are ---------------------------------------------------------------------------------------


def test_the_newest_is_the_one_committed_last_whatever_its_step(cat: Catalog, root: Path) -> None:
    folder(root / "checkpoint-9", 1, 9)
    folder(root / "checkpoint-100", 2, 100)
    folder(root / "checkpoint-20", 3, 20)
    assert [entry.record.step for entry in cat.entries()] == [20, 100, 9]
    assert [entry.path.name for entry in cat.entries()] == ["checkpoint-20", "checkpoint-100", "checkpoint-9"]


def test_what_is_no_committed_checkpoint_is_not_listed(cat: Catalog, root: Path, tmp_path: Path) -> None:
    folder(root / "checkpoint-1.damaged-0", 5)
    folder(root / "checkpoint-2.replaced-0.damaged-0", 5)
    folder(root / "checkpoint-x", 5)
    folder(root / "checkpoint-", 5)
    folder(root / "xcheckpoint-1", 5)
    folder(root / "checkpoint-1x", 5)
    (root / "checkpoint-3").mkdir()
    (root / "checkpoint-4").touch()
    (root / "checkpoint-5").symlink_to(folder(tmp_path / "elsewhere", 9))
    folder(root / "checkpoint-6", 5)
    (root / "checkpoint-6" / records.NAME).write_bytes(b"{}")
    assert cat.entries() == []


def test_one_that_was_stepping_aside_when_the_power_failed_still_counts(cat: Catalog, root: Path) -> None:
    folder(root / "checkpoint-7.replaced-0", 1, 7)
    assert [entry.path.name for entry in cat.entries()] == ["checkpoint-7.replaced-0"]


def test_a_directory_that_is_not_there_holds_nothing(tmp_path: Path) -> None:
    assert Catalog(tmp_path / "none", storage.Files()).entries() == []


# ---- house-keeping on start --------------------------------------------------------------------------------


def test_an_incomplete_checkpoint_is_removed_and_said_so(cat: Catalog, root: Path) -> None:
    folder(root / "checkpoint-1", 1)
    (root / "checkpoint-1" / records.SENTINEL).touch()
    folder(root / "checkpoint-2", 2)
    (root / "checkpoint-2" / records.SENTINEL).symlink_to("nowhere")
    folder(root / "checkpoint-3", 3)
    assert sorted(cat.clean()) == [f"removed checkpoint-{n}: it was never completed" for n in (1, 2)]
    assert names(root) == {"checkpoint-3"}


def test_a_checkpoint_whose_digests_cannot_be_computed_here_is_no_damaged_one(
    cat: Catalog, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder(root / "checkpoint-4", 2)
    monkeypatch.delitem(digest._KNOWN, "xxh3-128")  # as where the xxhash package is missing
    for look in (cat.clean, cat.entries):
        with pytest.raises(
            errors.UncheckedError, match="checkpoint-4: digests of the kind 'xxh3-128'.*pip install xxhash"
        ):
            look()
    assert names(root) == {"checkpoint-4"}


def test_folders_without_a_record_are_left_alone(cat: Catalog, root: Path) -> None:
    (root / "checkpoint-5").mkdir()
    (root / "checkpoint-5" / "pytorch_model.bin").write_bytes(b"of another program")
    (root / "final").mkdir()
    assert cat.clean() == []
    assert (root / "checkpoint-5" / "pytorch_model.bin").read_bytes() == b"of another program"
    assert (root / "final").is_dir()


def test_a_damaged_checkpoint_is_set_aside_under_the_next_free_number(cat: Catalog, root: Path) -> None:
    for number in range(3):
        folder(root / "checkpoint-4", 1)
        (root / "checkpoint-4" / records.NAME).write_bytes(b"broken %d" % number)
        (said,) = cat.clean()
        assert said.startswith(
            f"set checkpoint-4 aside as checkpoint-4.damaged-{number}: lastcall.json cannot be read"
        )
    assert names(root) == {f"checkpoint-4.damaged-{n}" for n in range(3)}
    assert (root / "checkpoint-4.damaged-1" / records.NAME).read_bytes() == b"broken 1"
    assert cat.clean() == []


def test_a_damaged_one_that_was_stepping_aside_is_set_aside_once(cat: Catalog, root: Path) -> None:
    folder(root / "checkpoint-4.replaced-0", 1)
    (root / "checkpoint-4.replaced-0" / records.NAME).write_bytes(b"broken")
    assert len(cat.clean()) == 1
    assert cat.clean() == []
    assert names(root) == {"checkpoint-4.replaced-0.damaged-0"}


@pytest.mark.parametrize("trick", ["link", "pipe", "folder"])
def test_a_record_that_is_no_plain_file_is_set_aside(
    cat: Catalog, root: Path, tmp_path: Path, trick: str
) -> None:
    name = folder(root / "checkpoint-4", 1) / records.NAME
    name.unlink()
    if trick == "link":
        name.symlink_to(folder(tmp_path / "other", 1) / records.NAME)
    elif trick == "pipe":
        os.mkfifo(name)
    else:
        name.mkdir()
    assert len(cat.clean()) == 1
    assert names(root) == {"checkpoint-4.damaged-0"}


def test_links_to_checkpoints_are_ignored_and_their_targets_untouched(
    cat: Catalog, root: Path, tmp_path: Path
) -> None:
    target = folder(tmp_path / "elsewhere", 1)
    (target / records.SENTINEL).touch()
    (root / "checkpoint-1").symlink_to(target)
    assert cat.clean() == []
    assert (root / "checkpoint-1").is_symlink()
    assert len(os.listdir(target)) == 3


def test_leftovers_of_a_killed_run_are_cleared_and_become_spare_space(cat: Catalog, root: Path) -> None:
    folder(cat.staging / "checkpoint-8", 1)
    folder(cat.trash / "checkpoint-1-0", 1)
    cat.preparing.write_bytes(b"half a spare")
    assert cat.clean() == []
    assert set(os.listdir(cat.private)) == {"spare"}
    assert cat.spares.sizes() == [100, 100]


def test_a_staging_folder_that_is_a_link_is_removed_and_not_followed(
    cat: Catalog, root: Path, tmp_path: Path
) -> None:
    precious = folder(tmp_path / "precious" / "checkpoint-1", 1)
    cat.staging.symlink_to(tmp_path / "precious")
    cat.clean()
    assert not os.path.lexists(cat.staging)
    assert (precious / "model.safetensors").exists()


# ---- publishing --------------------------------------------------------------------------------------------


def built(cat: Catalog, sequence: int, step: int) -> Path:
    return folder(cat.staging / f"checkpoint-{step}", sequence, step)


def test_publishing_gives_the_folder_its_name(cat: Catalog, root: Path) -> None:
    assert cat.publish(built(cat, 1, 7), 7) == root / "checkpoint-7"
    assert names(root) == {"checkpoint-7"}
    assert cat.entries()[0].record.sequence == 1
    assert os.listdir(cat.staging) == []


class NoExchange(storage.Files):
    def exchange(self, one: Path, other: Path) -> None:
        raise OSError(errno.EINVAL, "not here")


@pytest.mark.parametrize("files", [storage.Files(), NoExchange()])
def test_publishing_a_step_again_replaces_the_older_one(root: Path, files: storage.Files) -> None:
    cat = Catalog(root, files)
    cat.publish(built(cat, 1, 7), 7)
    cat.publish(built(cat, 2, 7), 7)
    assert names(root) == {"checkpoint-7"}
    assert [entry.record.sequence for entry in cat.entries()] == [2]
    assert cat.spares.sizes() == [100]
    assert os.listdir(cat.staging) == []


@pytest.mark.parametrize("number", range(1, 8))
def test_without_a_swap_a_valid_checkpoint_is_there_after_every_failure(root: Path, number: int) -> None:
    first = Catalog(root, storage.Files())
    first.publish(built(first, 1, 7), 7)

    class Files(testing.FaultyFiles):
        def exchange(self, one: Path, other: Path) -> None:
            raise OSError(errno.ENOSYS, "not here")

    cat = Catalog(root, Files(testing.Fault("any", number, lasting=True)))
    try:
        cat.publish(built(cat, 2, 7), 7)
        published = True
    except OSError:
        published = False
    entries = first.entries()
    assert entries and entries[0].record.step == 7
    assert not published or entries[0].record.sequence == 2


def test_somebody_elses_checkpoint_of_that_step_is_kept(
    cat: Catalog, root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (root / "checkpoint-7").mkdir()
    (root / "checkpoint-7" / "pytorch_model.bin").touch()
    cat.publish(built(cat, 1, 7), 7)
    assert [entry.path.name for entry in cat.entries()] == ["checkpoint-7"]
    assert (root / "checkpoint-7.replaced-0" / "pytorch_model.bin").exists()
    assert (
        "checkpoint-7 is not a checkpoint of this run: it is kept as checkpoint-7.replaced-0" in caplog.text
    )
    assert cat.clean() == []
    assert (root / "checkpoint-7.replaced-0" / "pytorch_model.bin").exists()


def test_a_link_with_that_name_is_kept_and_its_target_untouched(
    cat: Catalog, root: Path, tmp_path: Path
) -> None:
    target = folder(tmp_path / "backup", 1, 7)
    (root / "checkpoint-7").symlink_to(target)
    cat.publish(built(cat, 2, 7), 7)
    assert sorted(os.listdir(target)) == [records.NAME, "model.safetensors"]
    assert not (root / "checkpoint-7").is_symlink()
    assert os.readlink(root / "checkpoint-7.replaced-0") == str(target)
    assert [entry.record.sequence for entry in cat.entries()] == [2]


def test_a_damaged_one_with_that_name_is_kept(cat: Catalog, root: Path) -> None:
    (folder(root / "checkpoint-7", 1, 7) / records.NAME).write_bytes(b"broken")
    cat.publish(built(cat, 2, 7), 7)
    assert (root / "checkpoint-7.replaced-0" / records.NAME).read_bytes() == b"broken"
    assert [entry.record.sequence for entry in cat.entries()] == [2]


# ---- rotation ----------------------------------------------------------------------------------------------


def entry(sequence: int, kind: Kind = Kind.PERIODIC, **more: object) -> Entry:
    return Entry(Path(f"checkpoint-{sequence}"), record(sequence, sequence, kind, **more))


def left(entries: list[Entry], keep: Keep) -> list[int]:
    newest_first = sorted(entries, key=lambda entry: -entry.record.sequence)
    gone = {entry.path for entry in retention.superfluous(newest_first, keep)}
    return sorted(entry.record.sequence for entry in entries if entry.path not in gone)


@pytest.mark.parametrize(
    ("limit", "kept"),
    [(None, [1, 2, 3, 4, 5]), (4, [2, 3, 4, 5]), (2, [4, 5]), (1, [4, 5]), (9, [1, 2, 3, 4, 5])],
)
def test_a_limit_never_removes_the_last_two(limit: int | None, kept: list[int]) -> None:
    assert left([entry(n) for n in range(1, 6)], Keep(limit)) == kept


def test_partial_ones_do_not_count_as_the_last_two() -> None:
    partial: dict[str, Any] = {"missing": ("optimizer.safetensors",)}
    entries = [entry(1), entry(2), entry(3), entry(4, **partial), entry(5, **partial)]
    assert left(entries, Keep(1)) == [2, 3, 5]


def test_without_a_limit_only_superseded_notice_checkpoints_go() -> None:
    kinds = [Kind.JIT, Kind.RESCUE, Kind.PERIODIC, Kind.MANUAL, Kind.JIT, Kind.JIT, Kind.JIT]
    entries = [entry(n, kind) for n, kind in enumerate(kinds)]
    assert left(entries, Keep()) == [2, 3, 5, 6]


@pytest.mark.parametrize(("mode", "best"), [("min", 2), ("max", 1)])
def test_the_best_one_stays(mode: str, best: int) -> None:
    losses = {1: 9.0, 2: 0.5, 3: math.nan, 4: 3.0, 5: 2.0, 6: 1.0}
    entries = [entry(n, metrics={"loss": loss}) for n, loss in losses.items()]
    assert left(entries, Keep(2, "loss", mode)) == [best, 5, 6]


def test_where_no_metric_was_reported_nothing_is_best() -> None:
    entries = [entry(1, metrics={"loss": math.nan}), entry(2), entry(3), entry(4, metrics={"other": 1.0})]
    assert retention.best(entries, Keep(1, "loss")) is None
    assert retention.best(entries, Keep(1)) is None
    assert left(entries, Keep(1, "loss")) == [3, 4]


def test_of_equally_good_ones_the_newest_is_the_best() -> None:
    entries = [entry(n, metrics={"loss": 1.0}) for n in (3, 2, 1)]
    assert retention.best(entries, Keep(1, "loss")) == entries[0]


def test_infinity_is_a_value_like_any_other() -> None:
    entries = [entry(1, metrics={"loss": math.inf}), entry(2, metrics={"loss": 1e300})]
    assert retention.best(entries, Keep(1, "loss", "min")) == entries[1]
    assert retention.best(entries, Keep(1, "loss", "max")) == entries[0]


def test_nothing_is_pruned_where_nothing_is(cat: Catalog) -> None:
    assert cat.prune(Keep(1)) == []


def test_pruned_checkpoints_are_gone_and_their_files_spare(cat: Catalog, root: Path) -> None:
    for n in range(1, 5):
        folder(root / f"checkpoint-{n}", n, n)
    cat.spares.trim = lambda count, nbytes: None  # type: ignore[method-assign]
    assert sorted(path.name for path in cat.prune(Keep(2))) == ["checkpoint-1", "checkpoint-2"]
    assert names(root) == {"checkpoint-3", "checkpoint-4"}
    assert os.listdir(cat.trash) == []
    assert cat.spares.sizes() == [100, 100]


def test_spares_beyond_what_the_next_checkpoint_needs_are_given_back(cat: Catalog, root: Path) -> None:
    for n in range(1, 5):
        folder(root / f"checkpoint-{n}", n, n)  # records without files: the next one needs nothing
    cat.prune(Keep(2))
    assert cat.spares.sizes() == []


@pytest.mark.parametrize("number", range(1, 13))
def test_a_prune_that_fails_anywhere_leaves_what_has_to_stay(
    root: Path, number: int, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    for n in range(1, 4):
        folder(root / f"checkpoint-{n}", n, n)
    faulty = Catalog(root, testing.FaultyFiles(testing.Fault("any", number, lasting=True)))
    faulty.prune(Keep(1))
    assert {entry.record.sequence for entry in faulty.entries()} >= {2, 3}
    Catalog(root, storage.Files()).clean()
    assert "staging" not in os.listdir(root / ".lastcall") and "trash" not in os.listdir(root / ".lastcall")


# ---- the lock ----------------------------------------------------------------------------------------------

OWNER = """
    import os, signal, sys
    from pathlib import Path
    from lastcall import clock
    from lastcall.core.checkpoint.catalog import Catalog
    from lastcall.storage import files
    catalog = Catalog(Path({root!r}), files.Files())
    catalog.open(clock.Clock())
    if {fork}:
        child = os.fork()
        if child == 0:
            signal.pause()
        print("child", child, flush=True)
    print("locked", flush=True)
    signal.pause()
"""


TRY = """
    from pathlib import Path
    from lastcall import clock, errors
    from lastcall.core.checkpoint.catalog import Catalog
    from lastcall.storage import files
    try:
        Catalog(Path({root!r}), files.Files()).open(clock.Clock(), patience=0.0)
    except errors.BusyError:
        print("busy", flush=True)
    else:
        print("got it", flush=True)
"""


@pytest.fixture
def opened(root: Path) -> Iterator[Catalog]:
    cat = Catalog(root, storage.Files())
    yield cat
    cat.close()


def test_opening_makes_the_directory(tmp_path: Path) -> None:
    cat = Catalog(tmp_path / "a" / "b", storage.Files())
    cat.open(clock.Clock())
    assert (tmp_path / "a" / "b" / ".lastcall" / "lock").read_text().split()[:2] == [
        str(os.getpid()),
        os.uname().nodename,
    ]
    assert cat.entries() == []
    cat.close()
    cat.close()


def test_a_second_process_is_told_who_has_the_directory(opened: Catalog, root: Path, tmp_path: Path) -> None:
    with Script(tmp_path, OWNER.format(root=str(root), fork=False)) as owner:
        owner.expect("locked")
        still = testing.FakeClock()
        with pytest.raises(errors.BusyError, match=f"in use by process {owner.pid}.*kill {owner.pid}"):
            opened.open(still, patience=5.0)
        assert still.now() >= 1005.0
        owner.send(signal.SIGKILL)
        owner.wait()
        opened.open(still, patience=0.0)


def test_a_predecessor_on_its_way_out_is_waited_for(opened: Catalog, root: Path, tmp_path: Path) -> None:
    with Script(tmp_path, OWNER.format(root=str(root), fork=False)) as owner:
        owner.expect("locked")

        class Waiting(testing.FakeClock):
            def sleep(self, seconds: float) -> None:
                super().sleep(seconds)
                owner.send(signal.SIGKILL)
                owner.wait()

        opened.open(Waiting(), patience=5.0)


def test_a_child_that_outlives_a_killed_owner_does_not_hold_the_lock(
    opened: Catalog, root: Path, tmp_path: Path
) -> None:
    with Script(tmp_path, OWNER.format(root=str(root), fork=True)) as owner:
        child = int(owner.expect("child"))
        owner.expect("locked")
        owner.send(signal.SIGKILL)
        owner.wait()
        assert not gone(child)
        opened.open(clock.Clock(), patience=0.0)
        assert not gone(child)
        os.kill(child, signal.SIGKILL)
        assert eventually(lambda: gone(child))


def test_two_runs_of_one_process_cannot_share_a_directory(
    opened: Catalog, root: Path, tmp_path: Path
) -> None:
    opened.open(clock.Clock())
    second = Catalog(root.parent / "." / root.name, storage.Files())
    with pytest.raises(errors.BusyError, match="already in use by this process"):
        second.open(clock.Clock())
    second.close()
    with Script(tmp_path, TRY.format(root=str(root))) as other:  # the refusal did not let go of the lock
        other.expect("busy")
    opened.close()
    with Script(tmp_path, TRY.format(root=str(root))) as other:
        other.expect("got it")


def test_a_file_system_without_locks_is_used_with_a_warning(
    opened: Catalog, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "lockf", refuse)
    monkeypatch.setattr(fcntl, "fcntl", refuse)
    opened.open(clock.Clock())
    assert "cannot be locked" in caplog.text
