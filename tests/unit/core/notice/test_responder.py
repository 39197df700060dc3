"""From a notice to its outcome, in the order that all adapters share: on a clock turned by hand, with a
scripted strategy."""

from __future__ import annotations

import logging
from functools import partial
from pathlib import Path

import pytest

from helpers.core.answers import NOW, Left, Stage, a_notice, nobody_leaves
from lastcall.core.notice.phases import Phase
from lastcall.core.notice.responder import Where
from lastcall.types import Notice, Outcome

P = Phase
NEVER = "The training thread does not return"


@pytest.fixture(autouse=True)
def _nobody_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    nobody_leaves(monkeypatch)


@pytest.fixture
def stage(tmp_path: Path) -> Stage:
    return Stage(tmp_path)


def rescue(stage: Stage, *, whole: bool = True) -> None:
    """What a strategy does from the side."""
    stage.phases.enter(P.SAVING_ASIDE)
    if whole:
        stage.answer.saved("rescued step 5")
    else:
        stage.answer.saved_in_part("rescued a part of step 5")


def later(stage: Stage, seconds: float, left: float) -> None:
    """At this time, a second notice leaves so many seconds."""
    stage.at(seconds, lambda: stage.context.latch.offer(a_notice(left, at=stage.clock.now())))


# ---- the kill wait -----------------------------------------------------------------------------------------


def test_training_continues_during_the_kill_wait_and_is_held_after_it(stage: Stage) -> None:
    stage.at(4.0, stage.save_and_leave)
    stage.run()
    assert stage.names == [P.WAITING, P.HOLDING, P.BOUNDARY, P.SAVING, P.COMMITTED, P.LEAVING]
    assert (stage.when(P.WAITING), stage.when(P.HOLDING)) == (0.0, 3.0)
    assert stage.called[:3] == ["announce", "hold", "decide"]
    assert (stage.why(P.WAITING), stage.why(P.BOUNDARY)) == ("SIGTERM", "the next boundary")


def test_the_kill_wait_counts_from_the_notice_and_not_from_its_answer(stage: Stage) -> None:
    stage.clock.advance(2.0)
    stage.at(4.0, stage.save_and_leave)
    stage.run()
    assert stage.when(P.HOLDING) == 3.0


@pytest.mark.parametrize(
    ("grace", "seconds", "wait"),
    [(10.0, 8.0, 1.0), (10.0, 7.5, 1.5), (10.0, 9.5, 0.0), (5.0, 60.0, 0.0), (5.0, 1.0, 3.0)],
)
def test_the_kill_wait_is_cut_where_the_save_would_come_too_late_after_it(
    stage: Stage, caplog: pytest.LogCaptureFixture, grace: float, seconds: float, wait: float
) -> None:
    caplog.set_level(logging.INFO, "lastcall")
    stage.seconds = seconds
    stage.on["decide"] = stage.save_and_leave
    stage.run(a_notice(grace))
    assert stage.when(P.HOLDING) == wait
    assert f"SIGTERM received, initiating JIT checkpoint in {wait:.1f}s" in caplog.text
    assert (
        f"Kill wait cut from 3.0s to {wait:.1f}s: the save needs about {seconds:.1f}s" in caplog.text
    ) is (wait < 3.0)


def test_a_notice_without_a_deadline_has_the_configured_grace(tmp_path: Path) -> None:
    stage = Stage(tmp_path, grace=9.0)
    stage.seconds = 7.0
    stage.on["decide"] = stage.save_and_leave
    stage.run(a_notice(None))
    assert stage.when(P.HOLDING) == 1.0


def test_a_later_notice_that_leaves_less_time_ends_the_kill_wait(stage: Stage) -> None:
    later(stage, 1.0, 0.5)
    stage.on["decide"] = stage.save_and_leave
    stage.run()
    assert stage.when(P.HOLDING) == 1.5


def test_a_notice_is_not_answered_twice_where_training_raised_and_its_thread_saves(stage: Stage) -> None:
    stage.phases.enter(P.SAVING)
    stage.run()
    assert stage.names == [P.SAVING] and stage.called == []


