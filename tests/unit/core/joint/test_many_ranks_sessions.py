"""Whole sessions of several ranks, as threads: what a notice, a failure and the end of training lead to."""

from __future__ import annotations

import errno
import logging
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from helpers.core.bare_core import content, noise
from helpers.processes.forkserver import until
from helpers.ranks.sessions import CLOCK, NBYTES, Crew, answered, saved, strategy
from helpers.ranks.thread_ranks import PATIENCE
from lastcall import errors, testing
from lastcall.core.checkpoint import departure
from lastcall.core.checkpoint.catalog import Catalog
from lastcall.core.checkpoint.record import Entry
from lastcall.core.joint.many_ranks import ManyRanks
from lastcall.core.process import exits, identity
from lastcall.core.ranks.heartbeat import HANG
from lastcall.settings import PeriodicCheckpointConfig
from lastcall.storage.files import Files
from lastcall.testing import Fault, FaultyFiles
from lastcall.types import Kind, Notice, Outcome

FOREVER = 1_000_000


@pytest.fixture(autouse=True)
def _nobody_leaves_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exits, "leave", lambda code: None)


def newest(root: Path, kind: Kind = Kind.JIT) -> Entry:
    """The newest checkpoint: whole, exact, and loaded by all ranks of a new incarnation, each byte as it
    was."""
    entry = testing.assert_resumable(root, exact=True)
    assert entry.record.kind is kind
    again = Crew(root, entry.record.world)
    assert again.train(entry.record.step) == [entry.record.step] * again.size
    for subject in again.subjects:
        assert subject.resumed == {"rank": subject.rank, "step": entry.record.step}
        assert content(subject.live) == noise(NBYTES, entry.record.step)
        assert content(subject.own) == noise(16, f"own {subject.rank}")
    return entry


@pytest.mark.parametrize("lockstep", [True, False])
@pytest.mark.parametrize("told", [{0}, {2}, {0, 1, 2}])
def test_a_notice_to_any_ranks_leads_all_to_save_one_step(
    tmp_path: Path, told: set[int], lockstep: bool
) -> None:
    def hook(rank: int, step: int) -> None:
        if step == 5 and rank in told:
            crew.notify(rank)

    crew = Crew(tmp_path, 3, hook, lockstep=lockstep)
    saved(crew.train(FOREVER))
    assert set(crew.outcomes) == {Outcome.SAVED}
    entry = newest(tmp_path)
    assert entry.record.step >= 5 and entry.record.reason == "SIGTERM"


def test_a_notice_before_the_first_step_of_a_late_rank(tmp_path: Path) -> None:
    told = threading.Event()

    def hook(rank: int, step: int) -> None:
        if rank == 0 and step == 0:
            crew.notify(0)
            told.set()
        elif step == 0:
            assert told.wait(30)

    crew = Crew(tmp_path, 2, hook)
    saved(crew.train(FOREVER))
    newest(tmp_path)


def test_a_notice_before_all_ranks_are_there_leaves_nothing_and_loses_nothing(tmp_path: Path) -> None:
    crew = Crew(tmp_path, 2)
    crew.notify(1)
    results = crew.train(3)
    saved(results)
    assert all("before the first step" in str(result) for result in results)
    assert not list(tmp_path.glob("checkpoint-*"))


def test_training_that_finishes_leaves_one_final_checkpoint_and_a_restart_does_nothing(
    tmp_path: Path,
) -> None:
    """E5: nothing of the agreement is left behind either."""
    crew = Crew(tmp_path, 3)
    assert crew.train(4) == [4, 4, 4]
    assert set(crew.outcomes) == {Outcome.FINISHED}
    entry = newest(tmp_path, Kind.FINAL)
    assert [path.name for path in tmp_path.glob("checkpoint-*")] == ["checkpoint-4"]
    assert testing.assert_resumable(tmp_path).record.sequence == entry.record.sequence
    assert not (tmp_path / ".lastcall" / "agreement").exists()  # E5: no decision is left behind


def test_f13_an_early_stop_of_many_ranks_is_not_called_finished(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "lastcall")
    assert Crew(tmp_path, 3, ending="the loop was left at step 4 of 9").train(4) == [4, 4, 4]
    assert newest(tmp_path, Kind.FINAL).record.reason == "the loop was left at step 4 of 9"
    assert (
        "The loop was left at step 4 of 9; saved checkpoint-4" in caplog.text
        and "Training finished at step" not in caplog.text
    )


def test_a_notice_when_all_have_finished_does_not_interrupt_the_last_save(tmp_path: Path) -> None:
    reached = threading.Barrier(2)

    def hook(rank: int, step: int) -> None:
        if step == 3:
            reached.wait(30)
            if rank == 1:
                crew.notify(1)

    crew = Crew(tmp_path, 2, hook, kill_wait=1.0)
    assert crew.train(4) == [4, 4]
    newest(tmp_path, Kind.FINAL)


