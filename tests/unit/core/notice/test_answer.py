"""One notice on its way to an outcome: its deadline, how it is answered, and how the process leaves."""

from __future__ import annotations

import logging
import sys
from functools import partial
from pathlib import Path

import pytest

from helpers.core.answers import NOW, Left, Stage, a_notice, nobody_leaves
from lastcall import errors
from lastcall.core.notice.answer import Answer
from lastcall.core.notice.phases import Phase
from lastcall.types import Notice, Outcome

P = Phase


@pytest.fixture(autouse=True)
def _nobody_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    nobody_leaves(monkeypatch)


@pytest.fixture
def stage(tmp_path: Path) -> Stage:
    return Stage(tmp_path)


@pytest.fixture
def answer(stage: Stage) -> Answer:
    return stage.answer


@pytest.fixture
def outside_of_a_test(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a loop that catches Preempted is left by force."""
    monkeypatch.delitem(sys.modules, "pytest")


def told(stage: Stage, notice: Notice | None = None) -> Notice:
    notice = notice or a_notice()
    stage.context.latch.offer(notice)
    return notice


def lost(grace: float = 30.0) -> Notice:
    return Notice("lost", "rank 1 is gone", NOW, NOW + grace)


# ---- the notice --------------------------------------------------------------------------------------------


def test_without_a_beginning_the_notice_is_that_of_the_latch(stage: Stage, answer: Answer) -> None:
    notice = told(stage)
    assert answer.notice is notice


def test_the_loss_of_a_rank_is_answered_although_no_latch_holds_it(answer: Answer) -> None:
    answer.begin(lost())
    assert answer.notice == lost() and answer.deadline == NOW + 30.0


def test_the_loss_of_a_rank_is_answered_also_where_a_notice_has_come_and_the_earlier_deadline_counts(
    stage: Stage, answer: Answer
) -> None:
    answer.begin(lost(30.0))
    told(stage, a_notice(10.0))
    assert answer.notice == lost(30.0) and answer.deadline == NOW + 10.0
    answer.begin(lost(5.0))
    assert answer.deadline == NOW + 5.0


def test_a_later_notice_shortens_the_deadline_of_the_one_that_is_answered_and_never_extends_it(
    stage: Stage, answer: Answer
) -> None:
    answer.begin(told(stage))
    told(stage, a_notice(60.0, at=NOW + 1))
    assert answer.deadline == NOW + 30.0
    told(stage, a_notice(5.0, at=NOW + 1))
    assert answer.deadline == NOW + 6.0
    stage.clock.advance(2.0)
    assert answer.left == 4.0


def test_without_a_deadline_the_grace_counts_from_the_notice(stage: Stage, answer: Answer) -> None:
    answer.begin(told(stage, a_notice(None)))
    stage.clock.advance(7.0)
    assert (answer.deadline, answer.left) == (NOW + 30.0, 23.0)


def test_a_signal_that_comes_while_a_request_is_answered_is_what_a_run_that_cannot_save_dies_of(
    stage: Stage, answer: Answer
) -> None:
    """A cloud's word first, SIGTERM half a minute later: without a checkpoint the exit code is the
    signal's."""
    answer.begin(told(stage, a_notice(source="cloud", signum=None)))
    assert answer.exit_code == 1
    told(stage, a_notice(at=NOW + 5, signum=15))
    assert answer.exit_code == 143 and answer.preempted().code == 143
    with pytest.raises(Left, match="signal 15"):
        answer.leave_by_force("The deadline has come")


def test_after_a_reset_nothing_of_the_last_notice_is_left(stage: Stage, answer: Answer) -> None:
    stage.phases.enter(P.SAVING)
    answer.begin(lost(), passing=True)
    answer.arrived = True
    answer.saved("saved checkpoint-5")
    answer.reset()
    assert (answer.whole, answer.committed, answer.passing, answer.arrived) == (False, False, False, False)
    notice = told(stage)
    assert answer.notice is notice


# ---- how it ends -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("phase", [P.SAVING, P.INSTANT, P.BOUNDARY])
def test_an_exact_checkpoint_answers_the_notice(
    stage: Stage, answer: Answer, caplog: pytest.LogCaptureFixture, phase: Phase
) -> None:
    caplog.set_level(logging.INFO, "lastcall")
    for step in {
        P.SAVING: [P.SAVING],
        P.BOUNDARY: [P.HOLDING, P.BOUNDARY],
        P.INSTANT: [P.HOLDING, P.INSTANT],
    }[phase]:
        stage.phases.enter(step)
    answer.begin(told(stage))
    answer.saved("saved checkpoint-5")
    assert answer.whole and answer.committed and stage.context.outcome.saved
    assert (stage.phases.phase, stage.phases.because) == (P.COMMITTED, "saved checkpoint-5")
    assert "After SIGTERM: saved checkpoint-5" in caplog.text


def test_what_is_committed_twice_is_answered_once(stage: Stage, answer: Answer) -> None:
    """Both threads may say it where the ranks gave a boundary up that was committed all the same."""
    stage.phases.enter(P.SAVING)
    answer.saved("saved checkpoint-5")
    answer.saved("saved checkpoint-5 together")
    assert stage.names == [P.SAVING, P.COMMITTED] and stage.phases.because == "saved checkpoint-5"


def test_a_checkpoint_in_part_is_committed_and_nothing_is_decided(stage: Stage, answer: Answer) -> None:
    stage.phases.enter(P.SAVING)
    answer.saved_in_part("rescued a part")
    assert answer.committed and not answer.whole and not stage.context.outcome.decided
    assert stage.phases.phase is P.COMMITTED


def test_an_attempt_that_failed_is_an_event_and_decides_nothing(stage: Stage, answer: Answer) -> None:
    heard: list[tuple[str, dict[str, object]]] = []
    stage.context.events.heard = lambda at, kind, facts: heard.append((kind, dict(facts)))
    answer.not_saved("jit", "no space", step=3)
    assert heard == [("not-saved", {"save": "jit", "because": "no space", "step": 3})]
    assert not stage.context.outcome.decided and stage.names == []


@pytest.mark.parametrize(
    ("outcome", "signum", "code", "words"),
    [
        (Outcome.SAVED, 15, 75, "saved and stopped after SIGTERM"),
        (Outcome.SAVED, None, 75, "saved and stopped after SIGTERM"),
        (Outcome.SAVED, 2, 130, "saved and stopped after SIGTERM"),
        (Outcome.NOT_SAVED, 15, 143, "stopped without a checkpoint after SIGTERM"),
        (Outcome.NOT_SAVED, None, 1, "stopped without a checkpoint after SIGTERM"),
        (Outcome.NOT_SAVED, 10, 138, "stopped without a checkpoint after SIGTERM"),
    ],
)
def test_what_leaves_the_loop_says_whether_it_is_saved(
    stage: Stage, answer: Answer, outcome: Outcome, signum: int | None, code: int, words: str
) -> None:
    told(stage, a_notice(signum=signum))
    stage.context.outcome.decide(outcome)
    error = answer.preempted()
    assert (error.code, answer.exit_code) == (code, code) and words in str(error)


def test_the_exit_code_is_the_configured_one(tmp_path: Path) -> None:
    stage = Stage(tmp_path, exit_code=85)
    told(stage)
    stage.context.outcome.decide(Outcome.SAVED)
    assert stage.answer.exit_code == 85


# ---- leaving -----------------------------------------------------------------------------------------------


def test_training_is_left_alone_until_a_whole_checkpoint_is_committed(stage: Stage, answer: Answer) -> None:
    told(stage)
    answer.leave_if_saved()
    stage.phases.enter(P.SAVING)
    answer.saved_in_part("rescued a part")
    answer.leave_if_saved()
    assert stage.names == [P.SAVING, P.COMMITTED]


def test_training_leaves_once_a_whole_checkpoint_is_committed(stage: Stage, answer: Answer) -> None:
    told(stage)
    stage.phases.enter(P.SAVING)
    answer.saved("rescued step 5")
    with pytest.raises(errors.Preempted) as left:
        answer.leave_if_saved()
    assert left.value.code == 75 and stage.phases.phase is P.LEAVING


def test_training_continues_where_a_hang_was_saved(stage: Stage, answer: Answer) -> None:
    stage.phases.enter(P.SAVING)
    answer.begin(lost(), passing=True)
    answer.saved("saved step 5")
    answer.leave_if_saved()
    assert stage.phases.phase is P.COMMITTED


@pytest.mark.usefixtures("outside_of_a_test")
def test_a_training_thread_that_leaves_while_the_agent_still_says_what_it_has_saved_leaves_by_itself(
    stage: Stage, answer: Answer
) -> None:
    """It looks between the commit and the change of the phase, which a log handler may draw out."""
    told(stage)
    for phase in (P.HOLDING, P.INSTANT, P.SAVING_ASIDE):
        stage.phases.enter(phase)
    left: list[object] = []

    class Looks(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            try:
                answer.leave_if_saved()
            except BaseException as error:
                left.append(error)

    log, looks = logging.getLogger("lastcall"), Looks(logging.INFO)
    log.addHandler(looks)
    level, _ = log.level, log.setLevel(logging.INFO)
    try:
        answer.saved("rescued step 5")
    finally:
        log.removeHandler(looks)
        log.setLevel(level)
    assert [type(error) for error in left] == [errors.Preempted] and getattr(left[0], "code", None) == 75
    assert stage.phases.phase is P.COMMITTED and not stage.wound_up


@pytest.mark.usefixtures("outside_of_a_test")
def test_a_training_thread_that_comes_while_the_agent_leaves_by_force_is_not_blamed(
    stage: Stage, answer: Answer
) -> None:
    told(stage)
    stage.phases.enter(P.SAVING)
    answer.saved("rescued step 5")
    stage.phases.enter(P.LEAVING, "the training thread does not return")
    with pytest.raises(errors.Preempted):
        answer.leave()
    assert not stage.wound_up


@pytest.mark.usefixtures("outside_of_a_test")
def test_a_loop_that_catches_preempted_and_continues_is_not_asked_twice(
    stage: Stage, answer: Answer, caplog: pytest.LogCaptureFixture
) -> None:
    told(stage)
    stage.phases.enter(P.SAVING)
    answer.saved("rescued step 5")
    with pytest.raises(errors.Preempted):
        answer.leave()
    with pytest.raises(Left, match="75"):
        answer.leave()
    assert (
        "The training loop caught Preempted and continued: leaving with exit code 75" in caplog.text
        and stage.wound_up == 1
    )


def test_in_a_test_a_loop_may_catch_preempted(stage: Stage, answer: Answer) -> None:
    told(stage)
    stage.phases.enter(P.SAVING)
    answer.saved("rescued step 5")
    for _ in range(2):
        with pytest.raises(errors.Preempted):
            answer.leave()


@pytest.mark.parametrize(
    ("outcome", "signum", "by_signal", "way"),
    [
        (Outcome.SAVED, 15, True, "75"),
        (Outcome.NOT_SAVED, 15, True, "signal 15"),
        (Outcome.NOT_SAVED, 15, False, "143"),
        (Outcome.NOT_SAVED, None, True, "1"),
        (None, 15, True, "signal 15"),
    ],
)
def test_a_process_that_is_left_by_force_is_wound_up_first_and_dies_of_its_signal_where_nothing_is_saved(
    stage: Stage, answer: Answer, outcome: Outcome | None, signum: int | None, by_signal: bool, way: str
) -> None:
    told(stage, a_notice(signum=signum))
    if outcome is not None:
        stage.context.outcome.decide(outcome)
    with pytest.raises(Left) as left:
        answer.leave_by_force("Stuck", by_signal=by_signal)
    assert str(left.value) == way and stage.wound_up == 1


def test_nothing_needs_to_be_wound_up(stage: Stage) -> None:
    told(stage)
    with pytest.raises(Left):
        Answer(stage.context, stage.phases).leave_by_force("Stuck")


def test_the_answer_of_a_notice_that_never_came_is_a_mistake(answer: Answer) -> None:
    for ask in (lambda: answer.notice, lambda: answer.deadline, partial(answer.preempted)):
        with pytest.raises(AssertionError):
            ask()