def test_training_that_raises_during_the_kill_wait_is_not_held(stage: Stage) -> None:
    stage.at(1.0, partial(stage.phases.enter, P.SAVING))
    stage.run()
    assert stage.names == [P.WAITING, P.SAVING] and stage.called == ["announce"]
    assert stage.clock.now() == NOW + 1.0  # at once, and not at the end of the wait


def test_the_loss_of_a_rank_is_answered_at_once_and_from_the_side(stage: Stage) -> None:
    stage.is_hurried = True
    stage.on["aside"] = lambda: (rescue(stage), stage.phases.enter(P.LEAVING))
    stage.run(Notice("lost", "rank 1 is gone", NOW, NOW + 30.0))
    assert stage.names == [P.HOLDING, P.INSTANT, P.SAVING_ASIDE, P.COMMITTED, P.LEAVING]
    assert stage.why(P.INSTANT) == "rank 1 is gone"
    assert stage.called == ["announce", "hold", "aside"]
    assert stage.clock.now() == NOW


# ---- the boundary ------------------------------------------------------------------------------------------


def test_where_no_boundary_can_be_agreed_on_the_save_is_from_the_side(stage: Stage) -> None:
    stage.where = Where(boundary=False, because="training has failed here")
    stage.on["aside"] = lambda: (rescue(stage), stage.phases.enter(P.LEAVING))
    stage.run()
    assert stage.why(P.INSTANT) == "training has failed here"
    assert "boundary_until" not in stage.called and P.BOUNDARY not in stage.names


def test_training_that_has_finished_everywhere_is_dismissed_and_left_alone(stage: Stage) -> None:
    stage.where = Where(dismissed=True, because="all have finished")
    stage.run()
    assert (
        stage.names == [P.WAITING, P.HOLDING, P.DISMISSED] and stage.why(P.DISMISSED) == "all have finished"
    )
    assert stage.called == ["announce", "hold", "decide"]
    assert stage.context.outcome.value is None


def test_a_boundary_in_time_saves_and_nothing_else_does(stage: Stage) -> None:
    stage.at(5.0, stage.save_and_leave)
    stage.run()
    assert stage.names[-3:] == [P.SAVING, P.COMMITTED, P.LEAVING] and "aside" not in stage.called
    assert stage.context.outcome.saved and not stage.wound_up


def test_a_boundary_that_saves_while_the_ranks_still_agree_is_one_in_time(
    stage: Stage, caplog: pytest.LogCaptureFixture
) -> None:
    stage.on["decide"] = stage.save
    stage.run()
    assert stage.names[-1] is P.SAVING and stage.called == ["announce", "hold", "decide"]
    assert "nothing could be saved" not in caplog.text  # nobody knows that yet


def test_a_boundary_that_does_not_come_in_time_is_given_up(stage: Stage) -> None:
    stage.on["aside"] = lambda: (rescue(stage), stage.phases.enter(P.LEAVING))
    stage.run()
    assert (stage.when(P.INSTANT), stage.why(P.INSTANT)) == (8.0, "no boundary in time")


def test_a_boundary_that_is_being_saved_is_not_late(stage: Stage) -> None:
    stage.at(7.0, partial(stage.phases.enter, P.SAVING))
    stage.at(20.0, stage.commit_and_leave)
    stage.run()
    assert P.INSTANT not in stage.names and "hopeless saving" in stage.called


@pytest.mark.parametrize("saving", [False, True])
def test_a_boundary_without_hope_is_given_up_at_once_also_while_it_is_saved(
    stage: Stage, saving: bool
) -> None:
    def lose() -> None:
        if saving:
            stage.phases.enter(P.SAVING)
        stage.no_hope = "another rank cannot come to the boundary"

    stage.at(4.0, lose)
    stage.on["aside"] = lambda: (rescue(stage), stage.phases.enter(P.LEAVING))
    stage.run()
    assert (
        stage.when(P.INSTANT) <= 4.25 and stage.why(P.INSTANT) == "another rank cannot come to the boundary"
    )
    assert ("hopeless saving" in stage.called) is saving


