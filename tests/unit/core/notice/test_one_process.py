"""How one process answers a notice: at its boundary, from the side, after an error and at the end. A test
plays both threads."""

from __future__ import annotations

import errno
import logging
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from helpers.core.answers import NOW, nobody_leaves
from helpers.core.solo import Solo
from helpers.ranks.thread_ranks import PATIENCE, at_once
from lastcall import errors, testing
from lastcall.core import timing
from lastcall.core.notice.ending import FINISHED
from lastcall.core.notice.phases import Phase
from lastcall.testing import Fault, FaultyFiles
from lastcall.types import Kind, Outcome

P = Phase
BEFORE = [P.QUIET, P.WAITING, P.HOLDING, P.BOUNDARY, P.INSTANT]  # of which none has saved anything


@pytest.fixture(autouse=True)
def _nobody_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    nobody_leaves(monkeypatch)


@pytest.fixture
def solo(tmp_path: Path) -> Iterator[Solo]:
    with Solo(tmp_path) as made:
        yield made


@pytest.fixture
def broken(tmp_path: Path) -> Iterator[Solo]:
    """On a disk that keeps nothing from now on."""
    files = FaultyFiles()
    with Solo(tmp_path, files=files) as made:
        files._faults = (Fault("fsync", files.calls["fsync"] + 1, errno.EIO, lasting=True),)
        yield made


def leaves(solo: Solo, code: int = 75) -> None:
    """The training thread comes to its boundary."""
    with pytest.raises(errors.Preempted) as left:
        solo.strategy.at_boundary()
    assert left.value.code == code and solo.phases.phase is P.LEAVING


# ---- what the agent asks -----------------------------------------------------------------------------------


def test_one_process_has_nobody_to_tell_and_nobody_to_agree_with(solo: Solo) -> None:
    notice = solo.notify()
    solo.strategy.announce(notice)
    assert not solo.strategy.hurried(notice) and not solo.strategy.continues() and not solo.strategy.served()
    assert solo.strategy.hopeless(saving=True) == solo.strategy.hopeless(saving=False) == ""
    where = solo.strategy.decide()
    assert where.boundary and not where.dismissed
    solo.strategy.stuck()
    solo.strategy.blame()
    solo.strategy.step_without_optimizer()
    assert solo.phases.phase is P.QUIET and not solo.context.outcome.decided


def test_held_training_is_stopped_at_its_next_boundary_and_let_go_at_the_gate_once_it_is_saved(
    solo: Solo,
) -> None:
    solo.notify(P.HOLDING)
    solo.strategy.hold()
    assert solo.subject.stops == 1
    solo.context.gate.on_hold()  # nothing is saved yet: the step may be taken
    solo.phases.enter(P.SAVING)
    solo.answer.saved("rescued step 3")
    with pytest.raises(errors.Preempted):
        solo.context.gate.on_hold()


@pytest.mark.parametrize(("usual", "seconds"), [(0.0, 1.0), (0.01, 1.0), (0.5, 1.5), (2.0, 6.0)])
def test_a_boundary_is_waited_for_as_long_as_three_usual_steps_and_a_second_at_least(
    solo: Solo, usual: float, seconds: float
) -> None:
    solo.notify()
    solo.subject.step_seconds = usual
    assert solo.strategy.boundary_until() == pytest.approx(NOW + seconds)


@pytest.mark.parametrize(
    ("usual", "barred"), [(None, ""), (60.0, ""), (0.01, "the state of the optimizer is not known")]
)
def test_a_boundary_is_waited_for_until_its_save_would_be_late_where_nothing_else_is_to_be_hoped_for(
    solo: Solo, usual: float | None, barred: str
) -> None:
    solo.notify()
    solo.subject.step_seconds, solo.subject.barred = usual, barred
    solo.checkpointer.expected_bytes = 10**9
    latest = NOW + 30.0 - solo.strategy.needs(NOW + 30.0) - timing.MARGIN
    assert solo.strategy.boundary_until() == pytest.approx(latest) and latest < NOW + 25.0


def test_a_boundary_is_hardly_waited_for_where_a_checkpoint_of_this_state_is_there(solo: Solo) -> None:
    solo.subject.step_seconds = 60.0
    solo.notify(P.BOUNDARY)
    leaves(solo)
    assert solo.strategy.boundary_until() == NOW + 1.0


