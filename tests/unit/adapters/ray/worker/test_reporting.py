from __future__ import annotations

import json
import threading
import time
from pathlib import Path
from typing import Any, NoReturn

import pytest

from helpers.ray.thread_ranks import PATIENCE, Group, Parked, made
from lastcall.adapters.ray.saves import uncommitted
from lastcall.adapters.ray.worker import committing, connection


@pytest.fixture(autouse=True)
def no_parking(monkeypatch: pytest.MonkeyPatch) -> None:
    def wait() -> NoReturn:
        raise Parked

    monkeypatch.setattr(committing, "wait_for_kill", wait)


@pytest.fixture
def two(storage: Any) -> Group:
    return Group(storage, 2)


def finish(*threads: Any) -> None:
    for thread in threads:
        thread.join(PATIENCE)
        assert not thread.is_alive()


def test_without_a_notice_a_report_is_rays_own(two: Group) -> None:
    finish(two.ranks[0].report(made()), two.ranks[1].report())
    assert [(rank.parked, rank.failure) for rank in two.ranks] == [(False, None)] * 2
    assert not Path(two.storage.experiment_fs_path, ".lastcall").exists()


def test_after_a_notice_the_checkpoint_is_committed_and_training_ends_there(
    two: Group, caplog: pytest.LogCaptureFixture
) -> None:
    for rank in two.ranks:
        rank.told()
    given = made()
    with caplog.at_level("INFO", "lastcall"):
        finish(two.ranks[0].report(given), two.ranks[1].report())
    assert [rank.parked for rank in two.ranks] == [True, True] and two.committed == [1]
    assert "JIT checkpoint completed in" in caplog.text
    assert uncommitted.find(two.storage, None)[0] is None  # committed, so nothing is left over
    record = json.loads(Path(two.storage.experiment_fs_path, ".lastcall", "checkpoint_4.json").read_text())
    assert (record["reason"], record["exact"]) == ("SIGTERM", True)
    assert not Path(given.path).exists()  # the script's `with` will not come to remove it


def test_the_controller_is_told_to_restart_at_once_when_all_is_committed(two: Group) -> None:
    for rank in two.ranks:
        rank.told()
    finish(two.ranks[0].report(made()), two.ranks[1].report())
    deadlines = [rank.context.preemption_context.preemption_info.deadline_ms for rank in two.ranks]
    assert all(deadline <= time.time() * 1000 for deadline in deadlines)


def test_a_report_without_a_checkpoint_is_passed_on_and_training_goes_on(two: Group) -> None:
    for rank in two.ranks:
        rank.told()
    finish(two.ranks[0].report(), two.ranks[1].report())
    assert [(rank.parked, rank.failure) for rank in two.ranks] == [(False, None)] * 2 and two.committed == [1]


def test_a_rank_that_is_in_rays_barrier_when_it_hears_the_notice_is_joined_there(two: Group) -> None:
    early, late = two.ranks
    in_barrier = early.report(made())
    assert early.context.barrier_entered.wait(PATIENCE)
    late.told()
    joining = late.report()
    early.told()
    finish(in_barrier, joining)
    assert [rank.parked for rank in two.ranks] == [True, True] and two.committed == [1]


@pytest.mark.parametrize("given", [False, True], ids=["metrics", "checkpoint"])
def test_a_rank_that_is_out_of_rays_barrier_when_it_hears_the_notice_keeps_nobody_waiting_there(
    two: Group, given: bool
) -> None:
    quick, slow = two.ranks
    out, on = threading.Event(), threading.Event()
    real = slow.reporting._real

    def lingering(*args: Any, **kwargs: Any) -> None:
        real(*args, **kwargs)
        out.set()
        assert on.wait(PATIENCE)

    slow.reporting._real = lingering
    last = slow.report(made() if given else None)
    finish(quick.report())
    assert out.wait(PATIENCE)
    for rank in two.ranks:
        rank.told(grace=10 * PATIENCE)
    on.set()
    finish(last)
    # the save is yet to come
    assert [(rank.parked, rank.failure) for rank in two.ranks] == [(False, None)] * 2
    slow.reporting._real = real
    finish(quick.report(made()), slow.report())
    assert [rank.parked for rank in two.ranks] == [True, True]


def test_with_a_dead_rank_the_checkpoint_is_kept_for_the_next_incarnation(
    two: Group, caplog: pytest.LogCaptureFixture
) -> None:
    living = two.ranks[0]
    living.told()
    two.mark_dead(1)
    with caplog.at_level("INFO", "lastcall"):
        finish(living.report(made()))
    assert living.parked and not living.context.barrier_entered.is_set() and two.committed == []
    found, facts = uncommitted.find(two.storage, None)
    assert (Path(found.path) / "model.pt").read_bytes() == b"weights" and facts["reason"] == "SIGTERM"
    assert "completed without rank 1" in caplog.text