def test_a_boundary_that_is_taken_in_the_very_moment_in_which_it_is_given_up_saves(stage: Stage) -> None:
    """The training thread comes between the look at the clock and the change."""

    def taken() -> None:
        stage.no_hope = ""
        stage.phases.enter(P.SAVING)

    stage.no_hope = "rank 1 is gone"
    stage.on["hopeless"] = taken
    stage.at(6.0, stage.commit_and_leave)
    stage.run()
    assert P.INSTANT not in stage.names and stage.names[-1] is P.LEAVING


def test_a_save_that_fails_at_the_boundary_is_followed_by_one_from_the_side(stage: Stage) -> None:
    def fails() -> None:
        stage.phases.enter(P.SAVING)
        stage.phases.enter(P.INSTANT, "the save at the agreed boundary failed")

    stage.at(4.0, fails)
    stage.on["aside"] = lambda: (rescue(stage), stage.phases.enter(P.LEAVING))
    stage.run()
    assert stage.names[3:] == [P.SAVING, P.INSTANT, P.SAVING_ASIDE, P.COMMITTED, P.LEAVING]


def test_a_later_notice_that_leaves_less_time_is_heard_while_a_boundary_is_waited_for(stage: Stage) -> None:
    stage.patience = 60.0  # the first step, say, takes as long as it takes
    later(stage, 4.0, 5.0)
    stage.on["aside"] = lambda: (rescue(stage), stage.phases.enter(P.LEAVING))
    stage.run()
    assert stage.when(P.INSTANT) == 8.0  # one second before the new deadline, which is what a save needs


# ---- the end -----------------------------------------------------------------------------------------------


def test_after_an_exact_rescue_a_training_thread_that_does_not_return_is_left_behind(
    stage: Stage, caplog: pytest.LogCaptureFixture
) -> None:
    stage.on["aside"] = partial(rescue, stage)
    with pytest.raises(Left, match="75"):
        stage.run()
    assert stage.clock.now() == NOW + 8.0 + 5.0  # it has five seconds to leave by itself
    assert f"{NEVER}: leaving with exit code 75" in caplog.text
    assert stage.why(P.LEAVING) == "the training thread does not return" and stage.wound_up == 1


def test_after_a_rescue_in_part_the_boundary_is_hoped_for_until_the_last_moment(stage: Stage) -> None:
    stage.on["aside"] = partial(rescue, stage, whole=False)
    with pytest.raises(Left, match="75"):
        stage.run()
    assert stage.clock.now() == NOW + 29.0 and stage.context.outcome.saved


@pytest.mark.parametrize(
    ("grace", "last"), [(30.0, 29.0), (10.0, 9.0), (8.0, 7.25), (5.0, 4.5), (100.0, 99.0)]
)
def test_a_stuck_process_is_left_a_tenth_of_the_grace_before_the_deadline_at_most_a_second(
    stage: Stage, grace: float, last: float
) -> None:
    stage.seconds, stage.patience = 0.25, 0.0
    stage.on["aside"] = partial(rescue, stage, whole=False)
    with pytest.raises(Left):
        stage.run(a_notice(grace))
    assert stage.clock.now() - NOW == pytest.approx(last, abs=0.25)


def test_a_better_checkpoint_that_comes_late_is_left_alone(stage: Stage) -> None:
    stage.on["aside"] = partial(rescue, stage, whole=False)
    stage.at(20.0, stage.save_and_leave)
    stage.run()
    assert stage.names[-4:] == [P.COMMITTED, P.SAVING, P.COMMITTED, P.LEAVING] and not stage.wound_up


def test_a_better_checkpoint_in_progress_at_the_last_moment_is_not_interrupted(stage: Stage) -> None:
    stage.on["aside"] = partial(rescue, stage, whole=False)
    stage.at(28.0, partial(stage.phases.enter, P.SAVING))
    stage.run()
    assert stage.names[-1] is P.SAVING and not stage.wound_up


def test_a_training_thread_that_leaves_by_itself_is_not_left_behind(stage: Stage) -> None:
    stage.on["aside"] = partial(rescue, stage)
    stage.at(9.0, partial(stage.phases.enter, P.LEAVING))
    stage.run()
    assert stage.clock.now() == NOW + 9.0 and not stage.wound_up