# ---- from the side -----------------------------------------------------------------------------------------


def test_a_rescue_saves_the_last_completed_step_behind_the_gate_and_opens_it_again(
    solo: Solo, tmp_path: Path
) -> None:
    solo.notify(P.INSTANT)
    shut: list[int] = []
    solo.subject.before_capture = lambda: shut.append(solo.context.gate.closed)
    solo.strategy.aside("no boundary in time")
    assert solo.phases.phase is P.COMMITTED and solo.answer.whole and solo.context.outcome.saved
    assert solo.kept == [(3, "rescue", "SIGTERM")] and testing.assert_resumable(tmp_path, 3, exact=True)
    assert shut == [1] and solo.context.gate.closed == 0
    leaves(solo)
    assert len(solo.kept) == 1  # the boundary that comes late has nothing to add


def test_a_rescue_that_is_not_whole_is_followed_by_the_boundary_that_comes_late(
    solo: Solo, tmp_path: Path
) -> None:
    solo.notify(P.INSTANT)
    solo.subject.inexact = "the data loader had gone on"
    solo.strategy.aside("no boundary in time")
    assert solo.phases.phase is P.COMMITTED and solo.answer.committed and not solo.answer.whole
    assert not solo.context.outcome.decided and not testing.assert_resumable(tmp_path, 3).record.exact
    solo.train(1)
    leaves(solo)
    assert solo.kept[0] == (4, "jit", "SIGTERM") and testing.assert_resumable(tmp_path, 4, exact=True)


def test_nothing_is_written_for_a_rescue_of_what_is_committed_already(solo: Solo) -> None:
    solo.checkpointer.save(solo.subject.capture(), Kind.MANUAL, "run.save()")
    solo.subject.barred = "no rescue"  # not needed
    solo.notify(P.INSTANT)
    solo.strategy.aside("no boundary in time")
    assert (
        solo.phases.because == "step 3 is already committed"
        and solo.context.outcome.saved
        and len(solo.kept) == 1
    )


def test_what_has_changed_since_its_checkpoint_is_not_taken_for_committed(solo: Solo) -> None:
    solo.checkpointer.save(solo.subject.capture(), Kind.MANUAL, "run.save()")
    solo.subject.touched = True
    solo.notify(P.INSTANT)
    solo.strategy.aside("no boundary in time")
    # in the place of the other: it is of the same step
    assert [kind for _, kind, _ in solo.kept] == ["rescue"]


@pytest.mark.parametrize(
    ("rescue", "barred", "why"),
    [(True, "the model is compiled", "the model is compiled"), (False, "", "rescue is switched off")],
)
def test_where_a_rescue_must_not_be_tried_the_boundary_is_hoped_for(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, rescue: bool, barred: str, why: str
) -> None:
    with Solo(tmp_path, rescue=rescue) as solo:
        solo.subject.barred = barred
        solo.notify(P.INSTANT)
        solo.strategy.aside("no boundary in time")
        assert (solo.phases.phase, solo.phases.because) == (P.BOUNDARY, why) and solo.kept == []
        assert (
            f"No boundary in time, and a rescue is not possible: {why}. Waiting for the boundary until the "
            "deadline" in caplog.text
        )
        leaves(solo)
        assert solo.kept == [(3, "jit", "SIGTERM")]


def test_an_optimizer_step_that_does_not_end_is_left_to_its_boundary(solo: Solo) -> None:
    solo.notify(P.INSTANT)
    solo.context.gate.enter()
    solo.strategy.aside("no boundary in time")
    assert (solo.phases.phase, solo.phases.because) == (
        P.BOUNDARY,
        "the optimizer step does not end",
    ) and solo.kept == []
    assert solo.context.gate.closed == 0
    assert NOW + 29.0 < solo.clock.now() < NOW + 30.0  # as long as a save still had time


@pytest.mark.parametrize("unexpected", [False, True])
def test_a_rescue_that_fails_for_whatever_reason_leaves_the_boundary_to_hope_for(
    broken: Solo, unexpected: bool
) -> None:
    def fail() -> None:
        raise ZeroDivisionError("out of the blue")

    if unexpected:
        broken.subject.before_capture = fail
    broken.notify(P.INSTANT)
    broken.strategy.aside("no boundary in time")
    assert (
        broken.phases.phase is P.BOUNDARY
        and not broken.answer.committed
        and not broken.context.outcome.decided
    )
    assert [facts["save"] for facts in broken.said("not-saved")] == [
        "rescue"
    ] and broken.context.gate.closed == 0
    assert broken.checkpointer.lock.acquire(blocking=False)


