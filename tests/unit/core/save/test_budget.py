from __future__ import annotations

import pytest

from lastcall import testing
from lastcall.core.save import budget

MB = 1_000_000


@pytest.fixture
def clock() -> testing.FakeClock:
    return testing.FakeClock()


def test_a_slow_disk_is_assumed_until_something_was_measured(clock: testing.FakeClock) -> None:
    known = budget.Budget(clock)
    assert not known.measured
    assert known.bandwidth == budget.ASSUMED
    assert known.seconds(200 * MB) == pytest.approx(budget.FIXED + budget.SAFETY)


def test_measurements_are_averaged_and_the_latest_weighs_most(clock: testing.FakeClock) -> None:
    known = budget.Budget(clock)
    known.observe(1000 * MB, 1.0)
    assert known.measured
    assert known.bandwidth == pytest.approx(1000e6)
    known.observe(500 * MB, 1.0)
    assert known.bandwidth == pytest.approx(750e6)
    known.observe(500 * MB, 1.0)
    assert known.bandwidth == pytest.approx(625e6)


@pytest.mark.parametrize(
    ("nbytes", "seconds"), [(16 * 1024 * 1024 - 1, 1.0), (100 * MB, 0.0), (100 * MB, -1.0), (0, 1.0)]
)
def test_what_says_nothing_about_bandwidth_is_not_learned_from(
    clock: testing.FakeClock, nbytes: int, seconds: float
) -> None:
    known = budget.Budget(clock)
    known.observe(nbytes, seconds)
    assert not known.measured


def test_the_kill_wait_is_what_was_asked_for_while_the_grace_holds_it(clock: testing.FakeClock) -> None:
    known = budget.Budget(clock)
    assert known.kill_wait(3.0, 200 * MB, None) == 3.0
    assert known.kill_wait(3.0, 200 * MB, clock.now() + 30) == 3.0


def test_the_kill_wait_is_cut_where_the_grace_would_not_hold_the_save(clock: testing.FakeClock) -> None:
    known = budget.Budget(clock)
    needed = known.seconds(200 * MB)
    assert known.kill_wait(3.0, 200 * MB, clock.now() + needed + 2.5) == pytest.approx(1.5)
    assert known.kill_wait(3.0, 200 * MB, clock.now() + needed) == 0.0
    assert known.kill_wait(3.0, 200 * MB, clock.now() - 5) == 0.0


def test_what_follows_the_save_is_hurried_for_where_the_time_can_hold_both(clock: testing.FakeClock) -> None:
    known = budget.Budget(clock)
    known.afterwards = lambda nbytes: 20.0
    needed = known.seconds(200 * MB)
    assert known.until_safe(200 * MB, clock.now() + 30) == needed + 20.0
    assert known.kill_wait(3.0, 200 * MB, clock.now() + needed + 20.0 + 1.5) == pytest.approx(0.5)


def test_what_cannot_follow_the_save_in_time_is_not_hurried_for(clock: testing.FakeClock) -> None:
    known = budget.Budget(clock)
    known.afterwards = lambda nbytes: 1000.0
    assert known.until_safe(200 * MB, clock.now() + 30) == known.seconds(200 * MB)
    assert known.kill_wait(3.0, 200 * MB, clock.now() + 30) == 3.0


def test_a_plan_says_what_is_attempted_and_why(clock: testing.FakeClock) -> None:
    known = budget.Budget(clock)
    known.observe(1000 * MB, 1.0)
    assert known.plan(1000 * MB, None).because == "no deadline is known"
    full = known.plan(1000 * MB, clock.now() + 10)
    assert (full.kind, full.because) == ("full", "needs about 1.6 s (1000 MB at 1000 MB/s), 10.0 s left")
    clock.advance(9)
    partial = known.plan(1000 * MB, clock.now() + 1)
    assert partial.kind == "partial"
    assert partial.because.startswith("needs about 1.6 s (1000 MB at 1000 MB/s), only 1.0 s left")
    assert partial.seconds == full.seconds


def test_a_save_that_just_fits_is_attempted_in_full(clock: testing.FakeClock) -> None:
    known = budget.Budget(clock)
    assert known.plan(MB, clock.now() + known.seconds(MB) + 1e-6).kind == "full"
    assert known.plan(MB, clock.now() + known.seconds(MB) - 1e-6).kind == "partial"