def test_a_rank_that_fails_has_the_others_save_what_all_have(tmp_path: Path) -> None:
    def hook(rank: int, step: int) -> None:
        if (rank, step) == (1, 5):
            raise ValueError("a bad batch")

    crew = Crew(tmp_path, 3, hook)
    results: list[Any] = crew.train(FOREVER)
    assert isinstance(results[1], ValueError)
    saved([results[0], results[2]])  # what they raised came of it
    entry = testing.assert_resumable(tmp_path, step=5)
    assert entry.record.kind in (Kind.RESCUE, Kind.SURVIVORS)
    assert "rank 1 failed: ValueError: a bad batch" in entry.record.reason


def test_ranks_that_went_on_after_a_hang_agree_on_the_next_notice_as_on_the_first(tmp_path: Path) -> None:
    """Nothing of what was decided about the hang may let a rank pass the boundary that is agreed on later."""

    def hook(rank: int, step: int) -> None:
        if step == 5:
            if rank == 0:
                now = CLOCK.now()
                crew.inboxes[0].notify(Notice(HANG, "nobody moves", now, now + PATIENCE))
            ranks = strategy(crew.sessions[rank])._ranks
            while ranks.agreement.number < 2:
                time.sleep(0.01)
        if step == 15 and rank == 1:
            crew.notify(1)

    crew = Crew(tmp_path, 3, hook, lockstep=False)
    saved(crew.train(FOREVER))
    assert {entry.record.kind for entry in Catalog(tmp_path, Files()).entries()} == {Kind.RESCUE, Kind.JIT}
    assert newest(tmp_path).record.step >= 15


