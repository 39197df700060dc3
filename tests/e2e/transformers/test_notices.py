"""What else may happen between a notice and its save, with a Trainer: a periodic save of the same step, an
exception, a full disk."""

from __future__ import annotations

import signal

from helpers.trainer.jobs import KILLED, Play, Stage, Strike
from helpers.trainer.plan import Plan

LONG_WAIT = (("LASTCALL_KILL_WAIT_SECONDS", "20"),)


def test_a_step_that_is_saved_periodically_is_not_saved_again_for_a_notice(stage: Stage) -> None:
    """The notice comes in the evaluation of a save step; the next step takes long, so the ranks agree on the
    one before it."""
    plan = Plan(
        steps=9,
        save="steps",
        save_steps=4,
        evaluate="steps",
        eval_batches=8,
        eval_seconds=0.2,
        long=4,
        save_seconds=0.8,
    )
    strikes = (Strike("evaluating", 4, ranks=(1,)),)
    # the long step itself
    result = stage.result(Play(plan, strikes, ranks=2, on_save=True, lost=1), "lastcall")
    assert not result.complaints, result.story()
    for rank in range(2):
        assert result.lives[0].steps("on_save", rank) == [4], result.story()
    assert ": step 4 is already committed" in result.lives[0].log, result.story()


def test_a_notice_is_served_although_training_raises_before_its_save(stage: Stage) -> None:
    result = stage.result(Play(Plan(raises=12), on_save=True, env=LONG_WAIT), "lastcall")
    assert not result.complaints, result.story()
    life = result.lives[0]
    assert life.checkpoints == [12], result.story()
    assert "Traceback" in life.log and "ValueError: a bad batch" in life.log, result.story()


def test_two_ranks_serve_a_notice_although_one_of_them_raises(stage: Stage) -> None:
    wait = (("LASTCALL_KILL_WAIT_SECONDS", "1"),)
    result = stage.result(
        Play(Plan(raises=8), (Strike(ranks=(1,)),), ranks=2, env=wait, resumed=False), "lastcall"
    )
    assert not result.complaints, result.story()
    assert "ValueError: a bad batch" in result.lives[0].log, result.story()


def test_what_cannot_be_saved_dies_of_the_signal_and_says_so(stage: Stage) -> None:
    result = stage.result(Play(Plan(no_space=True), codes=(KILLED,), lost=99, resumed=False), "lastcall")
    life = result.lives[0]
    assert set(life.codes.values()) == {-signal.SIGTERM}, result.story()
    assert life.log.rstrip().endswith("Nothing was saved: exiting with SIGTERM"), result.story()
    assert life.checkpoints == [], result.story()