def test_a_boundary_that_came_first_is_not_rescued_as_well(solo: Solo) -> None:
    solo.notify(P.INSTANT)
    solo.phases.enter(P.SAVING)
    solo.strategy.aside("no boundary in time")
    assert solo.phases.phase is P.SAVING and solo.kept == [] and solo.context.gate.closed == 0


@pytest.mark.parametrize("phase", [P.QUIET, P.WAITING, P.HOLDING, P.BOUNDARY, P.INSTANT, P.SAVING_ASIDE])
def test_after_a_fault_of_the_agent_the_next_boundary_saves_whatever_it_was_at(
    solo: Solo, phase: Phase
) -> None:
    solo.notify(phase)
    solo.strategy.fault()
    assert solo.phases.phase is P.BOUNDARY and solo.subject.stops == 1
    leaves(solo)
    assert solo.kept == [(3, "jit", "SIGTERM")]


def test_a_fault_of_the_agent_takes_nothing_from_a_boundary_that_is_being_saved(solo: Solo) -> None:
    solo.notify(P.BOUNDARY)
    solo.subject.before_capture = solo.strategy.fault
    leaves(solo)
    assert solo.kept == [(3, "jit", "SIGTERM")]


# ---- the boundary ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("phase", [P.HOLDING, P.BOUNDARY, P.INSTANT])
def test_a_boundary_saves_and_leaves(
    solo: Solo, tmp_path: Path, caplog: pytest.LogCaptureFixture, phase: Phase
) -> None:
    caplog.set_level(logging.INFO, "lastcall")
    solo.notify(phase)
    leaves(solo)
    assert solo.kept == [(3, "jit", "SIGTERM")] and testing.assert_resumable(tmp_path, 3, exact=True)
    assert solo.context.outcome.saved and solo.answer.arrived
    assert (
        "Saving step 3: full, needs about" in caplog.text
        and "After SIGTERM: saved checkpoint-3 (exact)" in caplog.text
    )


def test_a_boundary_waits_for_the_rescue_in_progress_and_finds_that_it_has_answered(solo: Solo) -> None:
    solo.notify(P.SAVING_ASIDE)
    waits = threading.Event()
    wait_while = solo.phases.wait_while
    solo.phases.wait_while = lambda *args: (waits.set(), wait_while(*args))[1]  # type: ignore[method-assign]

    def agent() -> None:
        assert waits.wait(PATIENCE)
        solo.answer.saved("rescued step 3")

    _, left = at_once(agent, solo.strategy.at_boundary)
    assert isinstance(left, errors.Preempted) and left.code == 75
    # COMMITTED where this thread leaves between the agent's commit and its word on it.
    assert solo.kept == [] and solo.phases.phase in (P.COMMITTED, P.LEAVING)


def test_a_boundary_that_looks_while_a_rescue_commits_does_not_save_again(solo: Solo) -> None:
    """The commit falls between its look at the phase and its own change."""
    solo.notify(P.SAVING_ASIDE)
    try_enter = solo.phases.try_enter

    def beside(phase: Phase, *args: object, **more: object) -> bool:
        if phase is P.SAVING and not solo.answer.whole:
            solo.answer.saved("rescued step 2")
        return try_enter(phase, *args, **more)  # type: ignore[arg-type]

    solo.phases.try_enter = beside  # type: ignore[method-assign, assignment]
    leaves(solo)
    assert solo.kept == [] and solo.answer.whole


def test_a_boundary_does_not_wait_for_a_rescue_after_the_session_has_ended(solo: Solo) -> None:
    solo.notify(P.SAVING_ASIDE)
    solo.phases.close()
    solo.strategy.at_boundary()
    assert solo.phases.phase is P.SAVING_ASIDE


def test_a_boundary_that_is_committed_already_is_not_written_again(solo: Solo) -> None:
    solo.checkpointer.save(solo.subject.capture(), Kind.MANUAL, "run.save()")
    solo.notify(P.BOUNDARY)
    leaves(solo)
    assert [kind for _, kind, _ in solo.kept] == ["manual"]