def test_a_boundary_that_is_committed_after_the_deadline_is_left_by_the_training_thread_alone(
    stage: Stage,
) -> None:
    """The agent finds it committed before the training thread has raised Preempted: that thread is no stuck
    one."""

    def commit() -> None:
        stage.answer.saved("saved checkpoint-5")

    stage.at(4.0, stage.save)
    stage.at(60.0, commit)
    stage.run()
    assert stage.names[-1] is P.COMMITTED and stage.context.outcome.saved and not stage.wound_up


def test_a_training_thread_at_its_boundary_is_not_taken_for_a_stuck_one_when_a_rescue_ends_late(
    stage: Stage,
) -> None:
    def late() -> None:
        stage.answer.arrived = True  # it waits at its boundary for the rescue
        stage.clock.advance(60.0)
        rescue(stage)

    stage.on["aside"] = late
    stage.run()
    assert stage.names[-1] is P.COMMITTED and not stage.wound_up


@pytest.mark.parametrize("arrived", [False, True])
def test_when_nothing_could_be_saved_the_strategy_says_how_it_ends(
    stage: Stage, caplog: pytest.LogCaptureFixture, arrived: bool
) -> None:
    stage.on["aside"] = partial(stage.phases.enter, P.FAILED, "no rank holds the whole state")
    stage.answer.arrived = arrived
    stage.run()
    assert (
        stage.clock.now() == NOW + 29.0 and "The deadline has come and nothing could be saved" in caplog.text
    )
    assert ("stuck" in stage.called) is not arrived  # one that has arrived finds the failure, and leaves


def test_a_strategy_that_hopes_for_the_boundary_all_the_same_gets_it(stage: Stage) -> None:
    stage.on["aside"] = partial(stage.phases.enter, P.BOUNDARY, "rescue is switched off")
    stage.at(25.0, stage.save_and_leave)
    stage.run()
    assert stage.names[-3:] == [P.SAVING, P.COMMITTED, P.LEAVING] and "stuck" not in stage.called


def test_a_later_notice_that_leaves_less_time_brings_the_last_moment_forward(stage: Stage) -> None:
    stage.on["aside"] = partial(rescue, stage, whole=False)
    later(stage, 10.0, 4.0)
    with pytest.raises(Left, match="75"):
        stage.run()
    assert stage.clock.now() == pytest.approx(NOW + 13.0, abs=0.25)


def test_training_that_is_dismissed_from_the_side_is_left_alone(stage: Stage) -> None:
    stage.on["aside"] = partial(stage.phases.enter, P.DISMISSED, "the final checkpoint is committed")
    stage.run()
    assert stage.names[-1] is P.DISMISSED and "stuck" not in stage.called


# ---- a hang that is saved ----------------------------------------------------------------------------------


def hang(stage: Stage) -> Notice:
    stage.is_hurried = True
    return Notice("hang", "rank 1 hangs", stage.clock.now(), stage.clock.now() + 30.0)


def test_after_a_hang_that_is_saved_training_continues_and_nobody_leaves(stage: Stage) -> None:
    stage.on["aside"] = partial(rescue, stage)
    stage.run(hang(stage), passing=True)
    assert (
        stage.names[-2:] == [P.COMMITTED, P.QUIET] and stage.called[-1] == "continues" and not stage.wound_up
    )


def test_after_a_hang_the_next_notice_is_answered_as_the_first(stage: Stage) -> None:
    stage.on["aside"] = partial(rescue, stage)
    stage.on["continues"] = stage.answer.reset
    stage.run(hang(stage), passing=True)
    stage.is_hurried = False
    stage.changes.clear()
    stage.at(4.0, stage.save_and_leave)
    stage.run()
    assert stage.names == [P.WAITING, P.HOLDING, P.BOUNDARY, P.SAVING, P.COMMITTED, P.LEAVING]


def test_after_a_hang_where_training_cannot_continue_the_end_is_that_of_a_notice(stage: Stage) -> None:
    stage.on["aside"] = partial(rescue, stage)
    stage.on["continues"] = partial(stage.phases.enter, P.LEAVING)  # so that QUIET is refused
    stage.run(hang(stage), passing=True)
    assert stage.names[-1] is P.LEAVING


