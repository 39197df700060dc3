"""When the next incarnation is started here."""

from __future__ import annotations

from pathlib import Path

import pytest

from lastcall.core.process.registry import Member
from lastcall.launch import restarts
from lastcall.launch.options import LaunchOptions
from lastcall.launch.outcome import ExitVerdict, Result
from lastcall.types import Notice

FAILED = ExitVerdict(Result.FAILED, 9, "", crashed=True)
SAVED = ExitVerdict(Result.SAVED, 75, "")
RESCUED = ExitVerdict(Result.SAVED, 75, "", crashed=True)


def policy(restart: str = "on-failure", **more: float) -> restarts.Policy:
    return restarts.Policy(LaunchOptions(("true",), restart=restart, **more))  # type: ignore[arg-type]


def at(step: int, checkpoint: str | None = None, root: str = "/runs/a") -> list[Member]:
    return [Member(1, 1, root, step, checkpoint=checkpoint)]


@pytest.mark.parametrize(
    ("restart", "result", "again"),
    [
        ("on-failure", Result.FAILED, True),
        ("on-failure", Result.SAVED, True),
        ("on-failure", Result.STOPPED, False),
        ("on-failure", Result.ENDED, False),
        ("on-preempt", Result.FAILED, False),
        ("on-preempt", Result.SAVED, True),
        ("never", Result.FAILED, False),
        ("never", Result.SAVED, False),
    ],
)
def test_what_is_started_again(restart: str, result: Result, again: bool) -> None:
    assert policy(restart).after(ExitVerdict(result, 1, ""), at(1), None).again is again


def test_a_notice_to_the_launcher_ends_it() -> None:
    decision = policy().after(SAVED, at(1), Notice("aws", "terminate", 0.0))
    assert not decision.again and "terminate" in decision.because


@pytest.mark.parametrize("verdict", [FAILED, RESCUED])
def test_three_crashes_at_one_step_are_enough(verdict: ExitVerdict) -> None:
    judge = policy()
    assert [judge.after(verdict, at(5), None).again for _ in range(3)] == [True, True, False]


def test_the_third_crash_at_one_step_is_hopeless_and_named() -> None:
    judge = policy()
    for _ in range(2):
        judge.after(FAILED, at(5), None)
    decision = judge.after(FAILED, at(5), None)
    assert decision.hopeless and "failed at step 5" in decision.because


def test_progress_forgives_what_was_before() -> None:
    judge = policy()
    assert all(judge.after(FAILED, at(step), None).again for step in (5, 5, 6, 6, 7, 7))
    assert not judge.after(FAILED, at(7), None).again


def test_a_step_behind_the_furthest_is_no_progress() -> None:
    judge = policy()
    assert [judge.after(FAILED, at(step), None).again for step in (9, 4, 6)] == [True, True, False]


def test_a_new_checkpoint_is_progress() -> None:
    judge = policy()
    assert all(judge.after(FAILED, at(5, f"checkpoint-{n}"), None).again for n in range(5))


def test_a_run_that_is_preempted_at_one_step_is_not_hopeless() -> None:
    judge = policy()
    assert all(judge.after(SAVED, at(5), None).again for _ in range(5))


def test_a_command_that_does_not_train_is_bounded_by_the_count_alone() -> None:
    judge = policy(max_restarts=4)
    assert [judge.after(FAILED, [], None).again for _ in range(5)] == [True] * 4 + [False]


def test_the_back_off_doubles_without_progress_up_to_a_minute() -> None:
    judge = policy(backoff=1.0, max_restarts=20)
    delays = [judge.after(FAILED, [], None).delay for _ in range(9)]
    assert delays == [1, 2, 4, 8, 16, 32, 60, 60, 60]


def test_a_pause_is_not_counted(tmp_path: Path) -> None:
    wish = tmp_path / ".lastcall" / "pause.json"
    wish.parent.mkdir()
    wish.touch()
    judge = policy("on-preempt", max_restarts=0)
    decision = judge.after(SAVED, at(1, root=str(tmp_path)), None)
    assert decision.again and decision.because == restarts.PAUSED
    wish.unlink()
    assert not judge.after(SAVED, at(2, root=str(tmp_path)), None).again