def test_a_boundary_after_the_deadline_saves_all_the_same(
    solo: Solo, caplog: pytest.LogCaptureFixture
) -> None:
    solo.notify(P.BOUNDARY)
    solo.clock.advance(60.0)
    leaves(solo)
    assert (
        solo.kept == [(3, "jit", "SIGTERM")]
        and "The deadline has passed, but this process is still alive" in caplog.text
    )


def test_a_boundary_that_cannot_be_saved_leaves_with_the_code_of_its_signal(broken: Solo) -> None:
    broken.notify(P.BOUNDARY)
    leaves(broken, 143)
    assert broken.context.outcome.value is Outcome.NOT_SAVED and broken.kept == []
    assert [facts["save"] for facts in broken.said("not-saved")] == ["jit"]
    assert [facts["phase"] for facts in broken.said("phase")][-3:] == ["saving", "failed", "leaving"]


def test_a_boundary_that_cannot_be_saved_after_a_rescue_in_part_leaves_as_saved(solo: Solo) -> None:
    solo.notify(P.SAVING_ASIDE)
    solo.answer.saved_in_part("rescued a part")

    def fail() -> None:
        raise errors.StateError("a lambda was put into the state")

    solo.subject.before_capture = fail
    leaves(solo, 75)


def test_a_boundary_finds_that_the_agent_leaves_and_saves_nothing_more(solo: Solo) -> None:
    solo.notify(P.SAVING_ASIDE)
    solo.answer.saved("rescued step 3")
    solo.phases.enter(P.LEAVING)
    leaves(solo)
    assert solo.kept == []


def raising_once(solo: Solo, error: BaseException) -> None:
    """The state of the user's own objects raises when it is asked for the first time."""
    asked = iter([error])

    def fail() -> None:
        for each in asked:
            raise each

    solo.subject.before_capture = fail


def test_an_error_that_nobody_expects_at_the_boundary_is_followed_by_a_rescue(
    solo: Solo, tmp_path: Path
) -> None:
    """A state_dict() of the user's may raise anything; it must not keep the process from leaving."""
    raising_once(solo, KeyError("momentum"))
    solo.notify(P.BOUNDARY)
    with pytest.raises(KeyError) as raised:
        solo.strategy.at_boundary()
    assert solo.phases.phase is P.SAVING
    solo.strategy.failed(raised.value)
    assert solo.phases.phase is P.COMMITTED and solo.context.outcome.saved
    assert solo.kept == [(3, "rescue", "SIGTERM")] and testing.assert_resumable(tmp_path, 3)


def test_an_error_that_nobody_expects_and_that_does_not_go_away_is_a_notice_not_saved(solo: Solo) -> None:
    def fail() -> None:
        raise KeyError("momentum")

    solo.subject.before_capture = fail
    solo.notify(P.BOUNDARY)
    with pytest.raises(KeyError) as raised:
        solo.strategy.at_boundary()
    solo.strategy.failed(raised.value)
    assert solo.phases.phase is P.FAILED and not solo.context.outcome.saved and solo.kept == []


def test_a_loop_that_catches_an_error_at_its_boundary_saves_at_the_next_one(solo: Solo) -> None:
    raising_once(solo, KeyError("momentum"))
    solo.notify(P.BOUNDARY)
    with pytest.raises(KeyError):
        solo.strategy.at_boundary()
    solo.train(1)
    leaves(solo)
    assert solo.kept == [(4, "jit", "SIGTERM")]


# ---- training raises ---------------------------------------------------------------------------------------

ERROR = ValueError("a bad batch")


@pytest.mark.parametrize("phase", BEFORE)
def test_training_that_raises_after_a_notice_is_saved_at_once_however_far_the_answer_is(
    solo: Solo, phase: Phase
) -> None:
    solo.notify(phase)
    solo.strategy.failed(ERROR)
    assert solo.phases.phase is P.COMMITTED and solo.context.outcome.saved
    assert solo.kept == [(3, "rescue", "SIGTERM")]


def test_training_that_raises_without_a_notice_is_nobodys_answer(solo: Solo) -> None:
    solo.strategy.failed(ERROR)
    assert solo.phases.phase is P.QUIET and solo.kept == [] and not solo.context.outcome.decided