def test_a_fault_of_ours_holds_no_training_thread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def hook(rank: int, step: int) -> None:
        if (rank, step) == (0, 5):
            crew.notify(0)

    def fail(*_: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(ManyRanks, "decide", fail)
    crew = Crew(tmp_path, 2, hook, lockstep=False)
    results: list[Any] = crew.train(FOREVER)
    assert [result.code for result in results] == [143, 143]  # nothing was saved, and both have left


def test_a_passing_fault_of_one_disk_is_no_reason_not_to_save(tmp_path: Path) -> None:
    def hook(rank: int, step: int) -> None:
        if (rank, step) == (0, 5):
            crew.notify(0)

    crew = Crew(tmp_path, 2, hook, files={1: FaultyFiles(Fault("pwrite", 1, errno.EIO))})
    saved(crew.train(FOREVER))
    newest(tmp_path)


def test_a_broken_disk_of_one_rank_ends_all_as_not_saved(tmp_path: Path) -> None:
    def hook(rank: int, step: int) -> None:
        if (rank, step) == (0, 5):
            crew.notify(0, grace=5.0)

    crew = Crew(tmp_path, 2, hook, files={1: FaultyFiles(Fault("fsync", 1, errno.EIO, lasting=True))})
    results = crew.train(FOREVER)
    assert all(isinstance(result, errors.Preempted) and result.code == 143 for result in results), results
    assert set(crew.outcomes) == {Outcome.NOT_SAVED}
    assert not list(tmp_path.glob("checkpoint-*"))


def test_the_store_lost_before_the_notice_is_made_up_for_by_the_directory(tmp_path: Path) -> None:
    def hook(rank: int, step: int) -> None:
        if (rank, step) == (0, 5):
            crew.store.lose()
        if (rank, step) == (0, 6):
            crew.notify(0)

    crew = Crew(tmp_path, 2, hook)
    saved(crew.train(FOREVER))
    newest(tmp_path)


def test_a_step_that_does_not_end_is_saved_around(tmp_path: Path) -> None:
    stuck = threading.Event()

    def hook(rank: int, step: int) -> None:
        if step == 5:
            if rank == 0:
                crew.notify(0)
            elif rank == 1:  # in a long evaluation; the others wait for it in their collective
                while not list(tmp_path.glob("checkpoint-*")):
                    stuck.wait(0.02)

    crew = Crew(tmp_path, 2, hook)
    saved(crew.train(FOREVER))
    assert newest(tmp_path, Kind.RESCUE).record.step == 5


@pytest.mark.parametrize("slow", [False, True])
def test_a_step_that_is_saved_without_a_notice_is_not_written_again_for_one(
    tmp_path: Path, slow: bool
) -> None:
    """The rescue finds its step committed, or being written."""
    written = threading.Event()

    class Disk(Files):
        def fsync(self, fd: int) -> None:
            if slow:
                written.wait(PATIENCE)
            super().fsync(fd)

    def hook(rank: int, step: int) -> None:
        session = crew.sessions[rank]
        if step == 5:
            if rank == 0:
                crew.notify(0)
            while (decision := strategy(session).decision) is None or decision.kind == "boundary":
                time.sleep(0.01)
            written.set()
            while not answered(session):
                time.sleep(0.01)

    saves = PeriodicCheckpointConfig(save_strategy="steps", save_steps=5, environ={})
    crew = Crew(tmp_path, 2, hook, periodic=saves, files={0: Disk(), 1: Disk()})
    saved(crew.train(FOREVER))
    entry = newest(tmp_path, Kind.PERIODIC)
    assert (entry.record.step, entry.record.sequence) == (5, 1)


def test_a_periodic_save_that_fails_leaves_the_rescue_to_do_it(tmp_path: Path) -> None:
    def hook(rank: int, step: int) -> None:
        session = crew.sessions[rank]
        if step == 5:
            if rank == 0:
                crew.notify(0)
            while not answered(session):
                time.sleep(0.01)

    saves = PeriodicCheckpointConfig(save_strategy="steps", save_steps=5, environ={})
    files = FaultyFiles(*(Fault("fsync", number, errno.EIO) for number in (1, 2, 3)))
    crew = Crew(tmp_path, 2, hook, periodic=saves, files={1: files})
    saved(crew.train(FOREVER))
    assert newest(tmp_path, Kind.RESCUE).record.step == 5


def test_ranks_that_finish_at_different_steps_wait_for_each_other(tmp_path: Path) -> None:
    crew = Crew(tmp_path, 2, lockstep=False)
    assert crew.train([3, 3]) == [3, 3]
    newest(tmp_path, Kind.FINAL)


def test_a_notice_finds_the_rank_that_has_finished_before_the_others(tmp_path: Path) -> None:
    def hook(rank: int, step: int) -> None:
        if (rank, step) == (1, 5):
            while 0 not in crew.sessions or not strategy(crew.sessions[0]).finished:
                threading.Event().wait(0.01)
            crew.notify(1)

    crew = Crew(tmp_path, 2, hook, lockstep=False)
    saved(crew.train([3, FOREVER]))
    entry = testing.assert_resumable(tmp_path)
    assert entry.record.kind is Kind.JIT and entry.record.step > 5
    again = Crew(tmp_path, 2, lockstep=False)
    # each is where it was; what they share is of one step
    assert again.train([3, entry.record.step]) == [3, entry.record.step]
    assert all(content(subject.live) == noise(NBYTES, entry.record.step) for subject in again.subjects)


@pytest.mark.parametrize("first_fails", [True, False])
def test_a_boundary_can_be_saved_again(tmp_path: Path, first_fails: bool) -> None:
    outcomes: list[list[Any]] = [[], []]

    def hook(rank: int, step: int) -> None:
        session, subject = crew.sessions[rank], crew.subjects[rank]
        for _ in range(2 if step == 2 else 0):
            with session.no_other_save():
                try:
                    outcomes[rank].append(
                        session.save(subject.capture(), Kind.MANUAL, "run.save()").record.sequence
                    )
                except errors.SaveError:
                    outcomes[rank].append("not saved")

    faults = [Fault("fsync", number, errno.EIO) for number in (1, 2, 3)] if first_fails else []
    crew = Crew(tmp_path, 2, hook, files={1: FaultyFiles(*faults)})
    assert crew.train(3) == [3, 3]
    assert outcomes == ([["not saved", 1]] * 2 if first_fails else [[1, 2]] * 2)


# ---- one after the other -----------------------------------------------------------------------------------


def test_every_rank_that_leaves_has_said_so_and_nobody_has_to_wait_for_it_afterwards(tmp_path: Path) -> None:
    seen: set[int] = set()

    def hook(rank: int, step: int) -> None:
        if step == 5 and rank == 1:
            crew.notify(1)
        seen.update(leaver.rank for leaver in departure.found(tmp_path / ".lastcall"))

    crew = Crew(tmp_path, 2, hook, kill_wait=0.3)
    saved(crew.train(FOREVER))
    assert seen == {0, 1}
    assert departure.found(tmp_path / ".lastcall") == []


def test_all_ranks_wait_for_a_rank_of_the_one_before_that_may_still_save(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    Crew(tmp_path, 2).train(3)
    told = departure.DepartureNote(tmp_path / ".lastcall", 1)
    told.say("SIGTERM", PATIENCE)
    path = tmp_path / ".lastcall" / "leaving-1.json"
    path.write_text(path.read_text().replace(identity.Process.own().host, "elsewhere/1"))
    crew = Crew(tmp_path, 2)
    results: list[Any] = []
    training = threading.Thread(target=lambda: results.extend(crew.train(6)))
    training.start()
    until(lambda: "Waiting for rank 1, process" in caplog.text, "a rank that waits")
    assert [subject.step for subject in crew.subjects] == [0, 0]
    told.unsay()
    training.join(PATIENCE)
    assert results == [6, 6]


def test_ranks_that_are_told_to_stop_while_the_first_waits_have_lost_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    Crew(tmp_path, 2).train(3)
    departure.DepartureNote(tmp_path / ".lastcall", 0).say("SIGTERM", PATIENCE)
    path = tmp_path / ".lastcall" / "leaving-0.json"
    path.write_text(path.read_text().replace(identity.Process.own().host, "elsewhere/1"))
    crew = Crew(tmp_path, 2)
    results: list[Any] = []
    training = threading.Thread(target=lambda: results.extend(crew.train(6)))
    training.start()
    until(lambda: "Waiting for process" in caplog.text, "a rank that waits")
    crew.notify(0)
    training.join(PATIENCE)
    saved(results)
    assert path.exists()