def test_after_a_boundary_was_saved_training_continues_where_nobody_would_restart_it(stage: Stage) -> None:
    """Ray's workers: a report that saves leaves the process where it is."""
    stage.at(4.0, partial(stage.phases.enter, P.SAVING))
    stage.at(5.0, partial(stage.answer.saved, "saved checkpoint-5"))
    stage.run(passing=True)
    assert (
        stage.names[-3:] == [P.SAVING, P.COMMITTED, P.QUIET]
        and stage.called[-1] == "continues"
        and not stage.wound_up
    )


def test_a_save_of_the_scripts_own_that_fails_is_stuck_where_its_thread_does_not_leave(stage: Stage) -> None:
    """A script that knows nothing of lastcall trains on after its save has come to nothing."""
    stage.at(4.0, partial(stage.phases.enter, P.SAVING))
    stage.at(5.0, partial(stage.phases.enter, P.FAILED, "its own save did not save"))
    stage.run()
    assert stage.called[-1] == "stuck" and stage.clock.now() == NOW + 29.0


def test_a_notice_that_is_no_hang_never_asks_whether_training_continues(stage: Stage) -> None:
    stage.on["aside"] = lambda: (rescue(stage), stage.phases.enter(P.LEAVING))
    stage.run()
    assert "continues" not in stage.called


def test_a_session_that_ends_during_a_hang_is_not_continued(stage: Stage) -> None:
    stage.on["aside"] = lambda: (rescue(stage), stage.phases.close())
    stage.run(hang(stage), passing=True)
    assert "continues" not in stage.called and not stage.wound_up


# ---- the session ends, or something is wrong ---------------------------------------------------------------


def test_a_session_that_ends_during_the_kill_wait_is_not_waited_for(stage: Stage) -> None:
    stage.at(1.0, stage.phases.close)
    stage.run()
    assert stage.clock.now() == NOW + 1.0 and not stage.wound_up


@pytest.mark.parametrize("moment", ["announce", "hold", "decide", "boundary_until", "hopeless", "aside"])
def test_a_session_that_ends_at_any_moment_ends_the_answer_and_nobody_is_forced_out(
    stage: Stage, caplog: pytest.LogCaptureFixture, moment: str
) -> None:
    stage.on[moment] = stage.phases.close
    stage.run()
    assert stage.clock.now() <= NOW + 8.25 and not stage.wound_up
    assert "stuck" not in stage.called and "nothing could be saved" not in caplog.text


def test_a_session_that_ends_while_the_boundary_is_saved_is_not_waited_for(stage: Stage) -> None:
    stage.at(4.0, partial(stage.phases.enter, P.SAVING))
    stage.at(5.0, stage.phases.close)
    stage.run()
    assert stage.names[-1] is P.SAVING and stage.clock.now() == NOW + 5.0


@pytest.mark.parametrize("whole", [True, False])
def test_a_session_that_ends_after_the_rescue_is_not_forced_out(stage: Stage, whole: bool) -> None:
    stage.on["aside"] = partial(rescue, stage, whole=whole)
    stage.at(9.0, stage.phases.close)
    stage.run()
    assert stage.clock.now() == NOW + 9.0 and stage.names[-1] is P.COMMITTED and not stage.wound_up


@pytest.mark.parametrize("moment", ["announce", "hold", "decide", "boundary_until", "hopeless", "aside"])
def test_a_fault_of_the_strategy_reaches_the_caller(stage: Stage, moment: str) -> None:
    def fail() -> None:
        raise ZeroDivisionError(moment)

    stage.on[moment] = fail
    with pytest.raises(ZeroDivisionError, match=moment):
        stage.run()
    stage.responder.fault()
    assert stage.called[-1] == "fault" and not stage.wound_up


def test_an_outcome_that_was_decided_in_between_stays_when_a_process_is_left(stage: Stage) -> None:
    stage.on["aside"] = partial(rescue, stage)
    with pytest.raises(Left):
        stage.run()
    assert stage.context.outcome.value is Outcome.SAVED