@pytest.mark.parametrize("phase", BEFORE)
@pytest.mark.parametrize("why", ["torn", "barred", "switched off"])
def test_training_that_raises_where_its_last_step_cannot_be_saved_has_failed_to_answer(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, phase: Phase, why: str
) -> None:
    with Solo(tmp_path, rescue=why != "switched off") as solo:
        solo.notify(phase)
        if why == "torn":
            solo.context.gate.enter()
        solo.subject.barred = "the model is compiled" if why == "barred" else ""
        solo.strategy.failed(ERROR)
        words = {
            "torn": "ValueError came inside optimizer.step()",
            "barred": "the model is compiled",
            "switched off": "rescue is switched off",
        }
        assert f"The last completed step cannot be saved: {words[why]}" in caplog.text
        assert solo.phases.phase is P.FAILED and solo.kept == [] and not solo.context.outcome.decided


def test_training_that_raises_beside_a_rescue_waits_for_it(solo: Solo) -> None:
    solo.notify(P.SAVING_ASIDE)
    waits = threading.Event()
    wait_while = solo.phases.wait_while
    solo.phases.wait_while = lambda *args: (waits.set(), wait_while(*args))[1]  # type: ignore[method-assign]

    def agent() -> None:
        assert waits.wait(PATIENCE)
        solo.answer.saved_in_part("rescued a part")

    assert at_once(agent, lambda: solo.strategy.failed(ERROR)) == [None, None]
    assert solo.context.outcome.saved and solo.kept == []


def test_training_that_raises_after_its_notice_was_answered_changes_nothing(solo: Solo) -> None:
    solo.notify(P.BOUNDARY)
    leaves(solo)
    solo.strategy.failed(ERROR)
    assert solo.context.outcome.saved and len(solo.kept) == 1 and solo.phases.phase is P.LEAVING


def test_training_that_raises_after_the_session_has_ended_waits_for_nobody(solo: Solo) -> None:
    solo.notify(P.SAVING_ASIDE)
    solo.phases.close()
    solo.strategy.failed(ERROR)
    assert solo.context.outcome.saved  # the last step is whole, and nobody else saves it any more


# ---- it raises without a notice ----------------------------------------------------------------------------


def test_an_error_without_a_notice_leaves_the_last_step_saved_and_says_so(
    solo: Solo, caplog: pytest.LogCaptureFixture
) -> None:
    solo.strategy.failed_without_notice(ERROR)
    assert solo.kept == [(3, "rescue", "ValueError: a bad batch")] and not solo.context.outcome.decided
    assert "ValueError left the block at step 3; checkpoint-3 is saved (exact)" in caplog.text


@pytest.mark.parametrize(
    ("error", "reason"), [(SystemExit(3), "sys.exit()"), (KeyboardInterrupt(), "Ctrl-C")]
)
def test_what_left_the_block_is_named_as_the_script_would(
    solo: Solo, error: BaseException, reason: str
) -> None:
    solo.strategy.failed_without_notice(error)
    assert solo.kept == [(3, "rescue", reason)]


def test_an_error_before_the_first_step_saves_nothing_and_says_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with Solo(tmp_path, steps=0) as solo:
        caplog.clear()
        solo.strategy.failed_without_notice(ERROR)
        assert solo.kept == [] and caplog.text == ""


def test_an_error_at_a_boundary_that_is_saved_is_not_saved_again(
    solo: Solo, caplog: pytest.LogCaptureFixture
) -> None:
    solo.checkpointer.save(solo.subject.capture(), Kind.MANUAL, "run.save()")
    solo.strategy.failed_without_notice(ERROR)
    assert len(solo.kept) == 1 and "checkpoint-3 is saved (exact)" in caplog.text