def test_a_rank_that_waits_in_rays_barrier_for_a_dead_one_is_released_and_keeps_its_checkpoint(
    two: Group,
) -> None:
    living = two.ranks[0]
    in_barrier = living.report(made())
    assert living.context.barrier_entered.wait(PATIENCE)
    two.mark_dead(1)
    living.told()
    finish(in_barrier)
    assert living.parked and two.released and uncommitted.find(two.storage, None)[0] is not None


def test_a_rank_that_does_not_come_in_time_counts_as_dead(two: Group) -> None:
    living = two.ranks[0]
    living.told(grace=1.0)
    finish(living.report(made()))
    assert living.parked and uncommitted.find(two.storage, None)[0] is not None


def test_parts_of_a_checkpoint_are_not_taken_for_one(storage: Any, caplog: pytest.LogCaptureFixture) -> None:
    three = Group(storage, 3)
    three.mark_dead(2)
    for rank in three.ranks[:2]:
        rank.told()
    finish(three.ranks[0].report(made("shard-0.pt")), three.ranks[1].report(made("shard-1.pt")))
    assert uncommitted.find(storage, None)[0] is None
    assert "those of rank 2 are missing" in caplog.text


def test_parts_of_two_different_saves_are_not_put_together(
    two: Group, caplog: pytest.LogCaptureFixture
) -> None:
    for rank in two.ranks:
        rank.told()
    two.ranks[1].strategy.replaying = True
    finish(two.ranks[0].report(made("shard-0.pt")), two.ranks[1].report(made("shard-1.pt")))
    assert two.committed == [] and uncommitted.find(two.storage, None)[0] is None
    assert "its parts are of different steps" in caplog.text


def test_reports_of_metrics_with_a_dead_rank_are_left_out_and_a_checkpoint_is_kept_all_the_same(
    two: Group,
) -> None:
    living = two.ranks[0]
    living.told()
    two.mark_dead(1)
    finish(living.report())
    finish(living.report())
    assert (living.parked, living.failure) == (False, None) and not living.context.barrier_entered.is_set()
    finish(living.report(made()))
    assert living.parked and uncommitted.find(two.storage, None)[0] is not None


def test_a_rank_whose_own_save_fails_does_not_keep_the_others_waiting(two: Group) -> None:
    failing, other = two.ranks
    failing.told()
    other.told()
    waiting = other.report()
    failing.reporting.failed("no folder to write to")
    finish(waiting)
    assert other.fell_back == ["no folder to write to"] and not other.parked


def test_where_ray_knows_no_preemption_training_goes_on_after_the_save(storage: Any) -> None:
    group = Group(storage, 1, degraded=True)
    (alone,) = group.ranks
    alone.told()
    finish(alone.report(made()))
    finish(alone.report(made()))
    assert (alone.parked, alone.failure) == (False, None) and group.committed == [1, 2]


def test_what_rays_own_report_raises_is_raised(two: Group) -> None:
    two.barrier.abort()
    finish(two.ranks[0].report(made()))
    assert type(two.ranks[0].failure).__name__ == "BrokenBarrierError"


def test_at_the_end_report_is_rays_own_again(two: Group) -> None:
    one = two.ranks[0]
    one.reporting.end()
    assert "report" not in vars(one.context)


def test_b9_a_script_that_handles_a_preemption_itself_is_not_cut_at_its_report(two: Group) -> None:
    for rank in two.ranks:
        rank.told()
        rank.api_use.native = True
    for _ in range(2):
        finish(two.ranks[0].report(made()), two.ranks[1].report())
    assert [(rank.parked, rank.failure) for rank in two.ranks] == [(False, None)] * 2 and two.committed == [
        1,
        2,
    ]
    assert [rank.context.preemption_context.preemption_info for rank in two.ranks] == [None, None]


def test_b4_a_save_that_the_script_will_not_ask_for_is_not_called_exact(two: Group) -> None:
    for rank in two.ranks:
        rank.api_use.asked = False
        rank.told()
    finish(two.ranks[0].report(made()), two.ranks[1].report())
    record = json.loads(Path(two.storage.experiment_fs_path, ".lastcall", "checkpoint_4.json").read_text())
    assert record["exact"] is False and "ray.train.get_checkpoint()" in record["because"]


def test_b8_the_controller_learns_that_a_notice_was_answered(two: Group) -> None:
    for rank in two.ranks:
        rank.told()
    finish(two.ranks[0].report(made()), two.ranks[1].report())
    assert two._line.agreement.wait_for(connection.SAVED, 0.0) is not None