@pytest.mark.parametrize("why", ["torn", "barred", "on_error"])
def test_an_error_that_leaves_the_last_step_unsaved_says_why_and_which_checkpoint_is_there(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, why: str
) -> None:
    with Solo(tmp_path, on_error="leave" if why == "on_error" else "save") as solo:
        solo.checkpointer.save(solo.subject.capture(), Kind.MANUAL, "run.save()")
        solo.train(1)
        if why == "torn":
            solo.context.gate.enter()
        solo.subject.barred = "the model is compiled" if why == "barred" else ""
        solo.strategy.failed_without_notice(ERROR)
        words = {
            "torn": "ValueError came inside optimizer.step()",
            "barred": "the model is compiled",
            "on_error": "LASTCALL_ON_ERROR is 'leave'",
        }
        assert len(solo.kept) == 1
        assert (
            f"ValueError left the block at step 4, which is not saved: {words[why]}; the newest checkpoint "
            "is checkpoint-3" in caplog.text
        )


def test_an_error_on_a_broken_disk_is_still_the_one_that_is_raised(
    broken: Solo, caplog: pytest.LogCaptureFixture
) -> None:
    broken.strategy.failed_without_notice(ERROR)
    assert (
        "ValueError left the block at step 3, which is not saved" in caplog.text
        and "there is no checkpoint" in caplog.text
    )
    assert [facts["save"] for facts in broken.said("not-saved")] == ["rescue"]


# ---- the end -----------------------------------------------------------------------------------------------


def finish(solo: Solo, reason: str = FINISHED, *, save: bool = True) -> None:
    solo.strategy.finish(reason, save=save, had_finished=solo.started.had_finished)


def test_training_that_finishes_leaves_a_final_checkpoint(
    solo: Solo, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "lastcall")
    finish(solo)
    assert (
        solo.kept == [(3, "final", FINISHED)]
        and solo.context.outcome.value is Outcome.FINISHED
        and solo.phases.closed
    )
    assert "Training finished at step 3; saved checkpoint-3" in caplog.text


def test_training_that_is_left_early_says_so(solo: Solo, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "lastcall")
    finish(solo, "the loop was left at step 3 of 9")
    assert "The loop was left at step 3 of 9; saved checkpoint-3" in caplog.text


def test_nothing_is_saved_at_an_end_where_nothing_is_wanted(solo: Solo) -> None:
    finish(solo, save=False)
    assert solo.kept == [] and solo.context.outcome.value is Outcome.FINISHED and solo.phases.closed


def test_a_restart_after_the_end_writes_nothing(tmp_path: Path) -> None:
    with Solo(tmp_path) as first:
        finish(first)
    with Solo(tmp_path, steps=0) as again:
        finish(again)
        assert len(again.kept) == 1 and again.context.outcome.value is Outcome.FINISHED


@pytest.mark.parametrize(("reason", "kind"), [(FINISHED, "manual"), ("early", "final")])
def test_an_end_at_a_boundary_that_was_saved_is_written_again_only_where_it_says_more(
    solo: Solo, reason: str, kind: str
) -> None:
    solo.checkpointer.save(solo.subject.capture(), Kind.MANUAL, "run.save()")
    finish(solo, reason)
    assert [each for _, each, _ in solo.kept] == [kind]


@pytest.mark.parametrize(("notified", "outcome"), [(False, Outcome.FAILED), (True, Outcome.NOT_SAVED)])
def test_an_end_that_cannot_be_saved_is_no_end(broken: Solo, notified: bool, outcome: Outcome) -> None:
    if notified:
        broken.notify()
    with pytest.raises(errors.SaveError, match=r"the end of training \(step 3\) is lost with this process"):
        finish(broken)
    assert broken.context.outcome.value is outcome and [
        facts["save"] for facts in broken.said("not-saved")
    ] == ["final"]


def test_an_end_that_cannot_be_saved_beside_a_rescue_that_was_is_still_an_error_of_the_save(
    broken: Solo,
) -> None:
    """The rescue commits while the end waits for it: the notice is answered, the end of training is not
    saved."""
    broken.notify(P.SAVING_ASIDE)
    broken.periodic.wait = lambda: broken.answer.saved("rescued step 2")  # type: ignore[method-assign]
    with pytest.raises(errors.SaveError, match=r"the end of training \(step 3\) is lost"):
        finish(broken)
    assert broken.context.outcome.saved


def test_a_notice_at_the_end_needs_no_answer(solo: Solo, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "lastcall")
    solo.notify(P.BOUNDARY)
    finish(solo)
    assert "Training finished: the notice needs no answer" in caplog.text
    assert solo.kept == [(3, "final", FINISHED)] and solo.context.outcome.value is Outcome.FINISHED
